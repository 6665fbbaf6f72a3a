"""Selections against NumPy itself, and against zarr-python for its two own kinds of indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.plan.strategies import keys, numbered, outer_keys, point_keys, shapes
from xgpuzarr.plan.selection import AxisSlice, Points, Selection, parse_numpy, parse_outer, parse_vectorized


def take(array: np.ndarray[Any, Any], selection: Selection) -> np.ndarray[Any, Any]:
    """Execute `selection` by one open-mesh index into `array`."""
    mesh: list[Any] = [None] * array.ndim
    for number, group in enumerate(selection.groups):
        if isinstance(group, AxisSlice):
            coords: tuple[Any, ...] = (group.start + group.step * np.arange(group.count),)
        else:
            coords = group.coords
        shape = [-1 if dim == number else 1 for dim in range(len(selection.groups))]
        for axis, along in zip(group.axes, coords, strict=True):
            assert mesh[axis] is None, "an axis belongs to one group"
            mesh[axis] = along.reshape(shape)
    assert all(along is not None for along in mesh)
    grouped = np.empty(selection.grouped_shape, array.dtype)
    if grouped.size:
        grouped[...] = array[tuple(mesh)]
    result = selection.finish(grouped)
    assert np.shares_memory(result, grouped) or result.size == 0
    return result


def assert_selects(array: np.ndarray[Any, Any], selection: Selection, expected: np.ndarray[Any, Any]) -> None:
    assert selection.shape == expected.shape
    assert selection.size == expected.size
    np.testing.assert_array_equal(take(array, selection), expected)


@given(st.data(), shapes)
def test_numpy_keys_select_what_numpy_selects(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = data.draw(keys(shape, newaxis=True))
    array = numbered(shape)
    try:
        expected = array[key]
    except IndexError:
        with pytest.raises(IndexError):
            parse_numpy(key, shape)
        return
    assert_selects(array, parse_numpy(key, shape), expected)


@given(st.data(), shapes)
def test_outer_keys_index_each_axis_alone(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = data.draw(outer_keys(shape))
    array = expected = numbered(shape)
    items = key[:-1] if key and key[-1] is ... else key
    for axis in reversed(range(len(items))):
        item = items[axis]
        if isinstance(item, list):
            item = np.array(item, dtype=np.int64)
        expected = expected[(slice(None),) * axis + (item,)]
    assert_selects(array, parse_outer(key, shape), expected)


def zarr_index(index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An integer counts as an array of one element."""
    if index.dtype == bool:
        return index
    return np.atleast_1d(index).astype(np.int64)


@given(st.data(), shapes)
def test_vectorized_keys_put_broadcast_dimensions_first(data: st.DataObject, shape: tuple[int, ...]) -> None:
    key = data.draw(keys(shape, newaxis=False))
    array = numbered(shape)
    items = key if isinstance(key, tuple) else (key,)
    indexes = {i: np.array(item) for i, item in enumerate(items) if not isinstance(item, slice) and item is not ...}
    if indexes:
        # A mask and a new axis in front part the indices, so NumPy puts the broadcast dimensions first.
        oracle = [zarr_index(indexes[i]) if i in indexes else item for i, item in enumerate(items)]
        try:
            expected = array[(True, None, *oracle)]
        except IndexError:
            with pytest.raises(IndexError):
                parse_vectorized(key, shape)
            return
        n_indexed = sum(index.ndim if index.dtype == bool else 1 for index in indexes.values())
        expected = expected.squeeze(axis=expected.ndim - 1 - (array.ndim - n_indexed))
    else:
        expected = array[key]
    assert_selects(array, parse_vectorized(key, shape), expected)


def zarr_takes(key: tuple[Any, ...]) -> bool:
    """zarr-python refuses negative steps and empty lists, and fails on an ellipsis after an array."""
    return all(
        item is not ...
        and not (isinstance(item, slice) and (item.step or 1) < 0)
        and not (isinstance(item, list) and not item)
        for item in key
    )


