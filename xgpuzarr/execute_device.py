"""Carrying out a read plan on the device: waves of chunks, each read, decoded and put in place on a stream of its own.

A wave is as many chunks as fit the memory budget. Its encoded bytes are read into one slab of device memory, a few
bytes of every chunk are checked on the host, one call decodes all, one kernel puts every element in its place. All of
that is queued: the bytes of the next wave are on their way before a wave is decoded. Nothing is handed out before every
status, decoded size and guard zone has been looked at.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from xgpuzarr.device_output import DeviceOutput, out_of_memory
from xgpuzarr.device_wave import Fetched, Wave
from xgpuzarr.diagnostics import ReadReport, emit
from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.file_fetch import FileFetch
from xgpuzarr.locate import locate
from xgpuzarr.plan.byte_ranges import ByteRanges
from xgpuzarr.plan.memory import inflight_nbytes, split_batches
from xgpuzarr.pool import run_all
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import MISSING, ObjectRead
from xgpuzarr.remote_fetch import fetch_of_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from xgpuzarr.ahead_fetch import Following
    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.remote_fetch import RemoteFetch
    from xgpuzarr.store_fetch import StoreFetch

    type WaveFetch = FileFetch | StoreFetch | RemoteFetch

__all__ = ["read_device", "to_device"]

N_STREAMS = 4
"""Waves in flight: one is read while others decode."""

N_WAVES = 4
"""Waves that a read of small frames or streams (Blosc) is cut into: the next is read while the last decodes. One wave
for large frames, as was measured: nvCOMP takes as long for hundreds of them as for one, and longer for them in several
calls at once."""

LARGE_FRAME_NBYTES = 512 << 10
"""From this decoded size on, frames are large."""

MAX_WAVE_DECODED_NBYTES = 4 << 30
"""A larger wave would not decode faster, and its scratch is several times as large."""

N_STORE_WAVES = 8
"""The same for stores that are no local folder, whatever the frames: reading takes longer than decoding by far, and
hides all of it but the last wave's."""

MAX_STORE_WAVE_DECODED_NBYTES = 512 << 20
"""Bytes of such a wave wait in host memory, beside those of the next."""

MIN_WAVE_DECODED_NBYTES = 64 << 20
"""Waves of a small read are not cut below this: the launches of a wave take a fixed time."""

FREE_MEMORY_SHARE = 0.5
"""Share of the free device memory that a read without `max_batch_bytes` may use beyond its result."""

SCRATCH_FACTOR = {"zstd": 3.2, "nvcomp.zstd": 3.2, "blosc": 4.3}
"""Scratch of a decoder per decoded byte: what nvCOMP states for zstd, and the shuffled bytes of Blosc beside it."""

FILTER_FACTOR = 6.0
"""The same for filters: a batch before and behind one, and float64 in between for elements of 4 bytes."""

OBJECTS_A_TASK = 1024
"""Files whose sizes one thread asks for: below this, threads only wait for one another."""


def read_device(plan: ReadPlan, source: Source) -> Any:
    """Grouped output of a plan, decoded on the current device.

    Returns
    -------
    cupy.ndarray or numpy.ndarray
        Ready for work on any stream: the host has waited for it. NumPy where CuPy lacks the dtype.

    Raises
    ------
    CorruptChunkError, ChunkReadError, DeviceMemoryError
        Naming array, chunk and key.
    """
    output = DeviceOutput(plan)
    if output.nbytes:
        _DeviceRead(plan, source, output).run()
    return output.result()


def to_device(array: NDArray[Any]) -> cupy.ndarray:
    """Copy a result decoded on the host, ordered on the current stream."""
    try:
        return cupy.asarray(array)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise out_of_memory("the result", array.nbytes) from error


