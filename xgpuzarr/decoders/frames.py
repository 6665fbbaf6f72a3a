"""How does a batch of frames of one algorithm become decoded bytes on the device, with nothing taken on trust?

1. The first and last bytes of every chunk are looked at on the host (`xgpuzarr.plan.frames`).
2. nvCOMP decodes the sound ones, each to its place, with a guard zone behind it where there is room for one.
3. Checksums of the content, which nvCOMP does not look at, are compared with what the frames state.
4. Once the stream has passed, every status, size, guard zone and checksum is looked at: `EncodedFrames.suspects`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.kernels import launch, launch_checksums
from xgpuzarr.plan import frames
from xgpuzarr.plan.zstd import ZstdHeaders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["GUARD_NBYTES", "EncodedFrames", "Places"]

GUARD_NBYTES = 256
"""Bytes behind each decoded chunk, or behind the result, that a sound decoder leaves alone."""

FRAMING: dict[str, tuple[str, int, int]] = {
    "lz4": ("lz4", 4, 0),
    "zlib": ("deflate", 2, 4),
    "zstd": ("zstd", 0, 0),
    "gzip": ("gzip", 0, 0),
}
"""For each codec nvCOMP's algorithm, and the bytes before and behind what nvCOMP takes: numcodecs' LZ4 size, zlib's
header and checksum."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each chunk of a batch is decoded to: into the result, or into scratch.

    Attributes
    ----------
    result, scratch
        uint8, 1-D, on the device. Behind each chunk in `scratch` are `GUARD_NBYTES` bytes of room.
    in_result
        bool, shape (n,): which of the two each chunk goes to.
    offset
        int64, shape (n,): where it starts there, in bytes.
    """

    result: cupy.ndarray
    scratch: cupy.ndarray
    in_result: NDArray[np.bool_]
    offset: NDArray[np.int64]

    def addresses(self, index: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Device addresses of some chunks."""
        base = np.where(self.in_result[index], self.result.data.ptr, self.scratch.data.ptr)
        addresses: NDArray[np.uint64] = (base + self.offset[index]).astype(np.uint64)
        return addresses

    def parts(self, index: NDArray[np.int64]) -> Iterator[tuple[cupy.ndarray, NDArray[np.int64]]]:
        """Each buffer with those of some chunks that lie in it."""
        for buffer, mine in ((self.result, self.in_result[index]), (self.scratch, ~self.in_result[index])):
            if mine.any():
                yield buffer, index[mine]


