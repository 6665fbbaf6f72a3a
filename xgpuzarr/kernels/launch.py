"""How do decoded chunks reach the output? The launchers of ``assemble.cu``, and the rules all launchers share.

==================  ================================================================================================
`scatter_slices`    regions of chunks into the output, for selections whose groups are all slices
`gather_elements`   any selection, from index tables a group
`fill_slices`       the fill value into the regions of missing chunks
`copy_bytes`        (source offset, output offset, nbytes) runs between two buffers
`write_guards`      a known pattern into the guard zones behind a decoder's outputs
`check_guards`      which guard zones no longer hold it
`new_status`        the word in which launches say that they met something outside their buffers
`check_status`      raises if one did; call it before a result is handed out
==================  ================================================================================================

Rules
-----
- Work is queued on the current CuPy stream of the current device, and nothing here waits for it, except `check_status`.
- Arguments are on the device. Columns and tables (int64) may also be NumPy arrays: they are copied to the device on the
  same stream. CuPy's pool keeps the copies alive for as long as the stream needs them.
- Chunk axes are in the order of the output's axes (the selection's groups), whatever order the chunk is stored in: C
  order, F order and the v3 ``transpose`` codec differ in `chunk_strides` only.
- Bad arguments raise ValueError before anything is launched. Offsets that only the device sees are checked there, chunk
  by chunk: what lies outside is not touched, and the status word says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cupy
    from numpy.typing import NDArray

__all__ = [
    "SLOT_FILL",
    "SLOT_SKIP",
    "Column",
    "check_bytes",
    "check_guards",
    "check_status",
    "copy_bytes",
    "device_column",
    "fill_slices",
    "gather_elements",
    "launch",
    "new_status",
    "scatter_slices",
    "tiles_of",
    "write_guards",
]

type Column = cupy.ndarray | NDArray[Any]
"""Integers for the device: already there, or a NumPy array to be copied."""

SLOT_SKIP = -1
"""Slot of a chunk that is not in this batch: its elements stay as they are."""
SLOT_FILL = -2
"""Slot of a missing chunk: its elements become the fill value."""

_SOURCE = "assemble.cu"
_MAX_BLOCKS = 2**31 - 1  # grid limit in x; kernels stride over what is left
_TILE_NBYTES = 32 * 1024  # bytes one block copies: enough units a thread to pay for finding the region


def new_status() -> cupy.ndarray:
    """Status word for a series of launches: int32, shape (1,), zero, on the device."""
    import cupy

    return cupy.zeros(1, dtype=np.int32)


def check_status(status: cupy.ndarray, what: str) -> None:
    """Raise XGpuZarrError if a launch given `status` met something outside its buffers. Waits for the current stream.

    Parameters
    ----------
    status
        From `new_status`.
    what
        What the launches were for: the subject of the error message.
    """
    if int(status[0]) != 0:
        msg = f"{what}: a region lies outside its buffer, so the result is incomplete; this is a bug, please report it"
        raise XGpuZarrError(msg)


def scatter_slices(
    batch: cupy.ndarray,
    out: cupy.ndarray,
    *,
    out_start: Column,
    count: Column,
    inner_start: Column,
    step: Sequence[int],
    chunk_shape: Sequence[int],
    chunk_strides: Sequence[int],
    status: cupy.ndarray,
    chunk_offset: Column | None = None,
    word_nbytes: int = 1,
) -> None:
    """Copy the wanted region of each chunk to its place in the output.

    Element ``inner_start[c] + i * step`` of chunk c goes to element ``out_start[c] + i`` of the output, for every
    ``0 <= i < count[c]``.

    Parameters
    ----------
    batch
        Decoded chunks: contiguous bytes, uint8, ``(n_chunks, chunk_nbytes)`` or flat with `chunk_offset`.
    out
        Grouped output, C-contiguous, of the array's dtype, one axis a group.
    out_start, count, inner_start
        int64 ``(n_chunks, out.ndim)``, in elements. A count of 0 copies nothing.
    step
        Step through the chunk along each axis, in elements; negative walks backwards.
    chunk_shape, chunk_strides
        Shape and strides of a decoded chunk, in elements.
    status
        From `new_status`.
    chunk_offset
        int64 ``(n_chunks,)``, bytes from the start of `batch`; by default row c is chunk c.
    word_nbytes
        Bytes of each run to reverse: 1 leaves the byte order, the itemsize turns it (half of it for complex numbers).
    """
    itemsize, n_chunks = out.itemsize, len(out_start)
    chunk_nbytes = math.prod(chunk_shape) * itemsize
    _check_batch(batch, n_chunks, chunk_nbytes, chunk_offset)
    _check_out(out, word_nbytes)
    _check_strides(chunk_shape, chunk_strides, chunk_nbytes // itemsize)
    if n_chunks == 0 or out.size == 0:
        return
    axes = _axis_table(out, step, chunk_shape, chunk_strides)
    tiles = tiles_of(chunk_nbytes)
    launch(
        kernel_function(_SOURCE, "scatter_slices"),
        n_chunks * tiles,
        _threads(chunk_nbytes),
        batch,
        np.int64(batch.nbytes),
        None if chunk_offset is None else device_column(chunk_offset, (n_chunks,)),
        np.int64(chunk_nbytes),
        out,
        np.int64(out.nbytes),
        device_column(out_start, (n_chunks, out.ndim)),
        device_column(count, (n_chunks, out.ndim)),
        device_column(inner_start, (n_chunks, out.ndim)),
        np.int64(n_chunks),
        axes,
        np.int32(out.ndim),
        np.int64(itemsize),
        np.int32(word_nbytes),
        np.int64(tiles),
        status,
    )


def fill_slices(
    out: cupy.ndarray, fill_value: np.generic, *, out_start: Column, count: Column, status: cupy.ndarray
) -> None:
    """Write the fill value over regions of the output: those of missing chunks.

    Parameters
    ----------
    out
        Grouped output, C-contiguous.
    fill_value
        Scalar of ``out.dtype``, native byte order; its bits are copied, so a NaN keeps its payload.
    out_start, count
        int64 ``(n_regions, out.ndim)``, in elements.
    status
        From `new_status`.
    """
    _check_out(out, 1)
    n_regions = len(out_start)
    if n_regions == 0 or out.size == 0:
        return
    strides = [stride // out.itemsize for stride in out.strides]
    pattern = _fill_pattern(fill_value, out.dtype)
    tiles = tiles_of(out.nbytes // n_regions)
    launch(
        kernel_function(_SOURCE, "fill_slices"),
        n_regions * tiles,
        _threads(out.nbytes // n_regions),
        pattern,
        np.int64(pattern.nbytes),
        out,
        np.int64(out.nbytes),
        device_column(out_start, (n_regions, out.ndim)),
        device_column(count, (n_regions, out.ndim)),
        np.int64(n_regions),
        _axis_table(out, [1] * out.ndim, out.shape, strides),
        np.int32(out.ndim),
        np.int64(out.itemsize),
        np.int64(tiles),
        status,
    )


def gather_elements(
    batch: cupy.ndarray,
    out: cupy.ndarray,
    *,
    group_row: Sequence[Column],
    group_inner: Sequence[Column],
    n_group_rows: Sequence[int],
    slot: Column,
    chunk_nbytes: int,
    fill_value: np.generic,
    status: cupy.ndarray,
    chunk_offset: Column | None = None,
    word_nbytes: int = 1,
) -> None:
    """Fill the output element by element, from one table a group of the selection.

    Position p of group g lies in chunk row ``group_row[g][p]`` of that group. The rows of all groups, as one C-order
    index into ``n_group_rows``, give the chunk; ``sum(group_inner[g][p])`` is the element inside it.

    Parameters
    ----------
    batch
        Decoded chunks: contiguous bytes, uint8.
    out
        Grouped output, C-contiguous, one axis a group.
    group_row
        For each group, integers ``(out.shape[g],)``: row in the group's table of touched chunks.
    group_inner
        For each group, int64 ``(out.shape[g],)``: the group's part of the element offset in the chunk (inner
        coordinates times chunk strides, in elements).
    n_group_rows
        Touched chunks of each group.
    slot
        int32 ``(prod(n_group_rows),)``: place of each chunk in the batch, `SLOT_SKIP` or `SLOT_FILL`.
    chunk_nbytes
        Decoded size of a chunk, in bytes.
    fill_value
        Scalar of ``out.dtype`` for chunks marked `SLOT_FILL`.
    status
        From `new_status`.
    chunk_offset
        int64, bytes from the start of `batch` of each slot; by default slot s starts at ``s * chunk_nbytes``.
    word_nbytes
        As in `scatter_slices`.
    """
    import cupy

    _check_out(out, word_nbytes)
    check_bytes(batch, "batch")
    if out.size == 0:
        return
    if slot.shape != (math.prod(n_group_rows),):
        msg = f"slot has shape {slot.shape}, the groups' chunk rows {tuple(n_group_rows)} need one entry each"
        raise ValueError(msg)
    rows = _joined(group_row, out.shape, np.int32)
    pattern = _fill_pattern(fill_value, out.dtype)
    n_slots = batch.nbytes // max(chunk_nbytes, 1) if chunk_offset is None else len(chunk_offset)
    launch(
        kernel_function(_SOURCE, "gather_elements"),
        -(-out.size // 256),
        256,
        batch,
        np.int64(batch.nbytes),
        None if chunk_offset is None else device_column(chunk_offset, (n_slots,)),
        np.int64(n_slots),
        np.int64(chunk_nbytes),
        out,
        np.int64(out.size),
        rows,
        _joined(group_inner, out.shape, np.int64) * out.itemsize,
        np.int64(rows.size),
        _group_table(out.shape, n_group_rows),
        np.int32(out.ndim),
        cupy.asarray(slot, dtype=np.int32),
        np.int64(slot.size),
        pattern,
        np.int64(pattern.nbytes),
        np.int64(out.itemsize),
        np.int32(word_nbytes),
        status,
    )


def copy_bytes(
    source: cupy.ndarray,
    out: cupy.ndarray,
    *,
    source_offset: Column,
    out_offset: Column,
    nbytes: Column,
    mean_nbytes: int,
    status: cupy.ndarray,
) -> None:
    """Copy runs of bytes from one buffer to another.

    Parameters
    ----------
    source, out
        uint8, contiguous; they may not overlap.
    source_offset, out_offset, nbytes
        int64 ``(n_runs,)``, in bytes; no alignment is asked for. The destinations may not overlap.
    mean_nbytes
        About how long a run is, in bytes: decides how many blocks work on each, nothing else.
    status
        From `new_status`.
    """
    check_bytes(source, "source")
    check_bytes(out, "out")
    n_runs = len(nbytes)
    if n_runs == 0:
        return
    tiles = tiles_of(mean_nbytes)
    launch(
        kernel_function(_SOURCE, "copy_bytes"),
        n_runs * tiles,
        _threads(mean_nbytes),
        source,
        np.int64(source.nbytes),
        out,
        np.int64(out.nbytes),
        device_column(source_offset, (n_runs,)),
        device_column(out_offset, (n_runs,)),
        device_column(nbytes, (n_runs,)),
        np.int64(n_runs),
        np.int64(tiles),
        status,
    )


def write_guards(buffer: cupy.ndarray, offset: Column, guard_nbytes: int, *, status: cupy.ndarray) -> None:
    """Write the guard pattern into ``buffer[offset[g] : offset[g] + guard_nbytes]`` for each g (uint8, int64 bytes)."""
    check_bytes(buffer, "buffer")
    n_guards = len(offset)
    if n_guards * guard_nbytes == 0:
        return
    launch(
        kernel_function(_SOURCE, "write_guards"),
        -(-n_guards * guard_nbytes // 256),
        256,
        buffer,
        np.int64(buffer.nbytes),
        device_column(offset, (n_guards,)),
        np.int64(n_guards),
        np.int64(guard_nbytes),
        status,
    )


def check_guards(buffer: cupy.ndarray, offset: Column, guard_nbytes: int) -> cupy.ndarray:
    """Which guard zones were written to since `write_guards`: int32 ``(n_guards,)`` on the device, 1 where broken."""
    import cupy

    check_bytes(buffer, "buffer")
    n_guards = len(offset)
    broken = cupy.zeros(n_guards, dtype=np.int32)
    if n_guards * guard_nbytes == 0:
        return broken
    launch(
        kernel_function(_SOURCE, "check_guards"),
        -(-n_guards * guard_nbytes // 256),
        256,
        buffer,
        np.int64(buffer.nbytes),
        device_column(offset, (n_guards,)),
        np.int64(n_guards),
        np.int64(guard_nbytes),
        broken,
    )
    return broken


def launch(function: cupy.RawKernel, n_blocks: int, n_threads: int, *args: cupy.ndarray | np.generic | None) -> None:
    """Queue `function` on the current stream; `n_blocks` beyond the grid limit are left to the kernel's own stride."""
    function((min(n_blocks, _MAX_BLOCKS),), (n_threads,), args)