@settings(max_examples=30)
@given(st.data(), hnp.array_shapes(max_dims=3, max_side=5))
def test_outer_and_points_agree_with_zarr(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = numbered(shape)
    stored = zarr.create_array({}, data=array, chunks=tuple(min(n, 2) for n in shape))
    outer = data.draw(outer_keys(shape).filter(zarr_takes))
    points = data.draw(point_keys(shape))
    mask = array % data.draw(st.integers(1, 5)) == 0
    assert_selects(array, parse_outer(outer, shape), np.asarray(stored.oindex[outer]))
    assert_selects(array, parse_vectorized(points, shape), np.asarray(stored.vindex[points]))
    assert_selects(array, parse_vectorized(mask, shape), np.asarray(stored.vindex[mask]))


def test_evenly_spaced_arrays_become_slices() -> None:
    (group,) = parse_numpy(np.arange(90, 9, -3), (100,)).groups
    assert group == AxisSlice(axis=0, start=90, step=-3, count=27)
    (group,) = parse_numpy([-1], (100,)).groups
    assert group == AxisSlice(axis=0, start=99, step=1, count=1)
    (group,) = parse_numpy(np.array([False, True, False, True]), (4,)).groups
    assert group == AxisSlice(axis=0, start=1, step=2, count=2)


@pytest.mark.parametrize("positions", [[3, 3], [0, 1, 2, 4], [4, 2, 1, 0], [0, 2, 1, 3]])
def test_uneven_arrays_stay_points(positions: list[int]) -> None:
    (group,) = parse_numpy(positions, (5,)).groups
    assert isinstance(group, Points)
    assert group.axes == (0,)
    assert group.coords[0].dtype == np.int64
    assert group.coords[0].tolist() == positions


def test_arrays_that_vary_apart_stay_apart() -> None:
    positions = np.array([7, 0, 5, 5])
    selection = parse_numpy(np.ix_(positions, positions, [3]), (9, 9, 9))
    first, second, third = selection.groups
    assert (first.axes, first.size) == ((0,), 4)
    assert (second.axes, second.size) == ((1,), 4)
    assert third == AxisSlice(axis=2, start=3, step=1, count=1)
    assert selection.grouped_shape == (4, 4, 1)


def test_arrays_that_vary_together_are_one_group() -> None:
    selection = parse_numpy(([[0], [1]], slice(None), [[4, 5], [6, 8]], [0, 3]), (2, 3, 9, 4))
    points, axis = selection.groups
    assert isinstance(points, Points)
    assert points.axes == (0, 2, 3)
    assert [coords.tolist() for coords in points.coords] == [[0, 0, 1, 1], [4, 5, 6, 8], [0, 3, 0, 3]]
    assert axis == AxisSlice(axis=1, start=0, step=1, count=3)
    assert selection.shape == (2, 2, 3)


def test_a_slice_of_a_vast_axis_is_four_numbers() -> None:
    selection = parse_numpy(slice(None, None, -7), (10**15,))
    assert selection.groups == (AxisSlice(axis=0, start=10**15 - 1, step=-7, count=-(-(10**15) // 7)),)


def test_an_empty_selection_wants_nothing_of_any_axis() -> None:
    selection = parse_numpy((slice(None), slice(3, 3), 0), (10**12, 5, 4))
    assert selection.shape == (10**12, 0)
    assert selection.grouped_shape == (0, 0, 0)


def test_an_index_array_changed_later_changes_nothing() -> None:
    positions = np.array([5, 0, 2])
    selection = parse_outer((positions,), (6,))
    positions[:] = 1
    (group,) = selection.groups
    assert isinstance(group, Points)
    assert group.coords[0].tolist() == [5, 0, 2]


@pytest.mark.parametrize("parse", [parse_numpy, parse_outer, parse_vectorized])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, "index 5 is out of bounds for axis 0 with size 4"),
        ((0, -4), "index -4 is out of bounds for axis 1 with size 3"),
        ((slice(None), [0, 3]), "index 3 is out of bounds for axis 1 with size 3"),
        ((slice(None), [-4, 0]), "index -4 is out of bounds for axis 1 with size 3"),
        (np.array([2**63 + 1], dtype=np.uint64), "index 9223372036854775809 is out of bounds for axis 0 with size 4"),
        ((0, 0, 0), "too many indices for array: array is 2-dimensional, but 3 were indexed"),
        ((..., ...), "an index can only have a single ellipsis"),
        (1.0, "got float of dtype float64"),
        ([0.5], "got list of dtype float64"),
        (np.array([]), "got ndarray of dtype float64"),
        ("t2m", "got str of dtype <U3"),
        (np.ones(3, bool), "along axis 0; size of axis is 4 but size of corresponding boolean axis is 3"),
        ((0, np.ones(4, bool)), "along axis 1; size of axis is 3 but size of corresponding boolean axis is 4"),
    ],
)
def test_keys_that_select_nothing_sensible_are_refused(parse: Any, key: object, message: str) -> None:
    with pytest.raises(IndexError) as caught:
        parse(key, (4, 3))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "key", "message"),
    [
        (parse_numpy, ([0, 1], [0, 1, 2]), "could not be broadcast together with shapes (2,) (3,)"),
        (parse_vectorized, ([0, 1], [0, 1, 2]), "could not be broadcast together with shapes (2,) (3,)"),
        (parse_outer, None, "outer indexing takes no newaxis"),
        (parse_outer, [[0, 1]], "outer indexing takes 1-d arrays, got one of 2 dimensions; use vindex"),
        (parse_outer, np.ones((4, 3), bool), "outer indexing takes 1-d arrays, got one of 2 dimensions; use vindex"),
        (parse_outer, True, "outer indexing takes 1-d arrays, got one of 0 dimensions; use vindex"),
        (parse_vectorized, (None, 0), "vectorized indexing takes no newaxis"),
    ],
)
def test_keys_of_another_kind_of_indexing_are_refused(parse: Any, key: object, message: str) -> None:
    with pytest.raises(IndexError) as caught:
        parse(key, (4, 3))
    assert message in str(caught.value)


def test_slices_fail_as_in_python() -> None:
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        parse_numpy(slice(None, None, 0), (4,))
    with pytest.raises(TypeError, match="slice indices must be integers"):
        parse_numpy(slice(0.5, None), (4,))
