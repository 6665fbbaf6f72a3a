"""Plans against NumPy: a small executor follows every plan and writes each element of the output once."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.plan.strategies import keys, layout, layouts, numbered, outer_keys, shapes
from xgpuzarr.errors import UnsupportedError
from xgpuzarr.plan.read_plan import ReadPlan, plan_read
from xgpuzarr.plan.selection import AxisSlice, Points, parse_numpy, parse_outer

if TYPE_CHECKING:
    from xgpuzarr.plan.layout import ArrayLayout

    Array = np.ndarray[Any, Any]

OUTSIDE = -1
"""Elements of edge chunks beyond the array."""


def decoded_chunks(array: Array, plan: ReadPlan) -> Array:
    """The batch of all chunks of `plan`, as a decoder would deliver it."""
    layout = plan.layout
    padded = np.full([g * c for g, c in zip(layout.grid_shape, layout.chunk_shape, strict=True)], OUTSIDE)
    padded[tuple(map(slice, array.shape))] = array
    batch = np.empty((plan.n_chunks, *layout.chunk_shape), array.dtype)
    for row, coords in enumerate(plan.chunk_coords.tolist()):
        batch[row] = padded[tuple(slice(k * c, (k + 1) * c) for k, c in zip(coords, layout.chunk_shape, strict=True))]
    return batch


def standing(positions: slice | Array, dim: int, ndim: int) -> Array:
    if isinstance(positions, slice):
        stop = -1 if positions.stop is None else positions.stop
        positions = np.arange(positions.start, stop, positions.step or 1)
    return positions.reshape([-1 if d == dim else 1 for d in range(ndim)])


def execute(array: Array, plan: ReadPlan) -> Array:
    grouped = np.full(plan.selection.grouped_shape, OUTSIDE)
    n_written = np.zeros(grouped.shape, int)
    group_of = {axis: number for number, table in enumerate(plan.group_chunks) for axis in table.group.axes}
    for row, chunk in enumerate(decoded_chunks(array, plan)):
        out, inner = plan.region(row)
        to = tuple(standing(positions, number, len(out)) for number, positions in enumerate(out))
        source = tuple(standing(positions, group_of[axis], len(out)) for axis, positions in enumerate(inner))
        grouped[to] = chunk[source]
        np.add.at(n_written, to, 1)
    assert (n_written == 1).all()
    return plan.selection.finish(grouped)


def draw_plan(data: st.DataObject, shape: tuple[int, ...]) -> tuple[ReadPlan, Array]:
    """A plan of any kind of selection, and what it should read."""
    layout = data.draw(layouts(shape))
    array = numbered(shape)
    if data.draw(st.booleans(), label="outer"):
        key = data.draw(outer_keys(shape))
        selection = parse_outer(key, shape)
        items = [np.array(item, int) if isinstance(item, list) else item for item in key if item is not ...]
        expected = array
        for axis in reversed(range(len(items))):
            expected = expected[(slice(None),) * axis + (items[axis],)]
    else:
        key = data.draw(keys(shape, newaxis=True))
        try:
            expected = array[key]
        except IndexError:
            assume(False)
        selection = parse_numpy(key, shape)
    return plan_read(layout, selection), expected


@given(st.data(), shapes)
def test_following_a_plan_reads_what_numpy_reads(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, expected = draw_plan(data, shape)
    np.testing.assert_array_equal(execute(numbered(shape), plan), expected)
    assert plan.out_nbytes == expected.nbytes
    assert plan.decoded_nbytes == plan.n_chunks * math.prod(plan.layout.chunk_shape) * 8


@given(st.data(), shapes)
def test_each_chunk_touched_is_planned_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, expected = draw_plan(data, shape)
    wanted = (
        np.stack(np.unravel_index(np.unique(expected), shape), axis=-1) if shape else np.zeros((expected.size, 0), int)
    )
    touched = {tuple(row) for row in (wanted // np.array(plan.layout.chunk_shape, int)).tolist()}
    planned = [tuple(row) for row in plan.chunk_coords.tolist()]
    assert sorted(planned) == sorted(touched)
    for column in (plan.chunk_coords, plan.object_row, plan.object_coords, plan.level_index):
        assert column.dtype == np.int64
    assert plan.group_row.dtype == np.int32


@given(st.data(), shapes)
def test_chunks_are_found_in_their_objects(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, _ = draw_plan(data, shape)
    layout = plan.layout
    in_order: dict[tuple[int, ...], None] = {}
    for row in range(plan.n_chunks):
        corner = plan.chunk_coords[row] * np.array(layout.chunk_shape, int)
        object_coords = tuple((corner // np.array(layout.object_shape, int)).tolist())
        in_order[object_coords] = None
        assert tuple(plan.object_coords[plan.object_row[row]].tolist()) == object_coords
        within = corner - np.array(object_coords, int) * np.array(layout.object_shape, int)
        for level, index in zip(layout.shard_levels, plan.level_index[row].tolist(), strict=True):
            entry = within // np.array(level.chunk_shape, int)
            assert index == np.ravel_multi_index(tuple(entry.tolist()), level.grid_shape) if shape else index == 0
            within -= entry * np.array(level.chunk_shape, int)
        assert not within.any()
    assert [tuple(row) for row in plan.object_coords.tolist()] == list(in_order)
    assert plan.keys() == ["/".join(["a/c", *map(str, coords)]) for coords in in_order]
    assert plan.n_objects == len(in_order)


@given(st.data(), shapes)
def test_slabs_are_exactly_the_chunks_in_one_piece(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, _ = draw_plan(data, shape)
    grouped_numbers = np.arange(math.prod(plan.selection.grouped_shape)).reshape(plan.selection.grouped_shape)
    chunk_size = math.prod(plan.layout.chunk_shape)
    offsets = plan.straight_offset(slice(None))
    assert offsets.dtype == np.int64
    for row, offset in enumerate(offsets.tolist()):
        # Out offset of each element of the chunk; one piece if they count up without a gap.
        places = np.full(plan.layout.chunk_shape, -1)
        out, inner = plan.region(row)
        group_of = {axis: number for number, table in enumerate(plan.group_chunks) for axis in table.group.axes}
        source = tuple(standing(positions, group_of[axis], len(out)) for axis, positions in enumerate(inner))
        to = tuple(standing(positions, number, len(out)) for number, positions in enumerate(out))
        n_asked = grouped_numbers[to].size
        places[source] = grouped_numbers[to]
        is_straight = n_asked == chunk_size and (places.ravel() == places.ravel()[0] + np.arange(chunk_size)).all()
        if offset >= 0:
            assert is_straight
            assert offset == places.ravel()[0]
        elif is_straight:
            assert any(isinstance(group, Points) and len(group.axes) > 1 for group in plan.selection.groups)


@given(st.data(), shapes)
def test_slice_columns_say_what_regions_say(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, _ = draw_plan(data, shape)
    rows = np.array(data.draw(st.lists(st.integers(0, plan.n_chunks - 1))) if plan.n_chunks else [], int)
    columns = plan.slice_columns(rows)
    if not all(isinstance(group, AxisSlice) for group in plan.selection.groups):
        assert columns is None
        return
    assert columns is not None
    assert columns.out_start.shape == columns.count.shape == columns.inner_start.shape == (len(rows), len(shape))
    for number, row in enumerate(rows):
        out, inner = plan.region(int(row))
        for axis in range(len(shape)):
            start, count = columns.out_start[number, axis], columns.count[number, axis]
            assert out[axis] == slice(start, start + count)
            positions = columns.inner_start[number, axis] + columns.step[axis] * np.arange(count)
            np.testing.assert_array_equal(standing(inner[axis], 0, 1), positions)


@given(st.data(), shapes)
def test_gather_tables_lead_to_every_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    plan, expected = draw_plan(data, shape)
    tables = plan.gather_tables()
    batch = decoded_chunks(numbered(shape), plan).reshape(plan.n_chunks, math.prod(plan.layout.chunk_shape))
    strides = [math.prod(plan.layout.chunk_shape[axis + 1 :]) for axis in range(len(shape))]
    assert all(table.dtype == np.int32 for table in tables.chunk_row)
    assert all(table.dtype == np.int64 for table in tables.inner)
    assert tuple(map(len, tables.chunk_row)) == plan.selection.grouped_shape
    grouped = np.empty(plan.selection.grouped_shape, np.int64)
    for place in itertools.product(*map(range, grouped.shape)):
        row = sum(s * t[p] for s, t, p in zip(tables.row_stride, tables.chunk_row, place, strict=True))
        offset = sum(
            stride * inner[place[group]]
            for stride, inner, group in zip(strides, tables.inner, tables.axis_group, strict=True)
        )
        grouped[place] = batch[row, offset]
    np.testing.assert_array_equal(plan.selection.finish(grouped), expected)


def plan_of(layout: ArrayLayout, key: object) -> ReadPlan:
    return plan_read(layout, parse_numpy(key, layout.shape))


def test_a_plan_by_hand() -> None:
    plan = plan_of(layout((5, 9), (2, 3), [(2, 6)], path="t2m"), (slice(4, None, -2), slice(2, 8)))
    assert plan.chunk_coords.tolist() == [[k, j] for k in range(3) for j in range(3)]
    assert plan.object_row.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert plan.object_coords.tolist() == [[k, j] for k in range(3) for j in range(2)]
    assert plan.level_index.tolist() == [[0], [1], [0]] * 3
    assert plan.region(1) == ((slice(2, 3), slice(1, 4)), (slice(0, None, -2), slice(0, 3, 1)))
    assert plan.label(8, 16, 24) == "array 't2m', chunk (2, 2) (key 't2m/c/2/1' of store '', bytes 16:40)"
    assert plan.keys(slice(1, 3)) == ["t2m/c/0/1", "t2m/c/1/0"]
    assert plan.keys(np.array([5])) == ["t2m/c/2/1"]


def test_objects_come_in_the_order_of_their_first_chunk() -> None:
    plan = plan_of(layout((4, 4), (1, 1), [(2, 2)]), ([1, 0, 0], [0, 3, 2]))
    assert plan.chunk_coords.tolist() == [[0, 2], [0, 3], [1, 0]]
    assert plan.object_coords.tolist() == [[0, 1], [0, 0]]
    assert plan.object_row.tolist() == [0, 0, 1]


def test_gather_tables_by_hand() -> None:
    tables = plan_of(layout((7, 9), (2, 3)), (slice(None, None, -1), [8, 0, 1])).gather_tables()
    assert [table.tolist() for table in tables.chunk_row] == [[3, 2, 2, 1, 1, 0, 0], [1, 0, 0]]
    assert [table.tolist() for table in tables.inner] == [[0, 1, 0, 1, 0, 1, 0], [2, 0, 1]]
    assert tables.row_stride == (2, 1)
    assert tables.axis_group == (0, 1)


def test_a_scalar_is_one_chunk() -> None:
    plan = plan_of(layout((), ()), ())
    assert plan.chunk_coords.shape == (1, 0)
    assert plan.keys() == ["a/c"]
    assert plan.straight_offset(slice(None)).tolist() == [0]
    assert plan.region(0) == ((), ())


@pytest.mark.parametrize("key", [slice(0, 0), False, np.zeros((4, 6), bool), ([], slice(None)), ([], [])])
def test_an_empty_selection_reads_nothing(key: object) -> None:
    plan = plan_of(layout((4, 6), (2, 2), [(4, 4)]), key)
    assert (plan.n_chunks, plan.n_objects, plan.decoded_nbytes, plan.out_nbytes) == (0, 0, 0, 0)
    assert plan.chunk_coords.shape == (0, 2)
    assert plan.level_index.shape == (0, 1)
    assert plan.keys() == []
    assert plan.straight_offset(slice(None)).tolist() == []


def test_an_empty_axis_has_no_chunks() -> None:
    assert plan_of(layout((0, 10**12), (1, 1)), ...).n_chunks == 0


def test_sizes_beyond_32_bits_are_exact() -> None:
    size = 2**40
    plan = plan_of(layout((size, 3), (2**33, 3)), (slice(None, None, 2**34), 1))
    assert plan.chunk_coords[-1].tolist() == [2**7 - 2, 0]
    plan = plan_of(layout((size,), (2**33,)), slice(None, None, -1))
    columns = plan.slice_columns(slice(0, 1))
    assert columns is not None
    assert columns.out_start.tolist() == [[size - 2**33]]
    assert columns.inner_start.tolist() == [[2**33 - 1]]


def test_grids_beyond_64_bits_are_planned_where_touched() -> None:
    shape = (2**40, 2**40)
    points = ([2**40 - 1, 5, 2**40 - 1, 5], [3, 2**40 - 1, 2, 7])
    plan = plan_of(layout(shape, (1, 1)), points)
    assert plan.chunk_coords.tolist() == [[5, 7], [5, 2**40 - 1], [2**40 - 1, 2], [2**40 - 1, 3]]
    assert [plan.region(row)[0] for row in range(4)] == [(slice(k, k + 1),) for k in (3, 1, 2, 0)]


def test_sorted_points_need_no_order() -> None:
    plan = plan_of(layout((100,), (10,)), [3, 1, 1, 17, 15, 90])
    (table,) = plan.group_chunks
    assert table.order is None  # type: ignore[union-attr]
    assert [plan.region(row)[0] for row in range(3)] == [(slice(0, 3),), (slice(3, 5),), (slice(5, 6),)]


def test_points_in_runs_are_written_as_slices() -> None:
    plan = plan_of(layout((100,), (10,)), [55, 57, 3, 4, 4])
    assert [plan.region(row)[0] for row in range(2)] == [(slice(2, 5),), (slice(0, 2),)]


@pytest.mark.parametrize(
    ("shape", "chunks", "key", "offsets"),
    [
        ((4, 6, 5), (1, 6, 5), ..., [0, 30, 60, 90]),
        ((4, 6, 5), (1, 3, 5), ..., [0, 15, 30, 45, 60, 75, 90, 105]),
        ((4, 6, 5), (2, 3, 5), ..., [-1] * 4),
        ((4, 6, 5), (3, 6, 5), ..., [0, -1]),
        ((4, 6, 5), (1, 6, 5), slice(None, None, -1), [90, 60, 30, 0]),
        ((4, 6, 5), (1, 6, 5), [3, 0, 1], [30, 60, 0]),
        ((4, 6, 5), (1, 6, 5), [1, 1, 0], [60, -1]),
        ((4, 6, 5), (2, 6, 5), [2, 3, 0, 1], [60, 0]),
        ((4, 6, 5), (2, 6, 5), [2, 3, 1, 0], [-1, 0]),
        ((4, 6, 5), (2, 6, 5), [0, 2, 1, 3], [-1, -1]),
        ((2, 2), (2, 2), ([1, 0, 0, 1], [0, 0, 1, 1]), [-1]),
        ((2, 2), (1, 1), ([1, 0, 0, 1], [0, 0, 1, 1]), [1, 2, 0, 3]),
        ((4, 6, 5), (1, 6, 5), (slice(None), slice(None, None, -1)), [-1] * 4),
        ((4, 6, 1), (1, 6, 1), (slice(None), slice(None), slice(None, None, -1)), [0, 6, 12, 18]),
        ((4, 6, 5), (1, 6, 5), (2, slice(None), slice(0, 4)), [-1]),
    ],
)
def test_slabs_by_hand(shape: tuple[int, ...], chunks: tuple[int, ...], key: object, offsets: list[int]) -> None:
    plan = plan_of(layout(shape, chunks), key)
    assert plan.straight_offset(slice(None)).tolist() == offsets
    assert plan.straight_offset(np.array([0])).tolist() == offsets[:1]


@pytest.mark.parametrize(
    ("array", "key", "message"),
    [
        (layout((2**63 - 1,), (2,)), 0, "array 'a': axis 0 of 9223372036854775807 elements in objects of 2"),
        (layout((4, 4), (2**31, 2**32)), 0, "array 'a': a chunk of shape (2147483648, 4294967296) passes"),
        (
            layout((2**32, 2**32), (2**20, 2**20)),
            ...,
            "array 'a': a selection of shape (4294967296, 4294967296) passes",
        ),
        (layout((4, 4), (1, 1), [(2**32, 2**32)]), 0, "array 'a': (4294967296, 4294967296) chunks in a shard pass"),
        (layout((10**9,), (1,), path="x"), ..., "array 'x': one read of 1000000000 chunks; the most is 100000000"),
        (layout((10**5, 10**5), (2, 2)), ..., "array 'a': one read of 2500000000 chunks; the most is 100000000"),
    ],
)
def test_what_passes_the_limits_is_refused(array: ArrayLayout, key: object, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_of(array, key)
    assert message in str(caught.value)


def test_explain_names_what_is_read() -> None:
    array = layout((10, 6), (2, 6), [(4, 6)], path="t2m", dtype="f4")
    assert plan_of(array, slice(1, 9)).explain().splitlines() == [
        "array 't2m': Zarr v3, float32, shape (10, 6)",
        "chunks (2, 6), shards (4, 6)",
        "selection: shape (8, 6), 192 B",
        "chunks: 5 of 5, 240 B decoded",
        "straight into the result: 3 chunks",
        "objects: 3 of 3",
        f"codec chain: {array.codec_chain}",
        "route: device",
    ]