def device_column(values: Column, shape: tuple[int, ...]) -> cupy.ndarray:
    """`values` on the device, contiguous; ValueError unless they are int64 of `shape`."""
    import cupy

    if values.dtype != np.int64 or values.shape != shape:
        msg = f"column is {values.dtype} {values.shape}, needs int64 {shape}"
        raise ValueError(msg)
    return cupy.ascontiguousarray(cupy.asarray(values))


def _joined(tables: Sequence[Column], sizes: Sequence[int], dtype: type[np.generic]) -> cupy.ndarray:
    """Join the groups' tables, on the device."""
    import cupy

    if [table.shape for table in tables] != [(size,) for size in sizes]:
        msg = f"tables have shapes {[table.shape for table in tables]}, the output's groups have sizes {list(sizes)}"
        raise ValueError(msg)
    if not tables:
        return cupy.zeros(0, dtype=dtype)
    return cupy.concatenate([cupy.asarray(table, dtype=dtype) for table in tables])


def _axis_table(
    out: cupy.ndarray, step: Sequence[int], chunk_shape: Sequence[int], chunk_strides: Sequence[int]
) -> cupy.ndarray:
    """int64 (5, ndim) on the device: step, chunk shape, chunk stride, output shape, output stride; strides in bytes."""
    import cupy

    itemsize = out.itemsize
    rows = [step, chunk_shape, [stride * itemsize for stride in chunk_strides], out.shape, out.strides]
    if any(len(row) != out.ndim for row in rows):
        msg = f"step, chunk_shape and chunk_strides need one entry for each of the output's {out.ndim} axes"
        raise ValueError(msg)
    return cupy.asarray(np.array(rows, dtype=np.int64).reshape(5, out.ndim))


