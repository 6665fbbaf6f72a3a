"""Assembly kernels against NumPy, through their launchers: on the host under sanitizers; ``-m gpu``: on a device."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels import arguments, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

PER_EXAMPLE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
DTYPES = ["u1", "<i2", "<f4", "<f8", "<c8", "<c16", "V3", "V6", "V12", "V24"]


def random_elements(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    itemsize = np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    return data.reshape(-1).view(dtype).reshape(shape)


def same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def swapped(array: np.ndarray[Any, Any], word_nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes of each word reversed, whatever the dtype."""
    words = array.reshape(-1).view(np.uint8).reshape(-1, word_nbytes)
    return np.ascontiguousarray(words[:, ::-1]).reshape(-1).view(array.dtype).reshape(array.shape)


def slices_of_chunks(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], key: tuple[slice, ...]
) -> tuple[list[tuple[int, ...]], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
    """Chunks that basic slices touch, and out_start, count and inner_start of each, the slow and plain way."""
    ranges = [range(*k.indices(n)) for k, n in zip(key, shape, strict=True)]
    per_axis = []
    for positions, chunk in zip(ranges, chunk_shape, strict=True):
        touched = {}
        for out, position in enumerate(positions):
            touched.setdefault(position // chunk, []).append((out, position % chunk))
        per_axis.append([(c, cells[0][0], len(cells), cells[0][1]) for c, cells in sorted(touched.items())])
    rows = list(itertools.product(*per_axis))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(shape), 4)
    coords = [tuple(row) for row in table[:, :, 0].tolist()]
    return coords, table[:, :, 1], table[:, :, 2], table[:, :, 3], [r.step for r in ranges]


def stored_chunks(
    source: np.ndarray[Any, Any], chunk_shape: tuple[int, ...], coords: list[tuple[int, ...]], order: tuple[int, ...]
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Chunks with their axes stored in `order`, one a row, and their strides in elements. Edge chunks are padded."""
    itemsize = source.itemsize
    rows = []
    for coord in coords:
        window = tuple(slice(c * n, (c + 1) * n) for c, n in zip(coord, chunk_shape, strict=True))
        chunk = np.zeros(chunk_shape, dtype=source.dtype)
        part = source[window]
        chunk[tuple(slice(0, n) for n in part.shape)] = part
        rows.append(np.ascontiguousarray(chunk.transpose(order)).reshape(-1).view(np.uint8))
    strides = np.empty(chunk_shape, dtype=np.int8).transpose(order).copy().transpose(np.argsort(order)).strides
    nbytes = int(np.prod(chunk_shape)) * itemsize
    return np.array(rows, dtype=np.uint8).reshape(len(coords), nbytes), list(strides)


@st.composite
def slice_cases(draw: st.DrawFn) -> dict[str, Any]:
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(ndim))
    chunk_shape = tuple(draw(st.integers(1, n + 2)) for n in shape)
    key = tuple(
        slice(
            draw(st.none() | st.integers(-n, n)),
            draw(st.none() | st.integers(-n, n)),
            draw(st.sampled_from([1, 1, 2, 3, -1, -2, 10**18])),
        )
        for n in shape
    )
    return {
        "shape": shape,
        "chunk_shape": chunk_shape,
        "key": key,
        "dtype": draw(st.sampled_from(DTYPES)),
        "order": tuple(draw(st.permutations(range(ndim)))),
        "shift": draw(st.integers(0, 9)),
    }


@PER_EXAMPLE
@given(case=slice_cases())
def test_scatter_equals_numpy_indexing(xp: Any, to_numpy: ToNumpy, case: dict[str, Any]) -> None:
    source = random_elements(case["shape"], case["dtype"])
    coords, out_start, count, inner_start, step = slices_of_chunks(case["shape"], case["chunk_shape"], case["key"])
    rows, strides = stored_chunks(source, case["chunk_shape"], coords, case["order"])
    # Chunks anywhere in the batch, at any alignment.
    batch = np.concatenate([np.full(case["shift"], 7, np.uint8), rows.reshape(-1)])
    want = source[case["key"]]
    out = xp.asarray(np.zeros(want.shape, dtype=source.dtype))
    status = launch.new_status()
    launch.scatter_slices(
        xp.asarray(batch),
        out,
        out_start=out_start,
        count=count,
        inner_start=inner_start,
        step=step,
        chunk_shape=case["chunk_shape"],
        chunk_strides=strides,
        chunk_offset=case["shift"] + rows.shape[1] * np.arange(len(coords), dtype=np.int64),
        status=status,
    )
    launch.check_status(status, "scatter")
    assert same_bytes(to_numpy(out), want)


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "key"),
    [
        ((3, 40, 72), (1, 40, 72), (slice(None),) * 3),
        ((9, 181, 360), (4, 91, 180), (slice(None),) * 3),
        ((64, 4096), (64, 1), (slice(None), slice(5, 9))),
        ((40000,), (40000,), (slice(None, None, -1),)),
        ((300, 500), (128, 256), (slice(10, 290, 3), slice(499, 3, -2))),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "word_nbytes"), [("<f4", 1), ("<f4", 4), ("<c16", 8), ("<i2", 2), ("V12", 4), ("u1", 1)]
)
def test_scatter_of_whole_rows_and_byte_order(
    xp: Any,
    to_numpy: ToNumpy,
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    key: tuple[slice, ...],
    dtype: str,
    word_nbytes: int,
) -> None:
    source = random_elements(shape, dtype)
    coords, out_start, count, inner_start, step = slices_of_chunks(shape, chunk_shape, key)
    rows, strides = stored_chunks(swapped(source, word_nbytes), chunk_shape, coords, tuple(range(len(shape))))
    out = xp.asarray(np.zeros(source[key].shape, dtype=dtype))
    status = launch.new_status()
    launch.scatter_slices(
        xp.asarray(rows),
        out,
        out_start=out_start,
        count=count,
        inner_start=inner_start,
        step=step,
        chunk_shape=chunk_shape,
        chunk_strides=strides,
        word_nbytes=word_nbytes,
        status=status,
    )
    launch.check_status(status, "scatter")
    assert same_bytes(to_numpy(out), source[key])


@pytest.mark.parametrize(
    "lie",
    [
        {"inner_start": 3},
        {"inner_start": -1},
        {"out_start": 5},
        {"out_start": -1},
        {"count": 5},
        {"count": -1},
        {"count": 2**62},
        {"chunk_offset": 9},
        {"chunk_offset": -8},
        {"chunk_offset": 2**62},
    ],
)
def test_scatter_reports_and_skips_a_region_outside(xp: Any, to_numpy: ToNumpy, lie: dict[str, int]) -> None:
    values = {"out_start": 2, "count": 2, "inner_start": 1, "chunk_offset": 8} | lie
    columns = {name: np.array([[value]], dtype=np.int64) for name, value in values.items()}
    out = xp.asarray(np.zeros(6, dtype="<u4"))
    status = launch.new_status()
    launch.scatter_slices(
        xp.asarray(np.ones(24, dtype=np.uint8)),
        out,
        out_start=columns["out_start"],
        count=columns["count"],
        inner_start=columns["inner_start"],
        chunk_offset=columns["chunk_offset"][0],
        step=[1],
        chunk_shape=[4],
        chunk_strides=[1],
        status=status,
    )
    assert not to_numpy(out).any()
    with pytest.raises(XGpuZarrError, match="array 't': a region lies outside its buffer"):
        launch.check_status(status, "array 't'")


@PER_EXAMPLE
@given(case=slice_cases(), data=st.data())
def test_fill_writes_its_regions_only(xp: Any, to_numpy: ToNumpy, case: dict[str, Any], data: st.DataObject) -> None:
    shape, dtype = case["shape"], case["dtype"]
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    counts = [data.draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)]
    fill_value = random_elements((), dtype, seed=1)[()]
    want = random_elements(shape, dtype)
    out = xp.asarray(want.copy())
    want[tuple(slice(s, s + n) for s, n in zip(starts, counts, strict=True))] = fill_value
    status = launch.new_status()
    launch.fill_slices(
        out,
        fill_value,
        out_start=np.array([starts], dtype=np.int64).reshape(1, len(shape)),
        count=np.array([counts], dtype=np.int64).reshape(1, len(shape)),
        status=status,
    )
    launch.check_status(status, "fill")
    assert same_bytes(to_numpy(out), want)


@st.composite
def gather_cases(draw: st.DrawFn) -> dict[str, Any]:
    """A selection as a product of groups of axes; each group is a list of points in those axes."""
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(ndim))
    axes = draw(st.permutations(range(ndim)))
    cuts = sorted(draw(st.sets(st.integers(1, ndim - 1)))) if ndim > 1 else []
    groups = [axes[a:b] for a, b in itertools.pairwise([0, *cuts, ndim])]
    sizes = [draw(st.integers(1, 6)) for _ in groups]
    coords = {
        axis: np.array([draw(st.integers(0, shape[axis] - 1)) for _ in range(size)], dtype=np.int64)
        for group, size in zip(groups, sizes, strict=True)
        for axis in group
    }
    return {
        "shape": shape,
        "chunk_shape": tuple(draw(st.integers(1, n)) for n in shape),
        "groups": groups,
        "sizes": sizes,
        "coords": coords,
        "dtype": draw(st.sampled_from(DTYPES)),
        "missing": draw(st.integers(0, 3)),
        "packed": draw(st.booleans()),
    }


@PER_EXAMPLE
@given(case=gather_cases())
def test_gather_equals_numpy_indexing_batch_by_batch(xp: Any, to_numpy: ToNumpy, case: dict[str, Any]) -> None:
    shape, chunk_shape, groups, coords = case["shape"], case["chunk_shape"], case["groups"], case["coords"]
    dtype = np.dtype(case["dtype"])
    fill_value = random_elements((), case["dtype"], seed=1)[()]
    strides = [int(np.prod(chunk_shape[k + 1 :])) for k in range(len(shape))]
    tables, rows, inner = [], [], []
    for group, size in zip(groups, case["sizes"], strict=True):
        chunk = np.stack([coords[axis] // chunk_shape[axis] for axis in group], axis=1)
        table, row = np.unique(chunk, axis=0, return_inverse=True)
        tables.append(table)
        rows.append(row.reshape(size).astype(np.int32))
        inner.append(sum(coords[axis] % chunk_shape[axis] * strides[axis] for axis in group))
    chunk_coords = []
    for choice in itertools.product(*tables):
        coord = dict(zip((a for g in groups for a in g), (c for part in choice for c in part), strict=True))
        chunk_coords.append(tuple(int(coord[axis]) for axis in range(len(shape))))
    source = random_elements(shape, case["dtype"])
    for coord in chunk_coords[: case["missing"]]:
        source[tuple(slice(c * n, (c + 1) * n) for c, n in zip(coord, chunk_shape, strict=True))] = fill_value
    stored, _ = stored_chunks(source, chunk_shape, chunk_coords, tuple(range(len(shape))))
    n_chunks, chunk_nbytes = stored.shape
    out = xp.asarray(np.zeros(case["sizes"], dtype=dtype))
    status = launch.new_status()
    middle = (case["missing"] + n_chunks) // 2
    for batch in [range(case["missing"], middle), range(middle, n_chunks)]:
        slot = np.full(n_chunks, launch.SLOT_SKIP, dtype=np.int32)
        slot[: case["missing"]] = launch.SLOT_FILL
        slot[batch.start : batch.stop] = np.arange(len(batch))
        launch.gather_elements(
            xp.asarray(stored[batch.start : batch.stop].reshape(-1)),
            out,
            group_row=rows,
            group_inner=inner,
            n_group_rows=[len(table) for table in tables],
            slot=slot,
            chunk_nbytes=chunk_nbytes,
            fill_value=fill_value,
            chunk_offset=None if case["packed"] else chunk_nbytes * np.arange(len(batch), dtype=np.int64),
            status=status,
        )
    launch.check_status(status, "gather")
    want = np.empty(case["sizes"], dtype=dtype)
    for position in np.ndindex(*case["sizes"]):
        at = {axis: coords[axis][position[g]] for g, group in enumerate(groups) for axis in group}
        want[position] = source[tuple(at[axis] for axis in range(len(shape)))]
    assert same_bytes(to_numpy(out), want)


def test_gather_turns_the_byte_order(xp: Any, to_numpy: ToNumpy) -> None:
    source = random_elements((3, 50), "<c8")
    out = xp.asarray(np.zeros(100, dtype="<c8"))
    points = np.random.default_rng(3).integers(0, 150, 100)
    status = launch.new_status()
    launch.gather_elements(
        xp.asarray(swapped(source, 4).reshape(-1).view(np.uint8)),
        out,
        group_row=[points // 50],
        group_inner=[points % 50],
        n_group_rows=[3],
        slot=np.arange(3),
        chunk_nbytes=400,
        fill_value=np.complex64(0),
        word_nbytes=4,
        status=status,
    )
    launch.check_status(status, "gather")
    assert same_bytes(to_numpy(out), source.reshape(-1)[points])


@pytest.mark.parametrize("lie", [{"row": 2}, {"row": -1}, {"inner": 4}, {"inner": -1}, {"slot": 2}, {"slot": -3}])
def test_gather_reports_and_skips_tables_that_point_outside(xp: Any, to_numpy: ToNumpy, lie: dict[str, int]) -> None:
    values = {"row": 1, "inner": 3, "slot": 1} | lie
    out = xp.asarray(np.zeros(1, dtype="<u4"))
    status = launch.new_status()
    launch.gather_elements(
        xp.asarray(np.ones(32, dtype=np.uint8)),
        out,
        group_row=[np.array([values["row"]], dtype=np.int32)],
        group_inner=[np.array([values["inner"]], dtype=np.int64)],
        n_group_rows=[2],
        slot=np.array([0, values["slot"]], dtype=np.int32),
        chunk_nbytes=16,
        fill_value=np.uint32(0),
        status=status,
    )
    assert not to_numpy(out).any()
    with pytest.raises(XGpuZarrError, match="outside its buffer"):
        launch.check_status(status, "gather")


@PER_EXAMPLE
@given(
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=6),
    mean_nbytes=st.sampled_from([1, 100, 100_000]),
)
def test_copy_bytes_at_any_alignment(
    xp: Any, to_numpy: ToNumpy, runs: list[tuple[int, int, int]], mean_nbytes: int
) -> None:
    gap_in, gap_out, nbytes = np.array(runs, dtype=np.int64).T
    source_offset = np.cumsum(gap_in + nbytes) - nbytes
    out_offset = np.cumsum(gap_out + nbytes) - nbytes
    source = random_elements((int(source_offset[-1] + nbytes[-1]),), "u1")
    want = np.zeros(int(out_offset[-1] + nbytes[-1]), dtype=np.uint8)
    for start, stop, n in zip(source_offset, out_offset, nbytes, strict=True):
        want[stop : stop + n] = source[start : start + n]
    out = xp.asarray(np.zeros_like(want))
    status = launch.new_status()
    launch.copy_bytes(
        xp.asarray(source),
        out,
        source_offset=source_offset,
        out_offset=out_offset,
        nbytes=nbytes,
        mean_nbytes=mean_nbytes,
        status=status,
    )
    launch.check_status(status, "copy")
    assert same_bytes(to_numpy(out), want)


@pytest.mark.parametrize(
    "run", [(-1, 0, 4), (0, -1, 4), (5, 0, 4), (0, 5, 4), (0, 0, -1), (2**62, 0, 4), (0, 0, 2**62)]
)
def test_copy_bytes_reports_and_skips_a_run_outside(xp: Any, to_numpy: ToNumpy, run: tuple[int, int, int]) -> None:
    source_offset, out_offset, nbytes = (np.array([value], dtype=np.int64) for value in run)
    out = xp.asarray(np.zeros(8, dtype=np.uint8))
    status = launch.new_status()
    launch.copy_bytes(
        xp.asarray(np.ones(8, dtype=np.uint8)),
        out,
        source_offset=source_offset,
        out_offset=out_offset,
        nbytes=nbytes,
        mean_nbytes=4,
        status=status,
    )
    assert not to_numpy(out).any()
    with pytest.raises(XGpuZarrError, match="outside its buffer"):
        launch.check_status(status, "copy")


def test_guards_find_every_changed_byte(xp: Any, to_numpy: ToNumpy) -> None:
    guard_nbytes, offset = 32, np.array([0, 40, 100, 141, 200], dtype=np.int64)
    buffer = np.zeros(232, dtype=np.uint8)
    status = launch.new_status()
    device = xp.asarray(buffer)
    launch.write_guards(device, offset, guard_nbytes, status=status)
    launch.check_status(status, "guards")
    written = to_numpy(device).copy()
    inside = np.zeros(232, dtype=bool)
    for start in offset:
        inside[start : start + guard_nbytes] = True
    assert not written[~inside].any()
    assert to_numpy(launch.check_guards(device, offset, guard_nbytes)).tolist() == [0, 0, 0, 0, 0]
    for guard, byte in itertools.product(range(5), [0, 13, 31]):
        broken = written.copy()
        broken[offset[guard] + byte] ^= 1
        found = to_numpy(launch.check_guards(xp.asarray(broken), offset, guard_nbytes))
        assert found.tolist() == [int(g == guard) for g in range(5)]


def test_a_guard_outside_the_buffer_counts_as_broken(xp: Any, to_numpy: ToNumpy) -> None:
    device, offset, status = (
        xp.asarray(np.zeros(40, dtype=np.uint8)),
        np.array([0, 20], dtype=np.int64),
        launch.new_status(),
    )
    launch.write_guards(device, offset, 32, status=status)
    assert to_numpy(launch.check_guards(device, offset, 32)).tolist() == [0, 1]
    with pytest.raises(XGpuZarrError, match="outside its buffer"):
        launch.check_status(status, "guards")


def test_launchers_refuse_arguments_that_do_not_fit(xp: Any) -> None:
    batch, out, status = xp.asarray(np.zeros((2, 16), np.uint8)), xp.asarray(np.zeros(8, "<f4")), launch.new_status()
    column = np.zeros((2, 1), dtype=np.int64)
    good: dict[str, Any] = {
        "out_start": column,
        "count": column,
        "inner_start": column,
        "step": [1],
        "chunk_shape": [4],
        "chunk_strides": [1],
        "status": status,
    }
    launch.scatter_slices(batch, out, **good)
    for bad, message in [
        ({"count": column.astype(np.int32)}, r"column is int32 \(2, 1\), needs int64 \(2, 1\)"),
        ({"inner_start": column[:1]}, r"column is int64 \(1, 1\), needs int64 \(2, 1\)"),
        ({"chunk_shape": [5]}, "batch has 32 bytes, 2 chunks of 20 bytes need more"),
        ({"chunk_strides": [2]}, r"chunk_strides \(2,\) reach outside a chunk of shape \(4,\)"),
        ({"step": [1, 1]}, "one entry for each of the output's 1 axes"),
        ({"word_nbytes": 3}, "word_nbytes is 3"),
        ({"word_nbytes": 8}, "a divisor of the itemsize 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            launch.scatter_slices(batch, out, **{**good, **bad})
    with pytest.raises(ValueError, match=r"batch is float32 \(8,\), needs contiguous uint8"):
        launch.scatter_slices(out, out, **good)


def test_what_the_grid_does_not_hold_is_done_in_turn(
    xp: Any, to_numpy: ToNumpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid of three blocks stands in for the limit of 2^31 - 1."""
    monkeypatch.setattr(arguments, "_MAX_BLOCKS", 3)
    source = random_elements((40, 3000), "<f4")
    key = (slice(None), slice(None))
    coords, out_start, count, inner_start, step = slices_of_chunks((40, 3000), (3, 1000), key)
    rows, strides = stored_chunks(source, (3, 1000), coords, (0, 1))
    status = launch.new_status()
    batch, out = xp.asarray(rows), xp.asarray(np.zeros_like(source))
    launch.scatter_slices(
        batch,
        out,
        out_start=out_start,
        count=count,
        inner_start=inner_start,
        step=step,
        chunk_shape=(3, 1000),
        chunk_strides=strides,
        status=status,
    )
    assert same_bytes(to_numpy(out), source)
    filled = xp.asarray(np.zeros_like(source))
    launch.fill_slices(filled, np.float32(7), out_start=out_start, count=count, status=status)
    assert (to_numpy(filled) == 7).all()
    gathered = xp.asarray(np.zeros(10_000, dtype="<f4"))
    launch.gather_elements(
        batch,
        gathered,
        group_row=[np.arange(10_000) // 3000],
        group_inner=[np.arange(10_000) % 3000],
        n_group_rows=[len(coords)],
        slot=np.arange(len(coords)),
        chunk_nbytes=12_000,
        fill_value=np.float32(0),
        status=status,
    )
    assert same_bytes(to_numpy(gathered), rows.reshape(-1).view("<f4")[:10_000])
    copied = xp.asarray(np.zeros(rows.size, dtype=np.uint8))
    offset = np.arange(len(coords), dtype=np.int64) * 12_000
    launch.copy_bytes(
        batch.reshape(-1),
        copied,
        source_offset=offset,
        out_offset=offset,
        nbytes=np.full_like(offset, 12_000),
        mean_nbytes=12_000,
        status=status,
    )
    assert same_bytes(to_numpy(copied), rows.reshape(-1))
    launch.write_guards(copied, offset, 64, status=status)
    assert not to_numpy(launch.check_guards(copied, offset, 64)).any()
    launch.check_status(status, "three blocks")


def test_importing_the_kernels_imports_no_cupy() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import xgpuzarr.kernels.launch, xgpuzarr.kernels.launch_blosc, xgpuzarr.kernels.launch_checksums"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
