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
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels.arguments import (
    axis_table,
    check_batch,
    check_bytes,
    check_out,
    check_strides,
    device_arrays,
    device_columns,
    fill_pattern,
    group_table,
    joined_tables,
    launch,
    launch_items,
    threads_of,
    tiles_of,
)
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = [
    "SLOT_FILL",
    "SLOT_SKIP",
    "check_guards",
    "check_status",
    "copy_bytes",
    "fill_slices",
    "gather_elements",
    "new_status",
    "scatter_slices",
    "write_guards",
]

SLOT_SKIP = -1
"""Slot of a chunk that is not in this batch: its elements stay as they are."""
SLOT_FILL = -2
"""Slot of a missing chunk: its elements become the fill value."""

_SOURCE = "assemble.cu"


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
    check_batch(batch, n_chunks, chunk_nbytes, chunk_offset)
    check_out(out, word_nbytes)
    check_strides(chunk_shape, chunk_strides, chunk_nbytes // itemsize)
    if n_chunks == 0 or out.size == 0:
        return
    if chunk_offset is None:
        chunk_offset = np.arange(n_chunks, dtype=np.int64) * chunk_nbytes
    axes = axis_table(out, step, chunk_shape, chunk_strides)
    chunk_offset, *cells, axes = device_arrays(
        [chunk_offset, out_start, count, inner_start, axes], [(n_chunks,), *[(n_chunks, out.ndim)] * 3, axes.shape]
    )
    tiles = tiles_of(chunk_nbytes)
    launch(
        kernel_function(_SOURCE, "scatter_slices"),
        n_chunks * tiles,
        threads_of(chunk_nbytes),
        batch,
        batch.nbytes,
        chunk_offset,
        chunk_nbytes,
        out,
        out.nbytes,
        *cells,
        n_chunks,
        axes,
        np.int32(out.ndim),
        itemsize,
        np.int32(word_nbytes),
        tiles,
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
    check_out(out, 1)
    n_regions = len(out_start)
    if n_regions == 0 or out.size == 0:
        return
    strides = [stride // out.itemsize for stride in out.strides]
    axes = axis_table(out, [1] * out.ndim, out.shape, strides)
    out_start, count, axes = device_arrays([out_start, count, axes], [*[(n_regions, out.ndim)] * 2, axes.shape])
    pattern = fill_pattern(fill_value, out.dtype)
    tiles = tiles_of(out.nbytes // n_regions)
    launch(
        kernel_function(_SOURCE, "fill_slices"),
        n_regions * tiles,
        threads_of(out.nbytes // n_regions),
        pattern,
        pattern.nbytes,
        out,
        out.nbytes,
        out_start,
        count,
        n_regions,
        axes,
        np.int32(out.ndim),
        out.itemsize,
        tiles,
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

    check_out(out, word_nbytes)
    check_bytes(batch, "batch")
    if out.size == 0:
        return
    if slot.shape != (math.prod(n_group_rows),):
        msg = f"slot has shape {slot.shape}, the groups' chunk rows {tuple(n_group_rows)} need one entry each"
        raise ValueError(msg)
    rows = joined_tables(group_row, out.shape, np.int32)
    pattern = fill_pattern(fill_value, out.dtype)
    if chunk_offset is None:
        chunk_offset = np.arange(batch.nbytes // max(chunk_nbytes, 1), dtype=np.int64) * chunk_nbytes
    groups = group_table(out.shape, n_group_rows)
    chunk_offset, groups = device_arrays([chunk_offset, groups], [(len(chunk_offset),), groups.shape])
    launch_items(
        _SOURCE,
        "gather_elements",
        out.size,
        256,
        batch,
        batch.nbytes,
        chunk_offset,
        len(chunk_offset),
        chunk_nbytes,
        out,
        out.size,
        rows,
        joined_tables(group_inner, out.shape, np.int64) * out.itemsize,
        rows.size,
        groups,
        np.int32(out.ndim),
        cupy.asarray(slot, dtype=np.int32),
        slot.size,
        pattern,
        pattern.nbytes,
        out.itemsize,
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
        threads_of(mean_nbytes),
        source,
        source.nbytes,
        out,
        out.nbytes,
        *device_columns(n_runs, source_offset, out_offset, nbytes),
        n_runs,
        tiles,
        status,
    )


def write_guards(buffer: cupy.ndarray, offset: Column, guard_nbytes: int, *, status: cupy.ndarray) -> None:
    """Write the guard pattern into ``buffer[offset[g] : offset[g] + guard_nbytes]`` for each g (uint8, int64 bytes)."""
    check_bytes(buffer, "buffer")
    n_guards = len(offset)
    launch_items(
        _SOURCE,
        "write_guards",
        n_guards * guard_nbytes,
        256,
        buffer,
        buffer.nbytes,
        *device_columns(n_guards, offset),
        n_guards,
        guard_nbytes,
        status,
    )


def check_guards(buffer: cupy.ndarray, offset: Column, guard_nbytes: int) -> cupy.ndarray:
    """Which guard zones were written to since `write_guards`: int32 ``(n_guards,)`` on the device, 1 where broken."""
    import cupy

    check_bytes(buffer, "buffer")
    n_guards = len(offset)
    broken = cupy.zeros(n_guards, dtype=np.int32)
    launch_items(
        _SOURCE,
        "check_guards",
        n_guards * guard_nbytes,
        256,
        buffer,
        buffer.nbytes,
        *device_columns(n_guards, offset),
        n_guards,
        guard_nbytes,
        broken,
    )
    return broken
