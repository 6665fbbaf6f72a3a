"""What do all launchers do with their arguments? Columns go to the device, buffers are checked, blocks are counted."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cupy
    from numpy.typing import NDArray

__all__ = [
    "Column",
    "axis_table",
    "check_batch",
    "check_bytes",
    "check_out",
    "check_strides",
    "device_address",
    "device_arrays",
    "device_columns",
    "fill_pattern",
    "group_table",
    "joined_tables",
    "launch",
    "launch_items",
    "threads_of",
    "tiles_of",
    "upload",
]

type Column = cupy.ndarray | NDArray[Any]
"""Integers for the device: already there, or a NumPy array to be copied."""

_MAX_BLOCKS = 2**31 - 1  # grid limit in x; kernels stride over what is left
_TILE_NBYTES = 32 * 1024  # bytes one block copies: enough units a thread to pay for finding the region


def launch(
    function: cupy.RawKernel, n_blocks: int, n_threads: int, *args: cupy.ndarray | np.generic | int | None
) -> None:
    """Queue `function` on the current stream; `n_blocks` beyond the grid limit are left to the kernel's own stride.

    An int is a 64-bit argument.
    """
    sized = tuple(np.int64(arg) if isinstance(arg, int) else arg for arg in args)
    function((min(n_blocks, _MAX_BLOCKS),), (n_threads,), sized)


def launch_items(
    source: str, name: str, n_items: int, n_threads: int, *args: cupy.ndarray | np.generic | int | None
) -> None:
    """Queue kernel `name` of `source` with a thread an item, `n_threads` of them a block; nothing for no items."""
    if n_items:
        launch(kernel_function(source, name), -(-n_items // n_threads), n_threads, *args)


def upload(*arrays: NDArray[np.int64]) -> list[cupy.ndarray]:
    """Copy int64 arrays to the device, all in one transfer: each costs the host several times what a launch does."""
    import cupy

    joined = cupy.asarray(np.concatenate([array.reshape(-1) for array in arrays]))
    stops = itertools.accumulate(array.size for array in arrays)
    return [joined[stop - array.size : stop].reshape(array.shape) for array, stop in zip(arrays, stops, strict=True)]


def device_arrays(arrays: Sequence[Column], shapes: Sequence[tuple[int, ...]]) -> list[cupy.ndarray]:
    """`arrays` on the device, contiguous, with one `upload`; ValueError unless each is int64 of its shape."""
    import cupy

    for values, shape in zip(arrays, shapes, strict=True):
        if values.dtype != np.int64 or values.shape != shape:
            msg = f"column is {values.dtype} {values.shape}, needs int64 {shape}"
            raise ValueError(msg)
    is_host = [not isinstance(values, cupy.ndarray) for values in arrays]
    uploaded = iter(upload(*itertools.compress(arrays, is_host)) if any(is_host) else ())
    return [
        next(uploaded) if host else cupy.ascontiguousarray(values) for values, host in zip(arrays, is_host, strict=True)
    ]


def device_columns(n: int, *columns: Column) -> list[cupy.ndarray]:
    """As `device_arrays`, for columns of `n` rows."""
    return device_arrays(columns, [(n,)] * len(columns))


def device_address(array: cupy.ndarray) -> np.uint64:
    """Address of the first byte of `array`, for what takes addresses rather than arrays."""
    return np.uint64(array.data.ptr)


def check_bytes(buffer: cupy.ndarray, name: str) -> None:
    """Raise ValueError unless `buffer` is contiguous bytes."""
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        msg = f"{name} is {buffer.dtype} {buffer.shape}, needs contiguous uint8"
        raise ValueError(msg)


def tiles_of(nbytes: int) -> int:
    """Blocks of threads that share `nbytes` bytes of work."""
    return max(1, -(-nbytes // _TILE_NBYTES))


def joined_tables(tables: Sequence[Column], sizes: Sequence[int], dtype: type[np.generic]) -> cupy.ndarray:
    """Join the groups' tables, on the device."""
    import cupy

    if [table.shape for table in tables] != [(size,) for size in sizes]:
        msg = f"tables have shapes {[table.shape for table in tables]}, the output's groups have sizes {list(sizes)}"
        raise ValueError(msg)
    if not tables:
        return cupy.zeros(0, dtype=dtype)
    return cupy.concatenate([cupy.asarray(table, dtype=dtype) for table in tables])


def axis_table(
    out: cupy.ndarray, step: Sequence[int], chunk_shape: Sequence[int], chunk_strides: Sequence[int]
) -> NDArray[np.int64]:
    """int64 (5, ndim): step, chunk shape, chunk stride, output shape, output stride; strides in bytes."""
    itemsize = out.itemsize
    rows = [step, chunk_shape, [stride * itemsize for stride in chunk_strides], out.shape, out.strides]
    if any(len(row) != out.ndim for row in rows):
        msg = f"step, chunk_shape and chunk_strides need one entry for each of the output's {out.ndim} axes"
        raise ValueError(msg)
    return np.array(rows, dtype=np.int64).reshape(5, out.ndim)


def group_table(sizes: Sequence[int], n_group_rows: Sequence[int]) -> NDArray[np.int64]:
    """int64 (3, n_groups): positions, first entry in the joined tables, distance of rows in `slot`."""
    starts = [sum(sizes[:g]) for g in range(len(sizes))]
    row_strides = [math.prod(n_group_rows[g + 1 :]) for g in range(len(sizes))]
    return np.array([sizes, starts, row_strides], dtype=np.int64).reshape(3, len(sizes))


def fill_pattern(fill_value: np.generic, dtype: np.dtype[np.generic]) -> cupy.ndarray:
    """Bytes of `fill_value`, repeated to a multiple of 16 (the widest store), on the device."""
    import cupy

    element = np.asarray(fill_value, dtype=dtype).tobytes()
    return cupy.asarray(np.frombuffer(element * (math.lcm(len(element), 16) // len(element)), dtype=np.uint8))


def check_batch(batch: cupy.ndarray, n_chunks: int, chunk_nbytes: int, chunk_offset: Column | None) -> None:
    """Raise ValueError unless `batch` is contiguous bytes, and enough of them where chunks are its rows."""
    check_bytes(batch, "batch")
    if chunk_offset is None and batch.nbytes < n_chunks * chunk_nbytes:
        msg = f"batch has {batch.nbytes} bytes, {n_chunks} chunks of {chunk_nbytes} bytes need more"
        raise ValueError(msg)


def check_out(out: cupy.ndarray, word_nbytes: int) -> None:
    """Raise ValueError unless `out` is in C order and its elements can be cut into words."""
    if not out.flags.c_contiguous:
        msg = f"out has strides {out.strides}, needs C order"
        raise ValueError(msg)
    if word_nbytes not in (1, 2, 4, 8) or out.itemsize % word_nbytes != 0:
        msg = f"word_nbytes is {word_nbytes}, needs 1, 2, 4 or 8, a divisor of the itemsize {out.itemsize}"
        raise ValueError(msg)


def check_strides(shape: Sequence[int], strides: Sequence[int], size: int) -> None:
    """Raise ValueError if an element of a chunk lies outside it; then the device only has to check coordinates."""
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if size > 0 and (any(stride < 0 for stride in strides) or last >= size):
        msg = f"chunk_strides {tuple(strides)} reach outside a chunk of shape {tuple(shape)}"
        raise ValueError(msg)


def threads_of(nbytes: int) -> int:
    """Threads a block: fewer where a tile has fewer 16-byte units than a full block has threads."""
    return min(256, max(32, -(-nbytes // 512) * 32))
