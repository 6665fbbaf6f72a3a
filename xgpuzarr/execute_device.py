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
from typing import TYPE_CHECKING, Any

import cupy

from xgpuzarr.device_output import DeviceOutput, out_of_memory
from xgpuzarr.device_wave import Fetched, Wave
from xgpuzarr.diagnostics import ReadReport, emit
from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.file_fetch import FileFetch
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import ObjectRead
from xgpuzarr.remote_fetch import fetch_of_store
from xgpuzarr.waves import N_IN_FLIGHT, Waves, reading

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np
    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.remote_fetch import RemoteFetch
    from xgpuzarr.store_fetch import StoreFetch

    type WaveFetch = FileFetch | StoreFetch | RemoteFetch

__all__ = ["read_device", "to_device"]


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
        self.waves = Waves(plan, source, output.straight_offset)
        self.streams = _streams(cupy.cuda.Device().id)
        self.in_flight: deque[Wave] = deque()
        self.n_started = 0
        self.n_missing = self.n_host_chunks = 0
        self.read_s = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(reading())
            fetch = self._fetch_of()
            self.read_s += time.perf_counter() - began
            stack.callback(fetch.close)
            stack.callback(self._abandon_waves)
            self._run_waves(fetch)
        self._fill_missing()
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

    def _fetch_of(self) -> WaveFetch:
        reader, waves = self.source.reader, self.waves
        if isinstance(reader, LocalReader):
            assert waves.ranges is not None  # files tell their sizes
            return FileFetch(reader.root, waves.keys, waves.ranges, self.output, self.source.options)
        made = waves.all()
        with self._naming_the_array():
            return fetch_of_store(self.plan, self.source, waves.ranges, made)

    def _run_waves(self, fetch: WaveFetch) -> None:
        """Start and finish every wave; a wave that meets too little memory is tried again, alone and in halves."""
        alone = False
        while (rows := self.waves.take()) is not None:
            if len(self.in_flight) == N_IN_FLIGHT - 1:  # and one more on its way
                self._finish_oldest()
            stream, ahead = (self.streams[(self.n_started + number) % N_IN_FLIGHT] for number in (0, 1))
            self.n_started += 1
            stream.wait_event(self.output.ready)
            try:
                fetched = self._fetch(fetch, rows, stream, None if alone else ahead)
                self._start(fetched, stream)
                alone = False
            except cupy.cuda.memory.OutOfMemoryError as error:
                stream.synchronize()
                self.waves.put_back(self._halves(fetch, rows, error))
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
        ahead: cupy.cuda.Stream | None,
    ) -> Fetched:
        """Encoded chunks of a wave in device memory, those that are not there or are in the output already left out.

        The next wave will be on its way to stream `ahead`, if there is one.
        """
        began = time.perf_counter()
        with stream, self._naming_the_array():
            fetch.ask(rows, stream)
        following = self.waves.look()  # which may have to be located, while bytes are on their way
        with stream, self._naming_the_array():
            fetched, missing = fetch.fetch(rows, stream, following, ahead)
        if following is None:
            fetch.close()
        self.waves.missing.append(missing)
        self._fill_missing()
        self.read_s += time.perf_counter() - began
        return fetched

    @contextmanager
    def _naming_the_array(self) -> Generator[None]:
        """Put the array before the store and key that a reader's errors name."""
        try:
            yield
        except (ChunkReadError, CorruptChunkError) as error:
            raise type(error)(f"array {self.plan.layout.path!r}: {error}") from error

    def _fill_missing(self) -> None:
        """Fill in for what is not stored, on the caller's stream: nobody waits for that of a wave without chunks."""
        missing, self.waves.missing = self.waves.missing, []
        for rows in missing:
            if len(rows):
                self.source.check_still_there()
                self.n_missing += len(rows)
                self.output.fill(rows)

    def _explain_lost_context(self, wave: Wave, error: Exception) -> None:
        """After a CUDA error: name the chunk that the host cannot decode either, if there is one."""
        for index, row in enumerate(wave.fetched.rows.tolist()):
            key = self.plan.keys(self.plan.object_row[row : row + 1])[0]
            place = (int(wave.fetched.object_offset[index]), int(wave.fetched.nbytes[index]))
            (parts,) = self.source.reader.read([ObjectRead(key, (place,))])
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
        streams[device] = [cupy.cuda.Stream(non_blocking=True) for _ in range(N_IN_FLIGHT)]
    return streams[device]
