"""One wave of chunks on the device: fetched, checked, decoded, placed; then looked at again once its stream has passed.

What the device decoder does not take (a zstd frame without its size, several frames, odd gzip headers), and whatever
it fails on, is decoded on the host instead, which also tells a corrupt chunk from an unusual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.decoders.blosc import decode_blosc
from xgpuzarr.decoders.host import decode_into
from xgpuzarr.device_output import GUARD_NBYTES
from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.kernels import launch
from xgpuzarr.plan import frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgpuzarr.device_output import DeviceOutput
    from xgpuzarr.plan.read_plan import ReadPlan

__all__ = ["Fetched", "Wave"]

FRAMING: dict[str, tuple[str, int, int]] = {
    "lz4": ("lz4", 4, 0),
    "zlib": ("deflate", 2, 4),
    "zstd": ("zstd", 0, 0),
    "gzip": ("gzip", 0, 0),
}
"""For each codec nvCOMP's algorithm, and the bytes before and behind what nvCOMP takes: numcodecs' LZ4 size, zlib's
header and checksum."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Encoded chunks in device memory.

    Attributes
    ----------
    slab
        uint8, 1-D, on the device.
    rows
        Plan rows of the chunks.
    at, nbytes
        Where each chunk starts in `slab`, and its encoded size, in bytes.
    object_offset
        Where each chunk starts in its object, in bytes.
    """

    slab: cupy.ndarray
    rows: NDArray[np.int64]
    at: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    object_offset: NDArray[np.int64]


class Wave:
    """Decoding of some fetched chunks into an output.

    Parameters
    ----------
    fetched
        The chunks.
    output
        Where they go.
    stream
        Stream of all work of this wave; the slab is ready on it.
    """

    def __init__(self, fetched: Fetched, output: DeviceOutput, stream: cupy.cuda.Stream) -> None:
        self.fetched, self.output, self.stream = fetched, output, stream
        self.plan: ReadPlan = output.plan
        self.chunk_nbytes = self.plan.layout.chunk_nbytes
        self.n_host_chunks = 0
        self._done = cupy.cuda.Event(disable_timing=True)
        # chunks that are one piece of the output go there; the others have a place in `scratch`
        self.slab_at = output.slab[fetched.rows]
        self.is_direct = self.slab_at >= 0
        self.scratch_at = np.full(len(fetched.rows), -1, np.int64)
        stride = -(-self.chunk_nbytes // 16) * 16 + GUARD_NBYTES
        self.scratch_at[~self.is_direct] = np.arange(np.count_nonzero(~self.is_direct)) * stride
        self.scratch: cupy.ndarray | None = None
        self._checks: tuple[cupy.ndarray, ...] = ()
        self._problem: cupy.ndarray | None = None

    def start(self) -> None:
        """Queue everything; waits only for the few bytes of each chunk that are checked on the host."""
        with self.stream:
            compressor = self.plan.layout.codec_chain.compressor
            if compressor is None:
                self._place_plain()
            elif compressor.codec == "blosc":
                self._decode_blosc()
            else:
                self._decode_frames()
            self._done.record(self.stream)

    def finish(self) -> None:
        """Wait for the stream, then look at every status, size and guard zone.

        Raises
        ------
        CorruptChunkError
            A chunk does not decode on the host either.
        """
        self._done.synchronize()
        suspects = self._suspects()
        if len(suspects):
            with self.stream:
                self._decode_on_host(suspects)
            self.stream.synchronize()

    def abandon(self) -> None:
        """Wait until no work of this wave can touch the output any more."""
        self.stream.synchronize()

    def problem_on_host(self, encoded: memoryview) -> str:
        """What the host finds wrong with an encoded chunk; "" if it decodes."""
        if self.plan.layout.codec_chain.compressor is None:
            return "" if len(encoded) == self.chunk_nbytes else f"{len(encoded)} bytes are stored"
        return decode_into(self._codec, encoded, np.empty(self.chunk_nbytes, np.uint8))

    def _place_plain(self) -> None:
        """Chunks that are stored as they are."""
        fetched = self.fetched
        for index in np.flatnonzero(fetched.nbytes != self.chunk_nbytes)[:1].tolist():
            raise self._corrupt(
                index, f"{fetched.nbytes[index]} bytes are stored, the chunk shape needs {self.chunk_nbytes}"
            )
        self.output.place(fetched.slab, fetched.rows, fetched.at)

    def _suspects(self) -> NDArray[np.int64]:
        """Chunks that the device decoder failed on, or may have."""
        if self._problem is not None:
            failed: NDArray[np.int64] = np.flatnonzero(self._problem.get())
            return failed
        if not self._checks:
            return np.empty(0, np.int64)
        statuses, actual, broken_guards = (check.get() for check in self._checks)
        suspect = (statuses != 0) | (actual != self.chunk_nbytes)
        if broken_guards.any():
            suspect[:] = True  # whatever was overrun may be a neighbour
        return self._device_index[suspect]

    def _decode_blosc(self) -> None:
        """Blosc checks itself: no stream leaves its place, and a problem is noted for each chunk."""
        if not self.is_direct.all():
            self.is_direct[:] = False
            self.scratch_at = np.arange(len(self.fetched.rows), dtype=np.int64) * self.chunk_nbytes
            self.scratch = cupy.empty(len(self.fetched.rows) * self.chunk_nbytes, np.uint8)
        self._problem = decode_blosc(
            self.fetched.slab,
            self.fetched.at,
            self.fetched.nbytes,
            chunk_nbytes=self.chunk_nbytes,
            out=self.output.memory if self.scratch is None else self.scratch,
            out_offset=self.slab_at if self.scratch is None else self.scratch_at,
            status=self.output.status,
        )
        self._place(np.flatnonzero(~self.is_direct))

    def _decode_frames(self) -> None:
        """Frames of one algorithm: checked at their ends, then given to nvCOMP with a guard zone behind each."""
        if not self.is_direct.all():
            self.scratch = cupy.empty(int(self.scratch_at.max()) + self.chunk_nbytes + GUARD_NBYTES, np.uint8)
        on_host = self._check_ends()
        self._device_index = np.flatnonzero(~on_host)
        guard_at = self.scratch_at[~self.is_direct] + self.chunk_nbytes
        if self.scratch is not None:
            launch.write_guards(self.scratch, guard_at, GUARD_NBYTES, status=self.output.status)
        actual, statuses = self._decompress(self._device_index)
        broken = (
            launch.check_guards(self.scratch, guard_at, GUARD_NBYTES)
            if self.scratch is not None
            else cupy.zeros(0, np.int32)
        )
        self._checks = (statuses, actual, broken)
        if on_host.any():
            self._decode_on_host(np.flatnonzero(on_host), place=False)
        self._place(np.flatnonzero(~self.is_direct))

    def _check_ends(self) -> NDArray[np.bool_]:
        """Look at the first and last bytes of every chunk; which ones the host must decode."""
        codec = self._codec
        heads, tails = self._ends()
        problems = frames.check_frames(codec, heads, tails, self.fetched.nbytes, self.chunk_nbytes)
        for index in np.flatnonzero(frames.is_corrupt(problems))[:1].tolist():
            problem = frames.Problem(int(problems[index]))
            nbytes = int(self.fetched.nbytes[index])
            raise self._corrupt(
                index,
                frames.describe(
                    problem, codec, heads[index], nbytes=nbytes, expected_nbytes=self.chunk_nbytes
                ),
            )
        return frames.needs_host(problems)

    def _ends(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        fetched, n = self.fetched, len(self.fetched.rows)
        width = frames.HEAD_NBYTES + frames.TAIL_NBYTES
        ends = cupy.zeros((n, width), np.uint8)
        row_at = np.arange(n, dtype=np.int64) * width
        head, tail = np.minimum(fetched.nbytes, frames.HEAD_NBYTES), np.minimum(fetched.nbytes, frames.TAIL_NBYTES)
        launch.copy_bytes(
            fetched.slab,
            ends.reshape(-1),
            source_offset=np.concatenate([fetched.at, fetched.at + fetched.nbytes - tail]),
            out_offset=np.concatenate([row_at, row_at + width - tail]),
            nbytes=np.concatenate([head, tail]),
            mean_nbytes=width // 2,
            status=self.output.status,
        )
        host = ends.get()
        return host[:, : frames.HEAD_NBYTES], host[:, frames.HEAD_NBYTES :]

    def _decompress(self, index: NDArray[np.int64]) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Queue nvCOMP for some of the chunks; decoded sizes and statuses."""
        algorithm, before, behind = FRAMING[self._codec]
        source, at, nbytes = self.fetched.slab, self.fetched.at[index] + before, self.fetched.nbytes[index]
        nbytes = nbytes - before - behind
        alignment = nvcomp.decode_alignment(algorithm).input
        if np.any((source.data.ptr + at) % alignment):
            aligned_at = np.cumsum(-(-nbytes // 16) * 16) - -(-nbytes // 16) * 16
            aligned = cupy.empty(int(aligned_at[-1] + nbytes[-1]), np.uint8)
            launch.copy_bytes(
                source,
                aligned,
                source_offset=at,
                out_offset=aligned_at,
                nbytes=nbytes,
                mean_nbytes=int(nbytes.mean()),
                status=self.output.status,
            )
            source, at = aligned, aligned_at
        self._decoder_input = source  # until the stream has passed
        return nvcomp.decompress_batch(
            algorithm,
            cupy.asarray((source.data.ptr + at).astype(np.uint64)),
            cupy.asarray(nbytes.astype(np.uint64)),
            cupy.asarray(self._destinations(index)),
            cupy.full(len(index), self.chunk_nbytes, np.uint64),
            max_chunk_nbytes=self.chunk_nbytes,
            total_nbytes=self.chunk_nbytes * len(index),
            stream=self.stream,
        )

    def _destinations(self, index: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Device address that each chunk decodes to."""
        scratch = 0 if self.scratch is None else self.scratch.data.ptr
        direct = self.output.memory.data.ptr + self.slab_at[index]
        return np.where(self.is_direct[index], direct, scratch + self.scratch_at[index]).astype(np.uint64)

    def _decode_on_host(self, index: NDArray[np.int64], *, place: bool = True) -> None:
        """Decode some chunks on the host and bring them to where nvCOMP would have."""
        fetched = self.fetched
        self.n_host_chunks += len(index)
        decoded = np.empty(self.chunk_nbytes, np.uint8)
        for i in index.tolist():
            encoded = fetched.slab[int(fetched.at[i]) : int(fetched.at[i] + fetched.nbytes[i])].get()
            problem = decode_into(self._codec, memoryview(encoded), decoded)
            if problem:
                raise self._corrupt(i, problem)
            target: Any = self.output.memory if self.is_direct[i] else self.scratch
            start = int(self.slab_at[i] if self.is_direct[i] else self.scratch_at[i])
            target[start : start + self.chunk_nbytes].set(decoded)
        if place:
            self._place(index[~self.is_direct[index]])

    def _place(self, index: NDArray[np.int64]) -> None:
        if len(index):
            self.output.place(self.scratch, self.fetched.rows[index], self.scratch_at[index])

    @property
    def _codec(self) -> str:
        step = self.plan.layout.codec_chain.compressor
        assert step is not None  # noqa: S101  # chains without one are placed as they are
        return step.codec

    def _corrupt(self, index: int, problem: str) -> CorruptChunkError:
        fetched = self.fetched
        label = self.plan.label(
            int(fetched.rows[index]), int(fetched.object_offset[index]), int(fetched.nbytes[index])
        )
        return CorruptChunkError(f"{label}: {problem}")
