"""Carrying out a read plan on the host: each task of a thread pool takes a few neighbouring chunks from bytes to place.

`read_host` fills a NumPy array: a chunk is still in cache when it is copied. `HostTasks` is what it shares with
`xgpuzarr.execute_staged`, which sends the decoded chunks on to the device.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.decoders.host import decode_chunk
from xgpuzarr.diagnostics import ReadReport, emit
from xgpuzarr.errors import CorruptChunkError, UnsupportedError
from xgpuzarr.locate import locate
from xgpuzarr.plan.byte_ranges import ByteRanges, coalesce
from xgpuzarr.plan.codec_facts import DEVICE_ONLY
from xgpuzarr.plan.group_chunks import SliceChunks
from xgpuzarr.plan.selection import AxisSlice
from xgpuzarr.pool import run_all
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.plan.selection import Selection

__all__ = ["HostTasks", "read_by_zarr", "read_host"]

TASK_DECODED_NBYTES = 4 << 20
"""Decoded bytes one task aims at: enough to make the cost of a task small, few enough to keep threads busy."""


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


class HostTasks(ABC):
    """The chunks of one read, encoded bytes in host memory, a few at a time on every thread.

    Parameters
    ----------
    plan
        The read.
    source
        From where.

    Raises
    ------
    UnsupportedError
        The host has no decoder for them.
    """

    def __init__(self, plan: ReadPlan, source: Source) -> None:
        self.plan, self.source = plan, source
        self.chain = plan.layout.codec_chain
        compressor = self.chain.compressor
        if compressor is not None and compressor.codec in DEVICE_ONLY:
            raise UnsupportedError(
                f"array {plan.layout.path!r}: codec {compressor.codec!r} has no decoder on the host; "
                "open it with device='cuda' and a route other than 'host'"
            )

    @abstractmethod
    def place(self, row: int, encoded: memoryview, offset: int | None = None) -> None:
        """Take one chunk from its bytes to its place; on any thread.

        Parameters
        ----------
        row
            Plan row of the chunk.
        encoded
            Its encoded bytes.
        offset
            Where these start in the object; None where they are the object.
        """

    @abstractmethod
    def fill(self, row: int) -> None:
        """Put the fill value where a chunk does not exist; on any thread."""

    def run(self, rows: NDArray[np.int64]) -> None:
        """Bring the chunks of some plan rows to their place."""
        plan, options = self.plan, self.source.options
        rows_a_task = max(1, TASK_DECODED_NBYTES // max(1, plan.layout.chunk_nbytes))
        rows_a_task = min(rows_a_task, max(1, math.ceil(len(rows) / (4 * options.threads))))
        if not plan.layout.shard_levels:
            starts = range(0, len(rows), rows_a_task)
            run_all(lambda start: self.objects(rows[start : start + rows_a_task]), starts, options.threads)
            return
        order = rows[np.lexsort((self.ranges.offset[rows], self.ranges.object_row[rows]))]
        tasks = _tasks(self.ranges.object_row[order], rows_a_task)
        run_all(lambda task: self._shard_part(order[task[0] : task[1]]), tasks, options.threads)

    @cached_property
    def ranges(self) -> ByteRanges:
        """Where the chunks of a sharded array lie."""
        n_threads = self.source.options.threads
        return locate(self.plan, self.source.reader, lambda call, numbers: run_all(call, numbers, n_threads))

    def objects(self, rows: NDArray[np.int64]) -> None:
        """Chunks that are objects of their own."""
        wanted = [ObjectRead(key, ((0, WHOLE),)) for key in self.plan.keys(self.plan.object_row[rows])]
        for row, parts in zip(rows.tolist(), self.source.reader.read(wanted), strict=True):
            if parts is None:
                self.fill(row)
            else:
                self.place(row, parts[0])

    def _shard_part(self, rows: NDArray[np.int64]) -> None:
        """Chunks of one shard, in the order they are stored."""
        options, ranges = self.source.options, self.ranges
        present = rows[ranges.nbytes[rows] != MISSING]
        for row in rows[ranges.nbytes[rows] == MISSING].tolist():
            self.fill(row)
        if not len(present):
            return
        part = ByteRanges(ranges.object_row[present], ranges.offset[present], ranges.nbytes[present])
        spans = coalesce(part, max_gap_bytes=options.max_gap_bytes, max_read_bytes=options.max_read_bytes)
        number = int(part.object_row[0])
        key = self.plan.keys(slice(number, number + 1))[0]
        span_ranges = tuple(zip(spans.offset.tolist(), spans.nbytes.tolist(), strict=True))
        (parts,) = self.source.reader.read([ObjectRead(key, span_ranges)])
        if parts is None:
            raise self.corrupt(int(present[0]), "the shard vanished while it was being read")
        columns = (present, spans.chunk_span, spans.chunk_offset, part.nbytes, part.offset)
        for row, span, at, nbytes, offset in zip(*(column.tolist() for column in columns), strict=True):
            self.place(row, parts[span][at : at + nbytes], offset)

    def decode(self, row: int, encoded: memoryview, out: NDArray[np.uint8], offset: int | None) -> None:
        """Decode one chunk into `out`, all but axes and byte order."""
        problem = decode_chunk(self.chain, encoded, out)
        if problem:
            raise self.corrupt(row, problem, offset, len(encoded))

    def corrupt(
        self, row: int, problem: str, offset: int | None = None, nbytes: int | None = None
    ) -> CorruptChunkError:
        """Make the error of one chunk."""
        where = self.plan.label(row) if offset is None else self.plan.label(row, offset, nbytes)
        return CorruptChunkError(f"{where}: {problem}")


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
        self.slab = plan.slab_offset(slice(None)) if as_stored else np.full(plan.n_chunks, -1, np.int64)
        self.flat = out.reshape(-1).view(np.uint8) if as_stored else None
        self.thread = threading.local()
        self.slices = _slices(plan)

    def objects(self, rows: NDArray[np.int64]) -> None:
        """Chunks that are objects of their own; what is stored as it lies in the output goes straight there."""
        reader = self.source.reader
        if not self.chain.is_plain or not isinstance(reader, LocalReader):
            super().objects(rows)
            return
        straight = rows[self.slab[rows] >= 0]
        for row, key in zip(straight.tolist(), self.plan.keys(self.plan.object_row[straight]), strict=True):
            place = self._slab(row)
            object_nbytes = reader.read_into(key, memoryview(place))
            if object_nbytes == MISSING:
                self.fill(row)
                continue
            if object_nbytes != place.nbytes:
                raise self.corrupt(row, f"object has {object_nbytes} bytes, the chunk shape needs {place.nbytes}")
            self.encoded_nbytes.append(object_nbytes)
        super().objects(rows[self.slab[rows] < 0])

    def place(self, row: int, encoded: memoryview, offset: int | None = None) -> None:
        """Decode one chunk and copy what is wanted of it to the output."""
        self.encoded_nbytes.append(len(encoded))
        if self.chain.by_zarr:
            try:
                chunk = self.source.chunk_decoder.decode_array(encoded)
            except ValueError as error:
                raise self.corrupt(row, str(error), offset, len(encoded)) from error
        elif self.slab[row] >= 0:
            self.decode(row, encoded, self._slab(row), offset)
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

    def _slab(self, row: int) -> NDArray[np.uint8]:
        """The bytes of the output that are exactly this chunk."""
        assert self.flat is not None  # slab offsets exist only with it
        start = int(self.slab[row]) * self.out.itemsize
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


def _tasks(object_row: NDArray[np.int64], rows_a_task: int) -> list[tuple[int, int]]:
    """Cut sorted rows into (start, stop) pieces of at most `rows_a_task` that stay within one object."""
    edges = np.flatnonzero(np.diff(object_row)) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), len(object_row)]
    return [
        (at, min(at + rows_a_task, stop))
        for start, stop in zip(starts, stops, strict=True)
        for at in range(start, stop, rows_a_task)
    ]
