"""Page-locked host memory on the way to the device.

Copies from ordinary memory are slow and stop the host; copies from page-locked memory run on a stream at the speed of
the bus. Locking pages takes milliseconds, so buffers are made once and used again.
"""

from __future__ import annotations

import queue
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import cupy
    from numpy.typing import NDArray

__all__ = ["PinnedBuffer", "PinnedPool"]


class PinnedBuffer:
    """One page-locked buffer, taken from a `PinnedPool`.

    Attributes
    ----------
    array
        uint8 array of shape (buffer_nbytes,) in host memory, to be filled by the holder.
    """

    __slots__ = ("_event", "array")

    def __init__(self, nbytes: int) -> None:
        import cupy

        # the array keeps the memory alive
        self.array: NDArray[np.uint8] = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        self._event = cupy.cuda.Event(disable_timing=True)

    def send(self, start: int, nbytes: int, slab: cupy.ndarray, slab_offset: int, *, stream: cupy.cuda.Stream) -> None:
        """Queue a copy of ``array[start:start + nbytes]`` to the slab; leave these bytes alone from now on.

        Parameters
        ----------
        slab
            uint8 array of shape (slab_nbytes,) on the device, of the stream's device.
        slab_offset
            Where the bytes go, in bytes.
        stream
            Stream that the copy runs on, in order with all else on it; one and the same until the buffer is given back.
        """
        import cupy

        if not (0 <= start <= start + nbytes <= self.array.nbytes and 0 <= slab_offset <= slab.nbytes - nbytes):
            raise ValueError(
                f"bytes {start}:{start + nbytes} of {self.array.nbytes} do not fit at {slab_offset} of {slab.nbytes}"
            )
        cupy.cuda.runtime.memcpyAsync(
            slab.data.ptr + slab_offset,
            self.array.ctypes.data + start,
            nbytes,
            cupy.cuda.runtime.memcpyHostToDevice,
            stream.ptr,
        )
        self._event.record(stream)

    def wait(self) -> None:
        """Wait until the last copy has left the buffer."""
        self._event.synchronize()


class PinnedPool:
    """A fixed number of page-locked buffers, shared by threads. Keep it until all its copies are done.

    Parameters
    ----------
    buffer_nbytes
        Size of each buffer, in bytes. 16 MiB is enough for full speed.
    n_buffers
        How many there are; two let a copy run while the next buffer is filled.
    """

    def __init__(self, buffer_nbytes: int, n_buffers: int) -> None:
        self._buffer_nbytes = buffer_nbytes
        self._free: queue.SimpleQueue[PinnedBuffer] = queue.SimpleQueue()
        for _ in range(n_buffers):
            self._free.put(PinnedBuffer(buffer_nbytes))

    @property
    def buffer_nbytes(self) -> int:
        """Size of each buffer, in bytes."""
        return self._buffer_nbytes

    @contextmanager
    def buffer(self) -> Iterator[PinnedBuffer]:
        """Lend the buffer that has been free the longest, once its last copy is done; wait if all are lent."""
        buffer = self._free.get()
        try:
            buffer.wait()
            yield buffer
        finally:
            self._free.put(buffer)

    def copy_to_device(
        self,
        parts: Sequence[memoryview],
        slab: cupy.ndarray,
        slab_offset: NDArray[np.int64],
        *,
        stream: cupy.cuda.Stream,
    ) -> None:
        """Queue the copy of host bytes into a slab; on return, the parts may be let go.

        Parameters
        ----------
        parts
            Bytes in ordinary host memory.
        slab
            uint8 array of shape (slab_nbytes,) on the device. Its bytes between two parts are overwritten too.
        slab_offset
            Where each part goes, in bytes, shape (n,): ascending, without overlap.
        stream
            Stream that the copies run on, in order with all else on it.
        """
        sources = [np.frombuffer(part, np.uint8) for part in parts]
        nbytes = np.fromiter((source.nbytes for source in sources), np.int64, len(sources))
        stop = slab_offset + nbytes
        if np.any(slab_offset[1:] < stop[:-1]):
            raise ValueError("parts must be ordered by their place in the slab and must not overlap")
        if not nbytes.any():
            return
        first = 0
        for start in range(int(slab_offset[0]), int(stop[-1]), self._buffer_nbytes):
            end = min(start + self._buffer_nbytes, int(stop[-1]))
            with self.buffer() as buffer:
                # every part with bytes in start:end, the buffer being an image of that stretch of the slab
                while stop[first] <= start:
                    first += 1
                for row in range(first, int(np.searchsorted(slab_offset, end))):
                    at = int(slab_offset[row])
                    low, high = max(at, start), min(int(stop[row]), end)
                    buffer.array[low - start : high - start] = sources[row][low - at : high - at]
                buffer.send(0, end - start, slab, start, stream=stream)
