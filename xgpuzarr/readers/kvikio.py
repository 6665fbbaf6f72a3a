"""Byte ranges of many files into device memory, in one wave, by KvikIO.

KvikIO reads by GPUDirect Storage where the system has it, and through its own pinned buffers elsewhere. A wave opens
each object once and queues every range on KvikIO's thread pool, whose threads then read while the caller does something
else. Ranges below KvikIO's ``gds_threshold`` (16 KiB) are read one after the other by the calling thread: for many tiny
objects, read on the host and stage (`xgpuzarr.readers.staging`).

Objects are not looked at before they are opened, which would cost as much again: callers have done so to learn sizes
(`xgpuzarr.readers.host.LocalReader.object_nbytes`), and have then refused what is no file.

Source of what is said here about streams: KvikIO 26.10, ``file_handle.cpp`` and ``detail/posix_io.hpp``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.errors import ChunkReadError, MissingDependencyError
from xgpuzarr.options import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import cupy
    from numpy.typing import NDArray

    type _Range = tuple[int, int, int]  # offset in the object, nbytes, offset in the slab

__all__ = ["KvikioReader", "WaveRead", "set_threads"]

MAX_OPEN_OBJECTS = 64
"""Objects of a wave that are open at once. KvikIO holds two descriptors each, reads have two waves on their way, and
processes may often have 1024 descriptors."""

MAX_THREADS = 16  # more did not read faster from the page cache

CPU_SHARE = 0.75
"""Share of the usable CPUs for KvikIO's threads, which spin while they copy: with one on each CPU, the threads that
submit ranges and queue kernels waited for one, and so did those of a cluster's worker."""

LARGE_READ_NBYTES = 64 << 20
"""Reads from this size on take turns: each keeps all of KvikIO's threads busy, and reads that advance side by side are
all at their first bytes together and all at their last decoding together, while storage waits. Smaller ones do not, for
they may be waiting for a distant disk."""

_THREADS_LOCK = threading.Lock()
_own_settings = {1}
"""Numbers of threads that are KvikIO's default, far from what storage can do, or were set by `set_threads`."""

_large_reads = threading.Lock()


class KvikioReader:
    """Reads objects that are files below a folder, into device memory.

    Safe to call from several threads at once; their reads share KvikIO's pool.

    Parameters
    ----------
    root
        Folder that keys are relative to. Links in it are followed, as zarr-python follows them.
    task_nbytes
        Ranges larger than this are cut into tasks for several threads, in bytes. None: KvikIO's setting (4 MiB).
    n_threads
        Threads of KvikIO's pool, which all readers of the process share: it has as many as the reader that wants most,
        unless ``KVIKIO_NTHREADS`` or the program has set them. None: three quarters of the usable CPUs, at most
        `MAX_THREADS`.

    Raises
    ------
    MissingDependencyError
        KvikIO is not installed.
    """

    __slots__ = ("_root", "_task_nbytes")

    def __init__(self, root: Path | str, *, task_nbytes: int | None = None, n_threads: int | None = None) -> None:
        self._root = os.fspath(root)
        self._task_nbytes = task_nbytes
        set_threads(n_threads or min(math.ceil(CPU_SHARE * usable_cpus()), MAX_THREADS))

    @property
    def store_name(self) -> str:
        """The store, as an error should name it."""
        return self._root

    def turn(self, nbytes: int) -> AbstractContextManager[object]:
        """What to hold from the first to the last byte of a read of so many bytes; waits while another one has it."""
        return _large_reads if nbytes >= LARGE_READ_NBYTES else contextlib.nullcontext()

    def begin(
        self,
        keys: Sequence[str],
        slab: cupy.ndarray,
        *,
        object_row: NDArray[np.int64],
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        slab_offset: NDArray[np.int64],
        after: cupy.cuda.Event | None,
    ) -> WaveRead:
        """Have byte ranges on their way into a slab of device memory, as many as objects may be open.

        Parameters
        ----------
        keys
            Keys of the objects, each named once.
        slab
            uint8 array of shape (slab_nbytes,) on the device.
        object_row
            For each range, the index of its object in `keys`, shape (n,), in ascending order.
        offset, nbytes
            Byte ranges in the objects, shape (n,).
        slab_offset
            Where each range goes in the slab, in bytes, shape (n,).
        after
            Event that the host waits for before anything is written: KvikIO writes by streams of its own, which wait
            for no other. Record it where the memory of the slab was last used; for a slab fresh from CuPy's pool, that
            is the current stream, right after allocating. None promises that no queued work uses this memory.

        Returns
        -------
        WaveRead
            To be finished or abandoned by this thread, in any case.

        Raises
        ------
        ChunkReadError
            An object has vanished or is not readable. No read is under way any more when this is raised.
        """
        if np.any(slab_offset < 0) or np.any(slab_offset + nbytes > slab.nbytes) or np.any(np.diff(object_row) < 0):
            raise ValueError(
                f"ranges must be ordered by object and lie in the slab of {slab.nbytes} bytes, "
                f"got {int(slab_offset.min())}:{int((slab_offset + nbytes).max())}"
            )
        bounds = [0, *(np.flatnonzero(np.diff(object_row)) + 1).tolist(), len(object_row)] if len(object_row) else []
        ranges = list(zip(offset.tolist(), nbytes.tolist(), slab_offset.tolist(), strict=True))
        objects = ((keys[object_row[first]], ranges[first:last]) for first, last in itertools.pairwise(bounds))
        wave = WaveRead(self, objects, slab)
        if ranges:
            wave.begin(after)
        return wave

    def open(self, key: str) -> _ObjectReads:
        """Open one object."""
        import kvikio

        try:
            return _ObjectReads(self._root, key, kvikio.CuFile(self._path(key)), self._task_nbytes)
        except (RuntimeError, OSError) as error:
            # KvikIO's text holds the reason, but not as an errno
            raise ChunkReadError(
                f"store {self._root!r}, key {key!r}: {error}; the object vanished while being read, or the permissions "
                "of the store do not let it be read"
            ) from error

    def _path(self, key: str) -> str:
        if key.startswith("/") or "\0" in key or ".." in key.split("/"):
            raise ChunkReadError(f"store {self._root!r}: key {key!r} leads out of the store")
        return f"{self._root}/{key}"