class _DeviceRead:
    """One read on the device."""

    def __init__(self, plan: ReadPlan, source: Source, output: DeviceOutput) -> None:
        self.plan, self.source, self.output = plan, source, output
        self.reader = source.reader
        self.streams = _streams(cupy.cuda.Device().id)
        self.in_flight: deque[Wave] = deque()
        self.n_started = 0
        self.n_missing = self.n_host_chunks = 0
        self.read_s = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        ranges = self._locate()
        rows = np.arange(self.plan.n_chunks)
        if ranges is not None:
            rows = ranges.order()
            self._fill(rows[ranges.nbytes[rows] == MISSING])
            rows = rows[ranges.nbytes[rows] != MISSING]
        waves = self._waves(ranges, rows)
        self.read_s += time.perf_counter() - began
        with ExitStack() as stack:
            fetch = self._fetch_of(ranges, waves)
            stack.callback(fetch.close)
            stack.callback(self._abandon_waves)
            self._run_waves(fetch, waves)
        emit(
            ReadReport(
                array=self.plan.layout.path,
                route="device",
                remote_reader=fetch.remote_reader,
                remote_reader_reason=fetch.remote_reader_reason,
                n_again=fetch.n_again,
                n_chunks=self.plan.n_chunks,
                n_missing=self.n_missing,
                n_host_chunks=self.n_host_chunks,
                encoded_nbytes=fetch.encoded_nbytes,
                decoded_nbytes=self.plan.decoded_nbytes,
                out_nbytes=self.plan.out_nbytes,
                read_s=self.read_s,
                decode_s=time.perf_counter() - began - self.read_s,
                total_s=time.perf_counter() - began,
            )
        )

    def _locate(self) -> ByteRanges | None:
        """Byte range of every chunk; None where a store does not tell sizes, and only reading finds out."""
        plan, options = self.plan, self.source.options
        if plan.layout.shard_levels:
            return locate(plan, self.reader, options.threads)
        if not isinstance(self.reader, LocalReader):
            return None
        keys, reader = self._object_keys, self.reader
        nbytes = np.empty(len(keys), np.int64)

        def look(start: int) -> None:
            stop = min(start + OBJECTS_A_TASK, len(keys))
            nbytes[start:stop] = [reader.object_nbytes(key) for key in keys[start:stop]]

        with self._naming_the_array():
            run_all(look, range(0, len(keys), OBJECTS_A_TASK), options.threads)
        return ByteRanges(plan.object_row, np.zeros(plan.n_chunks, np.int64), nbytes[plan.object_row])

    def _waves(self, ranges: ByteRanges | None, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Rows of each wave: within the memory budget, and enough waves to overlap reading with decoding."""
        chunk_nbytes = self.plan.layout.chunk_nbytes
        encoded = np.full(len(rows), chunk_nbytes) if ranges is None else ranges.nbytes[rows]
        compressor = self.plan.layout.codec_chain.compressor
        is_slab = self.output.slab[rows] >= 0
        if compressor is None and isinstance(self.reader, LocalReader) and is_slab.all():
            return [rows] if len(rows) else []  # read straight to their place: nothing to overlap with
        scratch_factor = SCRATCH_FACTOR.get(compressor.codec, 0.0) if compressor else 0.0
        scratch_factor += FILTER_FACTOR if self.plan.layout.codec_chain.filters else 0.0
        inflight = inflight_nbytes(encoded, decoded_nbytes=chunk_nbytes, scratch_factor=scratch_factor, is_slab=is_slab)
        budget = self.source.options.max_batch_bytes
        if budget is None:
            free, _ = cupy.cuda.runtime.memGetInfo()
            budget = int(FREE_MEMORY_SHARE * (free + cupy.get_default_memory_pool().free_bytes()))
        share, largest = self.plan.decoded_nbytes, MAX_WAVE_DECODED_NBYTES
        if not isinstance(self.reader, LocalReader):
            share, largest = share // N_STORE_WAVES, MAX_STORE_WAVE_DECODED_NBYTES
        elif compressor is not None and (compressor.codec == "blosc" or chunk_nbytes < LARGE_FRAME_NBYTES):
            share //= N_WAVES
        share = min(largest, max(MIN_WAVE_DECODED_NBYTES, share))
        n_waves = max(1, self.plan.decoded_nbytes // share)
        # The first wave and the last are half as large: until the first is there nothing decodes, and while the last
        # decodes nothing is read. Rounded up by a chunk, or the last few chunks would make one more wave.
        even = int(inflight.sum() / max(1, n_waves - 1)) + int(inflight.max(initial=1))
        most = min(budget // N_STREAMS, even)
        first = most if n_waves == 1 else min(most, even // 2)
        return [rows[part] for part in split_batches(inflight, max_batch_bytes=most, max_first_bytes=first)]

    def _fetch_of(self, ranges: ByteRanges | None, waves: list[NDArray[np.int64]]) -> WaveFetch:
        if not isinstance(self.reader, LocalReader):
            with self._naming_the_array():
                return fetch_of_store(self.plan, self.source, ranges, waves)
        assert ranges is not None  # files tell their sizes
        return FileFetch(self.reader.root, self._object_keys, ranges, waves, self.output, self.source.options)

    def _run_waves(self, fetch: WaveFetch, waves: list[NDArray[np.int64]]) -> None:
        """Start and finish every wave; a wave that meets too little memory is tried again, alone and in halves."""
        todo, alone = deque(waves), False
        while todo:
            if len(self.in_flight) == N_STREAMS - 1:  # and one more on its way
                self._finish_oldest()
            rows = todo.popleft()
            stream, following = (self.streams[(self.n_started + ahead) % N_STREAMS] for ahead in (0, 1))
            self.n_started += 1
            stream.wait_event(self.output.ready)
            try:
                fetched = self._fetch(fetch, rows, stream, (todo[0], following) if todo and not alone else None)
                self._start(fetched, stream)
                alone = False
            except cupy.cuda.memory.OutOfMemoryError as error:
                stream.synchronize()
                todo.extendleft(reversed(self._halves(fetch, rows, error)))
                alone = True
            except BaseException:
                stream.synchronize()  # nothing may write to the output once the error is out
                raise
        while self.in_flight:
            self._finish_oldest()

    def _start(self, fetched: Fetched, stream: cupy.cuda.Stream) -> None:
        """Queue the work of a wave; what was queued before goes on meanwhile."""
        if len(fetched.rows):
            wave = Wave(fetched, self.output, stream)
            wave.start()
            self.in_flight.append(wave)

    def _halves(self, fetch: WaveFetch, rows: NDArray[np.int64], error: Exception) -> list[NDArray[np.int64]]:
        """Make room after running out of memory, and say what to try instead of a wave."""
        had_company = fetch.drop() or bool(self.in_flight)
        while self.in_flight:
            self._finish_oldest()
        cupy.get_default_memory_pool().free_all_blocks()
        if len(rows) > 1:
            return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        if had_company:
            return [rows]
        nbytes = int(self.plan.layout.chunk_nbytes * 4)
        raise out_of_memory(f"decoding {self.plan.label(int(rows[0]))}", nbytes) from error

    def _abandon_waves(self) -> None:
        """After an error, none may still write to the output; else there are none."""
        for wave in self.in_flight:
            wave.abandon()

    def _finish_oldest(self) -> None:
        wave = self.in_flight.popleft()
        try:
            wave.finish()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            self._explain_lost_context(wave, error)
            raise
        self.n_host_chunks += wave.n_host_chunks

    def _fetch(
        self,
        fetch: WaveFetch,
        rows: NDArray[np.int64],
        stream: cupy.cuda.Stream,
        following: Following,
    ) -> Fetched:
        """Encoded chunks of a wave in device memory, those that are not there or are in the output already left out."""
        began = time.perf_counter()
        with stream, self._naming_the_array():
            fetched, missing = fetch.fetch(rows, stream, following)
        self._fill(missing)  # on the caller's stream: nobody waits for that of a wave without chunks
        self.read_s += time.perf_counter() - began
        return fetched

    @contextmanager
    def _naming_the_array(self) -> Generator[None]:
        """Put the array before the store and key that a reader's errors name."""
        try:
            yield
        except (ChunkReadError, CorruptChunkError) as error:
            raise type(error)(f"array {self.plan.layout.path!r}: {error}") from error

    @cached_property
    def _object_keys(self) -> list[str]:
        """Keys of all objects, made once: of a file for sizes and bytes."""
        return self.plan.keys()

    def _fill(self, rows: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        self.source.check_still_there()
        self.n_missing += len(rows)
        self.output.fill(rows)

    def _explain_lost_context(self, wave: Wave, error: Exception) -> None:
        """After a CUDA error: name the chunk that the host cannot decode either, if there is one."""
        for index, row in enumerate(wave.fetched.rows.tolist()):
            key = self.plan.keys(self.plan.object_row[row : row + 1])[0]
            place = (int(wave.fetched.object_offset[index]), int(wave.fetched.nbytes[index]))
            (parts,) = self.reader.read([ObjectRead(key, (place,))])
            problem = "" if parts is None else wave.problem_on_host(parts[0])
            if problem:
                raise CorruptChunkError(
                    f"{self.plan.label(row, *place)}: {problem}; the CUDA context was lost while decoding it, so "
                    "restart this process before using the device again"
                ) from error


_thread = threading.local()


def _streams(device: int) -> list[cupy.cuda.Stream]:
    """The streams of this thread on a device, made once: memory pools keep an arena a stream."""
    streams: dict[int, list[cupy.cuda.Stream]] = _thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = [cupy.cuda.Stream(non_blocking=True) for _ in range(N_STREAMS)]
    return streams[device]
