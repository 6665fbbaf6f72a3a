"""The chunks of a read on the device, in waves: located, put in the order of their places, cut to the memory there is.

Where the chunks of shards lie is looked up for one wave at a time, while the bytes of the wave before are on their way.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.errors import ChunkReadError
from xgpuzarr.locate import locate
from xgpuzarr.plan.byte_ranges import ByteRanges
from xgpuzarr.plan.memory import inflight_nbytes, split_batches
from xgpuzarr.pool import run_all
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import MISSING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan

__all__ = ["N_IN_FLIGHT", "Waves", "reading"]

N_IN_FLIGHT = 4
"""Waves in flight at most: one is read while others decode."""

N_WAVES = (4, 8)
"""Fewest and most waves that a read of small frames or streams (Blosc) is cut into: the next is read while the last
decodes. One wave for large frames, as was measured: nvCOMP takes as long for hundreds of them as for one, and longer
for them in several calls at once."""

SMALL_WAVE_DECODED_NBYTES = 512 << 20
"""Decoded bytes of a wave, between the fewest waves and the most: eight of 4 GiB were faster than four, and eight of
1.6 GB slower."""

LARGE_FRAME_NBYTES = 512 << 10
"""From this decoded size on, frames are large."""

MAX_WAVE_DECODED_NBYTES = 4 << 30
"""A larger wave of large frames would not decode faster, and its scratch is several times as large."""

MAX_SMALL_WAVE_DECODED_NBYTES = 2 << 30
"""The same for small frames."""

MAX_FIRST_WAVE_DECODED_NBYTES = 512 << 20
"""Most of the first wave of shards: nothing decodes until its indexes and bytes are there. Of the second, the indexes
are read meanwhile."""

N_STORE_WAVES = 8
"""Waves of stores that are no local folder, whatever the frames: reading takes longer than decoding by far, and hides
all of it but the last wave's."""

MAX_STORE_WAVE_DECODED_NBYTES = 512 << 20
"""Bytes of such a wave wait in host memory, beside those of the next."""

MIN_WAVE_DECODED_NBYTES = 64 << 20
"""Waves of a small read are not cut below this: the launches of a wave take a fixed time."""

FREE_MEMORY_SHARE = 0.5
"""Share of the free device memory that reads without `max_batch_bytes` may use beyond their results, all those together
that are under way at once."""

SCRATCH_FACTOR = {"zstd": 3.2, "nvcomp.zstd": 3.2, "blosc": 4.3}
"""Scratch of a decoder per decoded byte: what nvCOMP states for zstd, and the shuffled bytes of Blosc beside it."""

FILTER_FACTOR = 6.0
"""The same for filters: a batch before and behind one, and float64 in between for elements of 4 bytes."""

OBJECTS_A_TASK = 1024
"""Files whose sizes one thread asks for: below this, threads only wait for one another."""