def _group_table(sizes: Sequence[int], n_group_rows: Sequence[int]) -> cupy.ndarray:
    """int64 (3, n_groups) on the device: positions, first entry in the joined tables, distance of rows in `slot`."""
    import cupy

    starts = [sum(sizes[:g]) for g in range(len(sizes))]
    row_strides = [math.prod(n_group_rows[g + 1 :]) for g in range(len(sizes))]
    return cupy.asarray(np.array([sizes, starts, row_strides], dtype=np.int64).reshape(3, len(sizes)))


def _fill_pattern(fill_value: np.generic, dtype: np.dtype[np.generic]) -> cupy.ndarray:
    """Bytes of `fill_value`, repeated to a multiple of 16 (the widest store), on the device."""
    import cupy

    element = np.asarray(fill_value, dtype=dtype).tobytes()
    return cupy.asarray(np.frombuffer(element * (math.lcm(len(element), 16) // len(element)), dtype=np.uint8))


def check_bytes(buffer: cupy.ndarray, name: str) -> None:
    """Raise ValueError unless `buffer` is contiguous bytes."""
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        msg = f"{name} is {buffer.dtype} {buffer.shape}, needs contiguous uint8"
        raise ValueError(msg)


def _check_batch(batch: cupy.ndarray, n_chunks: int, chunk_nbytes: int, chunk_offset: Column | None) -> None:
    check_bytes(batch, "batch")
    if chunk_offset is None and batch.nbytes < n_chunks * chunk_nbytes:
        msg = f"batch has {batch.nbytes} bytes, {n_chunks} chunks of {chunk_nbytes} bytes need more"
        raise ValueError(msg)


def _check_out(out: cupy.ndarray, word_nbytes: int) -> None:
    if not out.flags.c_contiguous:
        msg = f"out has strides {out.strides}, needs C order"
        raise ValueError(msg)
    if word_nbytes not in (1, 2, 4, 8) or out.itemsize % word_nbytes != 0:
        msg = f"word_nbytes is {word_nbytes}, needs 1, 2, 4 or 8, a divisor of the itemsize {out.itemsize}"
        raise ValueError(msg)


def _check_strides(shape: Sequence[int], strides: Sequence[int], size: int) -> None:
    """Every element of a chunk lies inside it; with this the device only has to check coordinates."""
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if size > 0 and (any(stride < 0 for stride in strides) or last >= size):
        msg = f"chunk_strides {tuple(strides)} reach outside a chunk of shape {tuple(shape)}"
        raise ValueError(msg)


def tiles_of(nbytes: int) -> int:
    """Blocks of threads that share `nbytes` bytes of work."""
    return max(1, -(-nbytes // _TILE_NBYTES))


def _threads(nbytes: int) -> int:
    """Threads a block: fewer where a tile has fewer 16-byte units than a full block has threads."""
    return min(256, max(32, -(-nbytes // 512) * 32))