class EncodedFrames:
    """Chunks of one codec in device memory, on their way to their places. Work is queued on the current stream.

    Parameters
    ----------
    codec
        A key of `FRAMING`.
    slab
        uint8, 1-D, on the device: holds the chunks.
    at, nbytes
        int64, shape (n,), host memory: where each chunk starts in `slab`, and its encoded size, in bytes.
    decoded_nbytes
        Decoded size of every chunk, in bytes.
    status
        From `xgpuzarr.kernels.launch.new_status`.
    """

    def __init__(
        self,
        codec: str,
        slab: cupy.ndarray,
        at: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        *,
        decoded_nbytes: int,
        status: cupy.ndarray,
    ) -> None:
        self.codec, self.slab, self.at, self.nbytes = codec, slab, at, nbytes
        self.decoded_nbytes, self.status = decoded_nbytes, status
        self._heads, self._tails = self._ends()
        self.problems = frames.check_frames(codec, self._heads, self._tails, nbytes, decoded_nbytes)
        """A `xgpuzarr.plan.frames.Problem` for each chunk."""
        self._index = np.empty(0, np.int64)
        self._actual = self._statuses = self._broken = cupy.zeros(0, np.int32)
        self._differs: list[tuple[NDArray[np.int64], cupy.ndarray]] = []

    def describe(self, index: int) -> str:
        """Text of the problem of a chunk."""
        problem = frames.Problem(int(self.problems[index]))
        nbytes = int(self.nbytes[index])
        head = self._heads[index]
        return frames.describe(problem, self.codec, head, nbytes=nbytes, expected_nbytes=self.decoded_nbytes)

    def decode(self, index: NDArray[np.int64], places: Places) -> None:
        """Queue the decoding of some chunks, which have no problem, and the checks of what comes out."""
        self._index = index
        if not len(index):
            return
        guard_at = places.offset[~places.in_result] + self.decoded_nbytes
        launch.write_guards(places.scratch, guard_at, GUARD_NBYTES, status=self.status)
        self._decompress(index, places)
        self._broken = launch.check_guards(places.scratch, guard_at, GUARD_NBYTES)
        self._compare_checksums(index, places)

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that were not decoded as they should; valid once the stream has passed."""
        suspect = (self._statuses.get() != 0) | (self._actual.get() != self.decoded_nbytes)
        if self._broken.get().any():
            suspect[:] = True  # whatever was overrun may be a neighbour
        differing = [index[differs.get()] for index, differs in self._differs]
        return np.unique(np.concatenate([self._index[suspect], *differing]))

    def _ends(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Read the first and last bytes of every chunk; waits for the stream."""
        n, width = len(self.at), frames.HEAD_NBYTES + frames.TAIL_NBYTES
        ends = cupy.zeros((n, width), np.uint8)
        row_at = np.arange(n, dtype=np.int64) * width
        head = np.minimum(self.nbytes, frames.HEAD_NBYTES)
        tail = np.minimum(self.nbytes, frames.TAIL_NBYTES)
        launch.copy_bytes(
            self.slab,
            ends.reshape(-1),
            source_offset=np.concatenate([self.at, self.at + self.nbytes - tail]),
            out_offset=np.concatenate([row_at, row_at + width - tail]),
            nbytes=np.concatenate([head, tail]),
            mean_nbytes=width // 2,
            status=self.status,
        )
        host = ends.get()
        return host[:, : frames.HEAD_NBYTES], host[:, frames.HEAD_NBYTES :]

    def _decompress(self, index: NDArray[np.int64], places: Places) -> None:
        algorithm, before, behind = FRAMING[self.codec]
        source, at, nbytes = self.slab, self.at[index] + before, self.nbytes[index] - before - behind
        if np.any((source.data.ptr + at) % nvcomp.decode_alignment(algorithm).input):
            source, at = self._aligned(at, nbytes)
        self._source = source  # until the stream has passed
        self._actual, self._statuses = nvcomp.decompress_batch(
            algorithm,
            cupy.asarray((source.data.ptr + at).astype(np.uint64)),
            cupy.asarray(nbytes.astype(np.uint64)),
            cupy.asarray(places.addresses(index)),
            cupy.full(len(index), self.decoded_nbytes, np.uint64),
            max_chunk_nbytes=self.decoded_nbytes,
            total_nbytes=self.decoded_nbytes * len(index),
            stream=cupy.cuda.get_current_stream(),
        )

    def _aligned(self, at: NDArray[np.int64], nbytes: NDArray[np.int64]) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Copy frames to where each starts at a multiple of 16 bytes, more than nvCOMP asks for."""
        room = -(-nbytes // 16) * 16
        aligned_at = np.cumsum(room) - room
        aligned = cupy.empty(int(room.sum()), np.uint8)
        launch.copy_bytes(
            self.slab,
            aligned,
            source_offset=at,
            out_offset=aligned_at,
            nbytes=nbytes,
            mean_nbytes=int(nbytes.mean()),
            status=self.status,
        )
        return aligned, aligned_at

    def _compare_checksums(self, index: NDArray[np.int64], places: Places) -> None:
        """Queue the checksums of the content, for frames that state one."""
        tails = self._tails
        match self.codec:
            case "gzip":  # RFC 1952, section 2.3.1: CRC32, ISIZE
                checksum, stated = launch_checksums.crc32, tails[:, :4].copy().view("<u4")[:, 0]
            case "zlib":  # RFC 1950, section 2.2
                checksum, stated = launch_checksums.adler32, tails[:, 4:].copy().view(">u4")[:, 0]
            case "zstd":  # RFC 8878, section 3.1.1: the low 4 bytes
                checksum, stated = launch_checksums.xxh64, tails[:, 4:].copy().view("<u4")[:, 0]
                index = index[ZstdHeaders.parse(self._heads).has_checksum[index]]
            case _:
                return
        for buffer, mine in places.parts(index):
            nbytes = np.full(len(mine), self.decoded_nbytes)
            found = checksum(buffer, places.offset[mine], nbytes, status=self.status)
            expected = cupy.asarray(stated[mine].astype(np.uint32))
            self._differs.append((mine, found.astype(np.uint32) != expected))