class Waves:
    """Waves of one read that are still to be read, each the plan rows of its chunks.

    Parameters
    ----------
    plan
        The read.
    source
        From where.
    straight_offset
        For each plan row the byte of the output at which its chunk is decoded; -1 for chunks decoded elsewhere.

    Attributes
    ----------
    ranges
        Byte range of every chunk that has been located; `MISSING` for all others. None where a store does not tell, and
        only reading finds out.
    missing
        Plan rows of chunks that were found not to be stored, in no wave; whoever fills in for them takes them away.
    """

    def __init__(self, plan: ReadPlan, source: Source, straight_offset: NDArray[np.int64]) -> None:
        self._plan, self._source, self._straight_offset = plan, source, straight_offset
        self._is_local = isinstance(source.reader, LocalReader)
        self.missing: list[NDArray[np.int64]] = []
        nowhere = np.full(plan.n_chunks, MISSING, np.int64)
        is_told = self._is_local or bool(plan.layout.shard_levels)
        self.ranges = ByteRanges(plan.object_row, np.zeros_like(nowhere), nowhere) if is_told else None
        self._waves = self._make()
        self._made: deque[NDArray[np.int64]] = deque()

    @cached_property
    def keys(self) -> list[str]:
        """Keys of all objects, made once: of files both for sizes and for bytes."""
        return self._plan.keys()

    def look(self) -> NDArray[np.int64] | None:
        """The next wave, which stays the next; None if there is none.

        Raises
        ------
        CorruptChunkError, ChunkReadError, UnsupportedError
            Its chunks cannot be located; see `xgpuzarr.locate.locate`.
        """
        if not self._made:
            self._made.extend(itertools.islice(self._waves, 1))
        return self._made[0] if self._made else None

    def take(self) -> NDArray[np.int64] | None:
        """The next wave; None if there is none. Raises what `look` does."""
        return self._made.popleft() if self.look() is not None else None

    def put_back(self, waves: list[NDArray[np.int64]]) -> None:
        """Have waves come next."""
        self._made.extendleft(reversed(waves))

    def all(self) -> list[NDArray[np.int64]]:
        """Every wave that has not been taken; they stay the next. Raises what `look` does."""
        self._made.extend(self._waves)
        return list(self._made)

    def _make(self) -> Iterator[NDArray[np.int64]]:
        for part, n_even, is_halved in self._parts():
            rows = part
            if self.ranges is not None:
                self._locate(part, self.ranges)
                ordered = part[self.ranges.take(part).order()]
                is_there = self.ranges.nbytes[ordered] != MISSING
                self.missing.append(ordered[~is_there])
                rows = ordered[is_there]
            yield from self._cut(rows, n_even, is_halved=is_halved)

    def _parts(self) -> Iterator[tuple[NDArray[np.int64], float, bool]]:
        """Rows that are located together, how many waves they make, and whether the first of these is a half.

        The first wave and the last of several are half as large as others: until the first is there nothing decodes,
        and while the last decodes nothing is read.
        """
        plan, n_waves = self._plan, self._n_waves()
        if n_waves < 3:
            yield np.arange(plan.n_chunks), max(1, n_waves - 0.5), False
        elif not (self._is_local and plan.layout.shard_levels):
            yield np.arange(plan.n_chunks), n_waves - 1, True
        else:
            chunk_nbytes = plan.layout.chunk_nbytes
            first_nbytes = min(plan.decoded_nbytes / (n_waves - 1) / 2, MAX_FIRST_WAVE_DECODED_NBYTES)
            wave_nbytes = (plan.decoded_nbytes - first_nbytes) / (n_waves - 1.5)
            for rows in self._whole_objects(first_nbytes + wave_nbytes * np.arange(n_waves - 1)):
                yield rows, max(1, round(len(rows) * chunk_nbytes / wave_nbytes)), False

    def _whole_objects(self, nbytes: NDArray[np.floating]) -> list[NDArray[np.int64]]:
        """Part the rows between objects, behind about so many decoded bytes each time."""
        object_row = self._plan.object_row
        n_before = np.bincount(object_row).cumsum()
        stops = np.unique(n_before[np.searchsorted(n_before, nbytes // self._plan.layout.chunk_nbytes)])
        return np.split(np.argsort(object_row, kind="stable"), stops[stops < len(object_row)])

    def _n_waves(self) -> int:
        """Waves in which reading and decoding overlap well."""
        plan, compressor = self._plan, self._plan.layout.codec_chain.compressor
        share, largest = plan.decoded_nbytes, MAX_WAVE_DECODED_NBYTES
        if not self._is_local:
            share, largest = share // N_STORE_WAVES, MAX_STORE_WAVE_DECODED_NBYTES
        elif compressor is not None and (compressor.codec == "blosc" or plan.layout.chunk_nbytes < LARGE_FRAME_NBYTES):
            fewest, most = N_WAVES
            share = min(share // fewest, max(share // most, SMALL_WAVE_DECODED_NBYTES))
            largest = MAX_SMALL_WAVE_DECODED_NBYTES
        return max(1, plan.decoded_nbytes // min(largest, max(MIN_WAVE_DECODED_NBYTES, share)))

    def _locate(self, rows: NDArray[np.int64], ranges: ByteRanges) -> None:
        plan, reader, n_threads = self._plan, self._source.reader, self._source.options.threads
        if plan.layout.shard_levels:
            found = locate(plan, reader, n_threads, rows)
            ranges.offset[rows], ranges.nbytes[rows] = found.offset, found.nbytes
            return
        assert isinstance(reader, LocalReader)  # others do not tell
        nbytes = np.empty(len(self.keys), np.int64)

        def look(start: int) -> None:
            stop = min(start + OBJECTS_A_TASK, len(nbytes))
            try:
                nbytes[start:stop] = [reader.object_nbytes(key) for key in self.keys[start:stop]]
            except ChunkReadError as error:
                raise ChunkReadError(f"array {plan.layout.path!r}: {error}") from error

        run_all(look, range(0, len(nbytes), OBJECTS_A_TASK), n_threads)
        ranges.nbytes[rows] = nbytes[plan.object_row[rows]]

    def _cut(self, rows: NDArray[np.int64], n_even: float, *, is_halved: bool) -> list[NDArray[np.int64]]:
        """Cut rows into `n_even` waves, or more for the memory budget; the first half as large if `is_halved`."""
        chunk_nbytes, chain = self._plan.layout.chunk_nbytes, self._plan.layout.codec_chain
        is_straight = self._straight_offset[rows] >= 0
        if chain.compressor is None and self._is_local and is_straight.all():
            return [rows] if len(rows) else []  # read straight to their place: nothing to overlap with
        scratch_factor = SCRATCH_FACTOR.get(chain.compressor.codec, 0.0) if chain.compressor else 0.0
        scratch_factor += FILTER_FACTOR if chain.filters else 0.0
        encoded = np.full(len(rows), chunk_nbytes) if self.ranges is None else self.ranges.nbytes[rows]
        inflight = inflight_nbytes(
            encoded, decoded_nbytes=chunk_nbytes, scratch_factor=scratch_factor, is_straight=is_straight
        )
        budget = self._source.options.max_batch_bytes
        if budget is None:
            free, _ = cupy.cuda.runtime.memGetInfo()
            free += cupy.get_default_memory_pool().free_bytes()
            budget = int(FREE_MEMORY_SHARE * free) // _n_at_once()
        # rounded up by a chunk, or the last few chunks would make one more wave
        even = int(inflight.sum() / n_even) + int(inflight.max(initial=1))
        most = min(budget // N_IN_FLIGHT, even)
        first = min(most, even // 2) if is_halved else most
        return [rows[part] for part in split_batches(inflight, max_batch_bytes=most, max_first_bytes=first)]


@dataclass(slots=True)
class _Reads:
    """Reads of one device that are under way, and the most that were since there were none."""

    n_now: int = 0
    n_at_once: int = 1


_reads: defaultdict[int, _Reads] = defaultdict(_Reads)
_reads_lock = threading.Lock()


def _n_at_once() -> int:
    with _reads_lock:
        return _reads[cupy.cuda.Device().id].n_at_once


@contextmanager
def reading() -> Iterator[None]:
    """Count one read of the current device as under way, and so its share of the free memory."""
    with _reads_lock:
        reads = _reads[cupy.cuda.Device().id]
        reads.n_now += 1
        reads.n_at_once = max(reads.n_at_once, reads.n_now)
    try:
        yield
    finally:
        with _reads_lock:
            reads.n_now -= 1
            if not reads.n_now:
                reads.n_at_once = 1
