"""Encoded chunks of waves, out of stores that are no local folder, into device memory.

Waves are read ahead: while one is copied to the device and its decoding is queued, requests of those after it are under
way. What arrives waits in ordinary host memory until its wave is complete, for two reasons. How large an object is
comes with its bytes, and a wave lies in one slab, laid out by the sizes of all its objects. And clients bring bytes in
memory of their own, so that one copy on the host is needed in any case: it goes to page-locked memory, on all threads,
while the network goes on.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.device_wave import Fetched
from xgpuzarr.errors import ChunkReadError
from xgpuzarr.plan.byte_ranges import ByteRanges, Spans, coalesce, pack
from xgpuzarr.plan.shard_index import bytes_after
from xgpuzarr.pool import run_all
from xgpuzarr.readers.protocol import WHOLE, ObjectRead
from xgpuzarr.readers.staging import PinnedPool
from xgpuzarr.readers.store import StoreReader

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan

    type Arrived = list[list[memoryview] | None]

__all__ = ["StoreFetch", "check_none_vanished", "layout_slab", "reads_of", "spans_of"]

STAGING_NBYTES = 16 << 20
N_STAGING_BUFFERS = 4


class StoreFetch:
    """Reads the waves of one read, and brings them to the device that is current when it is made.

    Parameters
    ----------
    plan
        The read.
    source
        From where.
    ranges
        Byte range of every chunk; None where chunks are whole objects, and only reading tells which exist.
    waves
        Plan rows of the chunks of each wave, in the order in which they will be fetched; none is missing in `ranges`.
    remote_reader_reason
        Why the client reads, and not KvikIO.

    Attributes
    ----------
    encoded_nbytes
        Encoded size of the chunks that were fetched so far, in bytes.
    remote_reader, remote_reader_reason, n_again
        "client", why not KvikIO, and 0: as `ReadReport` has them.
    """

    remote_reader = "client"
    n_again = 0

    def __init__(
        self,
        plan: ReadPlan,
        source: Source,
        ranges: ByteRanges | None,
        waves: list[NDArray[np.int64]],
        remote_reader_reason: str,
    ) -> None:
        self.remote_reader_reason = remote_reader_reason
        self.plan, self.source, self.ranges = plan, source, ranges
        self.device = cupy.cuda.Device()
        self.ahead = deque(waves)
        self.arrivals = self._read(waves)
        self.encoded_nbytes = 0

    def drop(self) -> bool:
        """False: no memory of the device is held for waves ahead."""
        return False

    def ask(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> None:
        """Nothing: the requests of the next waves are under way in any case."""

    def fetch(
        self,
        rows: NDArray[np.int64],
        stream: cupy.cuda.Stream,
        following: NDArray[np.int64] | None,
        ahead: cupy.cuda.Stream | None,
    ) -> tuple[Fetched, NDArray[np.int64]]:
        """Read the next wave; or any other, which is then read for itself: a part of one that met too little memory.

        Parameters
        ----------
        rows
            Plan rows of the chunks.
        stream
            The current stream; the chunks are ready on it.
        following, ahead
            The next wave, and its stream: not used.

        Returns
        -------
        fetched
            Chunks that exist.
        missing
            Plan rows of those that do not.

        Raises
        ------
        ChunkReadError, CorruptChunkError
            Naming store, key and range.
        """
        del following, ahead
        if self.ahead and self.ahead[0] is rows:
            self.ahead.popleft()
            fetched, missing = self._copy_to_device(rows, next(self.arrivals), stream)
        else:
            with closing(self._read([rows])) as arrivals:
                fetched, missing = self._copy_to_device(rows, next(arrivals), stream)
        self.encoded_nbytes += int(fetched.nbytes.sum())
        return fetched, missing

    def close(self) -> None:
        """End what is under way."""
        self.arrivals.close()

    def _read(self, waves: list[NDArray[np.int64]]) -> Generator[Arrived]:
        """What arrives for each wave, in turn."""
        reader = self.source.reader
        if isinstance(reader, StoreReader):
            wave_nbytes = max(map(len, waves), default=0) * self.plan.layout.chunk_nbytes
            return reader.read_ahead(waves, self._wanted, batch_nbytes=wave_nbytes)
        return self._read_on_threads(waves)

    def _copy_to_device(
        self, rows: NDArray[np.int64], arrived: Arrived, stream: cupy.cuda.Stream
    ) -> tuple[Fetched, NDArray[np.int64]]:
        if self.ranges is None:
            is_there = np.array([parts is not None for parts in arrived], np.bool_)
            parts = [parts[0] for parts in arrived if parts is not None]
            nbytes = np.array([len(part) for part in parts], np.int64)
            at, slab_nbytes = pack(nbytes)
            slab = cupy.empty(slab_nbytes, np.uint8)
            self._copy(parts, slab, at, stream)
            return Fetched(slab, rows[is_there], at, nbytes, np.zeros(len(parts), np.int64)), rows[~is_there]
        spans = self._spans(rows)
        check_none_vanished(self.plan, self.source, spans, [n for n, parts in enumerate(arrived) if parts is None])
        span_at, fetched = layout_slab(self.ranges, rows, spans)
        self._copy([parts[0] for parts in arrived if parts is not None], fetched.slab, span_at, stream)
        return fetched, rows[:0]

    def _wanted(self, rows: NDArray[np.int64]) -> list[ObjectRead]:
        """Reads of one wave, each of one range."""
        if self.ranges is None:
            return [ObjectRead(key, ((0, WHOLE),)) for key in self.plan.keys(self.plan.object_row[rows])]
        return reads_of(self.plan, self._spans(rows))

    def _spans(self, rows: NDArray[np.int64]) -> Spans:
        assert self.ranges is not None  # callers looked
        options = self.source.options
        return spans_of(self.ranges, rows, options.max_remote_gap_bytes, options.max_read_bytes)

    def _read_on_threads(self, waves: list[NDArray[np.int64]]) -> Generator[Arrived]:
        """Wave after wave, of a reader that works on the calling thread."""
        for rows in waves:
            wanted = self._wanted(rows)
            arrived: Arrived = [None] * len(wanted)

            def read(number: int, wanted: list[ObjectRead] = wanted, arrived: Arrived = arrived) -> None:
                (arrived[number],) = self.source.reader.read([wanted[number]])

            run_all(read, range(len(wanted)), self.source.options.threads)
            yield arrived

    def _copy(
        self, parts: list[memoryview], slab: cupy.ndarray, at: NDArray[np.int64], stream: cupy.cuda.Stream
    ) -> None:
        """Copy parts to their places, of which each thread takes a stretch as long as a page-locked buffer."""
        pool = _pinned_pool()
        cuts = np.unique(np.searchsorted(at, np.arange(0, slab.nbytes, STAGING_NBYTES)))
        stops = np.append(cuts[1:], len(parts))

        def copy(number: int) -> None:
            mine = slice(cuts[number], stops[number])
            with self.device:
                pool.copy_to_device(parts[mine], slab, at[mine], stream=stream)

        run_all(copy, range(len(cuts)), self.source.options.threads)


def check_none_vanished(plan: ReadPlan, source: Source, spans: Spans, missing: list[int]) -> None:
    """Raise for an object that is missing although its index was there, if any."""
    for number in missing[:1]:
        (key,) = plan.keys(spans.object_row[number : number + 1])
        raise ChunkReadError(f"store {source.reader.store_name!r}, key {key!r}: object vanished")


def spans_of(ranges: ByteRanges, rows: NDArray[np.int64], max_gap_bytes: int, max_read_bytes: int) -> Spans:
    """Reads that fetch the chunks of some rows."""
    return coalesce(ranges.take(rows), max_gap_bytes=max_gap_bytes, max_read_bytes=max_read_bytes)


def reads_of(plan: ReadPlan, spans: Spans) -> list[ObjectRead]:
    """Reads that fetch spans of sharded chunks, of one range each, with what must follow it."""
    nbytes_after = bytes_after(spans, plan.layout.shard_levels[0])
    columns = (column.tolist() for column in (spans.offset, spans.nbytes, nbytes_after))
    places = zip(plan.keys(spans.object_row), *columns, strict=True)
    return [ObjectRead(key, ((offset, nbytes),), after) for key, offset, nbytes, after in places]


def layout_slab(ranges: ByteRanges, rows: NDArray[np.int64], spans: Spans) -> tuple[NDArray[np.int64], Fetched]:
    """Make a slab for the spans that hold the chunks of some rows; where each span and each chunk goes."""
    span_at, slab_nbytes = pack(spans.nbytes)
    slab = cupy.empty(slab_nbytes, np.uint8)
    at = span_at[spans.chunk_span] + spans.chunk_offset
    return span_at, Fetched(slab, rows, at, ranges.nbytes[rows], ranges.offset[rows])


@cache
def _pinned_pool() -> PinnedPool:
    return PinnedPool(STAGING_NBYTES, N_STAGING_BUFFERS)
