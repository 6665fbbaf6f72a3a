"""Chunks whose encoded bytes come to host memory, taken to their place by a pool of threads.

`HostTasks` is what reads to NumPy arrays (`xgpuzarr.execute_host`) share with reads to the device whose chunks the host
decodes (`xgpuzarr.execute_staged`). From local files each task reads and decodes a few neighbouring chunks. Of other
stores many requests are under way, and threads decode what has arrived.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.decoders.host import decode_chunk
from xgpuzarr.errors import ChunkReadError, CorruptChunkError, UnsupportedError
from xgpuzarr.locate import locate
from xgpuzarr.plan.byte_ranges import ByteRanges, Spans, coalesce
from xgpuzarr.plan.codec_facts import DEVICE_ONLY
from xgpuzarr.plan.shard_index import bytes_after
from xgpuzarr.pool import executor, run_all
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead
from xgpuzarr.readers.store import StoreReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.readers.protocol import ReadError

__all__ = ["HostTasks"]

TASK_DECODED_NBYTES = 4 << 20
"""Decoded bytes one task aims at: enough to make the cost of a task small, few enough to keep threads busy."""

KEYS_AT_ONCE = 1024
"""Keys made at a time, of objects that are requested one by one."""


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
        if isinstance(self.source.reader, StoreReader):
            self._run_requests(rows, self.source.reader)
            return
        rows_a_task = max(1, TASK_DECODED_NBYTES // max(1, plan.layout.chunk_nbytes))
        rows_a_task = min(rows_a_task, max(1, math.ceil(len(rows) / (4 * options.threads))))
        if not plan.layout.shard_levels:
            starts = range(0, len(rows), rows_a_task)
            run_all(lambda start: self.objects(rows[start : start + rows_a_task]), starts, options.threads)
            return
        order = rows[self.ranges.take(rows).order()]
        tasks = _tasks(self.ranges.object_row[order], rows_a_task)
        run_all(lambda task: self._shard_part(order[task[0] : task[1]]), tasks, options.threads)

    @cached_property
    def ranges(self) -> ByteRanges:
        """Where the chunks of a sharded array lie."""
        return locate(self.plan, self.source.reader, self.source.options.threads, np.arange(self.plan.n_chunks))

    def objects(self, rows: NDArray[np.int64]) -> None:
        """Chunks that are objects of their own."""
        for row, key in zip(rows.tolist(), self.plan.keys(self.plan.object_row[rows]), strict=True):
            try:
                (parts,) = self.source.reader.read([ObjectRead(key, ((0, WHOLE),))])
            except (ChunkReadError, CorruptChunkError) as error:
                raise self.named(row, error) from error
            if parts is None:
                self.fill(row)
            else:
                self.place(row, parts[0])

    def _shard_part(self, rows: NDArray[np.int64]) -> None:
        """Chunks of one shard, in the order they are stored."""
        ranges = self.ranges
        present = rows[ranges.nbytes[rows] != MISSING]
        for row in rows[ranges.nbytes[rows] == MISSING].tolist():
            self.fill(row)
        if not len(present):
            return
        part, spans = self._spans(present, self.source.options.max_gap_bytes)
        number = int(part.object_row[0])
        key = self.plan.keys(slice(number, number + 1))[0]
        span_ranges = tuple(zip(spans.offset.tolist(), spans.nbytes.tolist(), strict=True))
        try:
            (parts,) = self.source.reader.read([ObjectRead(key, span_ranges)])
        except (ChunkReadError, CorruptChunkError) as error:
            raise self.named(int(present[0]), error) from error
        if parts is None:
            raise self._vanished(int(present[0]))
        columns = (present, spans.chunk_span, spans.chunk_offset, part.nbytes, part.offset)
        for row, span, at, nbytes, offset in zip(*(column.tolist() for column in columns), strict=True):
            self.place(row, parts[span][at : at + nbytes], offset)

    def _run_requests(self, rows: NDArray[np.int64], reader: StoreReader) -> None:
        """Chunks of a store that answers requests: many are under way while threads work on what has arrived."""
        options, nbytes = self.source.options, self.plan.layout.chunk_nbytes
        n_a_task = max(1, TASK_DECODED_NBYTES // max(1, nbytes))
        if self.plan.layout.shard_levels:
            is_there = self.ranges.nbytes[rows] != MISSING
            run_all(self.fill, rows[~is_there].tolist(), options.threads)
            part, spans = self._spans(rows[is_there], options.max_remote_gap_bytes)
            nbytes = int(spans.nbytes.max(initial=0))
            wanted = self._span_requests(rows[is_there], part, spans)
        else:
            wanted = self._object_requests(rows)

        def take(chunks: list[_Chunk], parts: list[memoryview] | None) -> list[Callable[[], None]]:
            return [
                partial(self._place_all, chunks[start : start + n_a_task], None if parts is None else parts[0])
                for start in range(0, len(chunks), n_a_task)
            ]

        def failed(chunks: list[_Chunk], error: ReadError) -> ReadError:
            # Where the object ends too early, the chunk that ends last is one of those that are not there.
            is_cut = isinstance(error, CorruptChunkError)
            chunk = max(chunks, key=lambda chunk: chunk.span.stop) if is_cut else chunks[0]
            return self.named(chunk.row, error)

        reader.read_each(wanted, take, failed, executor(options.threads), item_nbytes=nbytes)

    def _object_requests(self, rows: NDArray[np.int64]) -> Iterator[tuple[ObjectRead, list[_Chunk]]]:
        """A request for each chunk that is an object of its own."""
        for start in range(0, len(rows), KEYS_AT_ONCE):
            some = rows[start : start + KEYS_AT_ONCE]
            for row, key in zip(some.tolist(), self.plan.keys(self.plan.object_row[some]), strict=True):
                yield ObjectRead(key, ((0, WHOLE),)), [_Chunk(row, None, slice(None))]

    def _span_requests(
        self, rows: NDArray[np.int64], part: ByteRanges, spans: Spans
    ) -> Iterator[tuple[ObjectRead, list[_Chunk]]]:
        """A request for each span of a shard, with all chunks in it."""
        order = np.argsort(spans.chunk_span, kind="stable")
        bounds = np.searchsorted(spans.chunk_span[order], np.arange(len(spans.nbytes) + 1)).tolist()
        nbytes_after = bytes_after(spans, self.plan.layout.shard_levels[0])
        places = zip(spans.offset.tolist(), spans.nbytes.tolist(), nbytes_after.tolist(), strict=True)
        for number, (offset, nbytes, after) in enumerate(places):
            mine = order[bounds[number] : bounds[number + 1]]
            start, size = spans.chunk_offset[mine], part.nbytes[mine]
            columns = (rows[mine], part.offset[mine], start, start + size)
            chunks = [
                _Chunk(row, at, slice(first, stop))
                for row, at, first, stop in zip(*(column.tolist() for column in columns), strict=True)
            ]
            (key,) = self.plan.keys(spans.object_row[number : number + 1])
            yield ObjectRead(key, ((offset, nbytes),), after), chunks

    def _place_all(self, chunks: list[_Chunk], encoded: memoryview | None) -> None:
        """Take the chunks of one request to their place."""
        for chunk in chunks:
            if encoded is not None:
                self.place(chunk.row, encoded[chunk.span], chunk.offset)
            elif chunk.offset is None:
                self.fill(chunk.row)
            else:
                raise self._vanished(chunk.row)

    def _spans(self, rows: NDArray[np.int64], max_gap_bytes: int) -> tuple[ByteRanges, Spans]:
        """Byte ranges of stored chunks, and the reads that fetch them."""
        part = self.ranges.take(rows)
        return part, coalesce(part, max_gap_bytes=max_gap_bytes, max_read_bytes=self.source.options.max_read_bytes)

    def _vanished(self, row: int) -> CorruptChunkError:
        return self.corrupt(row, "the shard vanished while it was being read")

    def decode(self, row: int, encoded: memoryview, out: NDArray[np.uint8], offset: int | None) -> None:
        """Decode one chunk into `out`, all but axes and byte order."""
        try:
            problem = decode_chunk(self.chain, encoded, out)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.plan.label(row)}: {error}") from error
        if problem:
            raise self.corrupt(row, problem, offset, len(encoded))

    def named(self, row: int, error: ReadError) -> ReadError:
        """Make the error of a chunk, or of one of some that are read together, out of a reader's."""
        coords = tuple(self.plan.chunk_coords[row].tolist())
        return type(error)(f"array {self.plan.layout.path!r}, chunk {coords}: {error}")

    def corrupt(
        self, row: int, problem: str, offset: int | None = None, nbytes: int | None = None
    ) -> CorruptChunkError:
        """Make the error of one chunk."""
        where = self.plan.label(row) if offset is None else self.plan.label(row, offset, nbytes)
        return CorruptChunkError(f"{where}: {problem}")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk lies in the answer to a request: `span`. `offset` is where it starts in a shard, else None."""

    row: int
    offset: int | None
    span: slice


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
