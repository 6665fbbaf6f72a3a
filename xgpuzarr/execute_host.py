"""Carrying out a read plan on the host, into a NumPy array: a chunk is in cache when it is copied to its place."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.diagnostics import ReadReport, emit
from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.host_tasks import HostTasks
from xgpuzarr.plan.group_chunks import SliceChunks
from xgpuzarr.plan.selection import AxisSlice
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import MISSING

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.plan.selection import Selection

__all__ = ["read_by_zarr", "read_host"]


def read_host(plan: ReadPlan, source: Source) -> NDArray[Any]:
    """Grouped output of a plan, decoded on the host into host memory."""
    out = np.empty(plan.selection.grouped_shape, plan.layout.dtype)
    if out.size == 0:
        return out
    began = time.perf_counter()
    read = _HostRead(plan, source, out)
    read.run(np.arange(plan.n_chunks))
    emit(
        ReadReport(
            array=plan.layout.path,
            route="host",
            n_chunks=plan.n_chunks,
            n_missing=plan.n_chunks - len(read.encoded_nbytes),
            encoded_nbytes=sum(read.encoded_nbytes),
            decoded_nbytes=len(read.encoded_nbytes) * plan.layout.chunk_nbytes,
            out_nbytes=plan.out_nbytes,
            total_s=time.perf_counter() - began,
        )
    )
    return out


def read_by_zarr(array: zarr.Array[Any], selection: Selection) -> NDArray[Any]:
    """Grouped output of a selection of an array that no plan can describe (an irregular chunk grid).

    zarr-python reads the box around the selection, and NumPy picks from it.
    """
    box, inside = [slice(0, 0)] * array.ndim, [np.empty(0, np.int64)] * array.ndim
    for group in selection.groups:
        coords = (_positions(group),) if isinstance(group, AxisSlice) else group.coords
        for axis, positions in zip(group.axes, coords, strict=True):
            first = int(positions.min()) if len(positions) else 0
            box[axis] = slice(first, int(positions.max()) + 1 if len(positions) else 0)
            inside[axis] = positions - first
    part = np.asarray(array[tuple(box)])
    part = part.astype(part.dtype.newbyteorder("="), copy=False)
    out = np.empty(selection.grouped_shape, part.dtype)
    if out.size:
        _assign(out, (slice(None),) * out.ndim, part, tuple(inside), selection)
    return out


def _positions(group: AxisSlice) -> NDArray[np.int64]:
    return group.start + group.step * np.arange(group.count, dtype=np.int64)


class _HostRead(HostTasks):
    """One read on the host; its tasks write disjoint parts of `out`."""

    def __init__(self, plan: ReadPlan, source: Source, out: NDArray[Any]) -> None:
        super().__init__(plan, source)
        layout, self.out = plan.layout, out
        self.confirmed = False
        self.encoded_nbytes: list[int] = []  # appended to by every thread
        self.stored_dtype = self.chain.stored_dtype or layout.dtype
        axes = self.chain.axes(layout.ndim)
        self.stored_shape = tuple(layout.chunk_shape[axis] for axis in axes)
        self.to_array_axes = tuple(int(i) for i in np.argsort(axes))
        as_stored = self.chain.stored_dtype == layout.dtype and axes == tuple(range(layout.ndim))
        self.straight_offset = plan.straight_offset(slice(None)) if as_stored else np.full(plan.n_chunks, -1, np.int64)
        self.flat = out.reshape(-1).view(np.uint8) if as_stored else None
        self.thread = threading.local()
        self.slices = _slices(plan)

    def objects(self, rows: NDArray[np.int64]) -> None:
        """Chunks that are objects of their own; what is stored as it lies in the output goes straight there."""
        reader = self.source.reader
        if not self.chain.is_plain or not isinstance(reader, LocalReader):
            super().objects(rows)
            return
        straight = rows[self.straight_offset[rows] >= 0]
        for row, key in zip(straight.tolist(), self.plan.keys(self.plan.object_row[straight]), strict=True):
            place = self._target(row)
            try:
                object_nbytes = reader.read_into(key, memoryview(place))
            except (ChunkReadError, CorruptChunkError) as error:
                raise self.named(row, error) from error
            if object_nbytes == MISSING:
                self.fill(row)
                continue
            if object_nbytes != place.nbytes:
                raise self.corrupt(row, f"object has {object_nbytes} bytes, the chunk shape needs {place.nbytes}")
            self.encoded_nbytes.append(object_nbytes)
        super().objects(rows[self.straight_offset[rows] < 0])

    def place(self, row: int, encoded: memoryview, offset: int | None = None) -> None:
        """Decode one chunk and copy what is wanted of it to the output."""
        self.encoded_nbytes.append(len(encoded))
        if self.chain.by_zarr:
            try:
                chunk = self.source.chunk_decoder.decode_array(encoded)
            except ValueError as error:
                raise self.corrupt(row, str(error), offset, len(encoded)) from error
        elif self.straight_offset[row] >= 0:
            self.decode(row, encoded, self._target(row), offset)
            return
        else:
            scratch, chunk = self._scratch()
            self.decode(row, encoded, scratch, offset)
        if self.slices is None:
            positions, inner = self.plan.region(row)
            _assign(self.out, positions, chunk, inner, self.plan.selection)
        else:
            pairs = [pairs[at] for pairs, at in zip(self.slices, self.plan.group_row[row].tolist(), strict=True)]
            self.out[tuple([pair[0] for pair in pairs])] = chunk[tuple([pair[1] for pair in pairs])]

    def _scratch(self) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Room for one stored chunk, and the same memory as the chunk's elements; one a thread."""
        if not hasattr(self.thread, "scratch"):
            scratch = np.empty(self.plan.layout.chunk_nbytes, np.uint8)
            stored = scratch.view(self.stored_dtype).reshape(self.stored_shape)
            self.thread.scratch = scratch, stored.transpose(self.to_array_axes)
        scratch_and_chunk: tuple[NDArray[np.uint8], NDArray[Any]] = self.thread.scratch
        return scratch_and_chunk

    def _target(self, row: int) -> NDArray[np.uint8]:
        """The bytes of the output that are exactly this chunk."""
        assert self.flat is not None  # such offsets exist only with it
        start = int(self.straight_offset[row]) * self.out.itemsize
        return self.flat[start : start + self.plan.layout.chunk_nbytes]

    def fill(self, row: int) -> None:
        if not self.confirmed:
            self.source.check_still_there()
            self.confirmed = True
        positions, _ = self.plan.region(row)
        self.out[_product_index(positions)] = self.plan.layout.fill_value