class WaveRead:
    """Byte ranges on their way into a slab: made by `KvikioReader.begin`."""

    def __init__(self, reader: KvikioReader, objects: Iterator[tuple[str, list[_Range]]], slab: cupy.ndarray) -> None:
        self._reader, self._objects, self._slab = reader, objects, slab
        self._flying: deque[_ObjectReads] = deque()

    def begin(self, after: cupy.cuda.Event | None) -> None:
        """Wait for an event, then queue the ranges of as many objects as may be open."""
        import cupy

        with self._slab.device:
            cupy.cuda.runtime.free(0)  # makes the device's context current, which KvikIO expects of its caller
            if after is not None:
                after.synchronize()
            with self._abandoned_on_error():
                for key, ranges in itertools.islice(self._objects, MAX_OPEN_OBJECTS):
                    self._submit(key, ranges)

    def queue(self) -> None:
        """Queue all other ranges, each object as soon as it may be open; bytes are still on their way afterwards.

        Raises
        ------
        ChunkReadError
            As `finish`.
        """
        with self._slab.device, self._abandoned_on_error():
            for key, ranges in self._objects:
                self._flying.popleft().finish()
                self._submit(key, ranges)

    def finish(self) -> None:
        """Return when all bytes are on the device.

        Raises
        ------
        ChunkReadError
            An object has vanished, is not readable, or ends before a range does. No read is under way any more when
            this is raised.

        Notes
        -----
        The bytes are visible to work queued on any stream from now on: the pool's threads synchronise their copies.
        """
        self.queue()
        with self._abandoned_on_error():
            while self._flying:
                self._flying.popleft().finish()

    def abandon(self) -> None:
        """Wait for the reads that are under way, which go on writing to the slab, and begin no others."""
        self._objects = iter(())
        while self._flying:
            self._flying.popleft().wait()

    def _submit(self, key: str, ranges: list[_Range]) -> None:
        reads = self._reader.open(key)
        self._flying.append(reads)
        for offset, nbytes, at in ranges:
            if nbytes:
                reads.submit(_Room(self._slab.data.ptr + at, nbytes), offset, nbytes)

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise


class _Room:
    """Device memory as KvikIO takes it; a slice of a CuPy array costs several times as much to make."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _ObjectReads:
    """The reads under way of one open object. KvikIO's futures must not outlive its handle."""

    __slots__ = ("_file", "_key", "_reads", "_root", "_task_nbytes")

    def __init__(self, root: str, key: str, file: Any, task_nbytes: int | None) -> None:
        self._root, self._key, self._file, self._task_nbytes = root, key, file, task_nbytes
        self._reads: list[tuple[Any, int, int]] = []

    def submit(self, out: _Room, offset: int, nbytes: int) -> None:
        try:
            future = self._file.pread(out, nbytes, offset, self._task_nbytes)
        except RuntimeError as error:  # small ranges are read at once
            raise self._error(offset, nbytes, str(error)) from error
        self._reads.append((future, offset, nbytes))

    def finish(self) -> None:
        """Wait for all reads, close the object, and raise for the first read that failed."""
        failure = self.wait()
        if failure is not None:
            raise failure

    def wait(self) -> ChunkReadError | None:
        """Wait for all reads and close the object; the error of the first read that failed."""
        failure = None
        for future, offset, nbytes in self._reads:
            try:
                got = future.get()
            except RuntimeError as error:
                failure = failure or self._error(offset, nbytes, str(error))
            else:
                if got != nbytes:
                    failure = failure or self._error(offset, nbytes, f"got {got} bytes; the object was cut short")
        self._reads.clear()
        self._file.close()
        return failure

    def _error(self, offset: int, nbytes: int, reason: str) -> ChunkReadError:
        return ChunkReadError(f"store {self._root!r}, key {self._key!r}, bytes {offset}:{offset + nbytes}: {reason}")


def set_threads(n_threads: int) -> None:
    """Let KvikIO's pool have at least so many threads, unless ``KVIKIO_NTHREADS`` or the program has set them.

    Raises
    ------
    MissingDependencyError
        KvikIO is not installed.
    """
    try:
        import kvikio.defaults
    except ImportError as error:
        raise MissingDependencyError(
            "kvikio is needed to read into device memory: pip install 'xgpuzarr[cu13]' for CUDA 13, "
            "or 'xgpuzarr[cu12]' for CUDA 12"
        ) from error
    if "KVIKIO_NTHREADS" in os.environ or "KVIKIO_NUM_THREADS" in os.environ:
        return
    with _THREADS_LOCK:
        n_now = kvikio.defaults.get("num_threads")
        if n_now in _own_settings and n_now < n_threads:
            kvikio.defaults.set({"num_threads": n_threads})
            _own_settings.add(n_threads)