def _slices(plan: ReadPlan) -> list[list[tuple[slice, slice]]] | None:
    """For each group and row of its table the region of a chunk, in the output and in the chunk; made once a read.

    None if a group is not a slice: then `ReadPlan.region` says it, chunk by chunk.
    """
    slices = []
    for table in plan.group_chunks:
        if not isinstance(table, SliceChunks):
            return None
        regions = (table.region(row) for row in range(len(table.chunk_coords)))
        slices.append([(positions, inner) for positions, (inner,) in regions])
    return slices


def _assign(
    out: NDArray[Any],
    positions: tuple[slice | NDArray[np.int64], ...],
    chunk: NDArray[Any],
    inner: tuple[slice | NDArray[np.int64], ...],
    selection: Selection,
) -> None:
    """Copy the region of one chunk; `ReadPlan.region` says what the positions mean."""
    if all(isinstance(p, slice) for p in inner):
        part = chunk[inner]
    else:
        # axes side by side in the order of the groups, then each group's axes taken as one
        part = chunk.transpose([axis for group in selection.groups for axis in group.axes])
        for number, group in enumerate(selection.groups):
            picks = tuple(inner[axis] for axis in group.axes)
            part = part[(slice(None),) * number + picks]
    out[_product_index(positions)] = part


def _product_index(positions: tuple[slice | NDArray[np.int64], ...]) -> Any:
    """Index for the product of positions: slices where all are, else open-mesh arrays."""
    if sum(not isinstance(p, slice) for p in positions) <= 1:
        return positions
    spread = [np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in positions]
    return np.ix_(*spread)
