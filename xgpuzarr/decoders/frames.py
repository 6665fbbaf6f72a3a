"""How does a batch of frames of one algorithm become decoded bytes on the device, with nothing taken on trust?

1. A kernel checks every chunk, and finds what its frame states and where it ends (`xgpuzarr.kernels.launch_frames`).
2. nvCOMP decodes, each frame to its place; a dummy stands in for what is not sound.
3. Sizes, statuses, guard zones and the checksums of the content, which nvCOMP does not look at, are judged by kernels.
4. Once the stream has passed, the host asks which chunks to look at again: `EncodedFrames.suspects`.

Nothing before that waits for the device, but for a look at the first zstd frame: does this writer state sizes?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.kernels import launch, launch_checksums, launch_frames
from xgpuzarr.plan.frames import Problem
from xgpuzarr.plan.zstd import MAX_BLOCK_NBYTES, MAX_HEADER_NBYTES, ZstdHeaders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["FRAMING", "GUARD_NBYTES", "EncodedFrames", "Framing", "Places", "aligned"]

GUARD_NBYTES = 256
"""Bytes behind each decoded chunk, or behind the result, that a sound decoder leaves alone."""

PREFIX_NBYTES = 4
"""The decoded size, little-endian, before each chunk of numcodecs' LZ4 and of the ``nvcomp`` codecs."""

NOT_DECODED = 255
"""In the place of a `Problem`: the device decoded something else than it should have."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How a codec wraps what nvCOMP takes.

    Attributes
    ----------
    algorithm
        nvCOMP's.
    before, behind
        Bytes around the frame that nvCOMP does not take.
    check, check_at
        What `xgpuzarr.plan.frames` calls this format, and where it starts; "" for formats that only nvCOMP knows.
    """

    algorithm: str
    before: int = 0
    behind: int = 0
    check: str = ""
    check_at: int = 0

    @property
    def has_prefix(self) -> bool:
        """True if the decoded size stands before the chunk."""
        return self.before == PREFIX_NBYTES


FRAMING: dict[str, Framing] = {
    "gdeflate": Framing("gdeflate"),
    "gzip": Framing("gzip", check="gzip"),
    "lz4": Framing("lz4", before=PREFIX_NBYTES, check="lz4"),
    "zlib": Framing("deflate", before=2, behind=4, check="zlib"),
    "zstd": Framing("zstd", check="zstd"),
    "nvcomp.ans": Framing("ans", before=PREFIX_NBYTES),
    "nvcomp.bitcomp": Framing("bitcomp", before=PREFIX_NBYTES),
    "nvcomp.cascaded": Framing("cascaded", before=PREFIX_NBYTES),
    "nvcomp.deflate": Framing("deflate", before=PREFIX_NBYTES, check="deflate", check_at=PREFIX_NBYTES),
    "nvcomp.gdeflate": Framing("gdeflate", before=PREFIX_NBYTES),
    "nvcomp.lz4": Framing("lz4", before=PREFIX_NBYTES, check="lz4"),
    "nvcomp.snappy": Framing("snappy", before=PREFIX_NBYTES, check="snappy", check_at=PREFIX_NBYTES),
    "nvcomp.zstd": Framing("zstd", before=PREFIX_NBYTES, check="zstd", check_at=PREFIX_NBYTES),
}


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each chunk of a batch is decoded to: into the result, or into scratch.

    Attributes
    ----------
    result, scratch
        uint8, 1-D, on the device. Behind the room of each chunk in `scratch` are `GUARD_NBYTES` bytes.
    in_result
        bool, shape (n,): which of the two each chunk goes to.
    offset
        int64, shape (n,): where it starts there, in bytes.
    """

    result: cupy.ndarray
    scratch: cupy.ndarray
    in_result: NDArray[np.bool_]
    offset: NDArray[np.int64]

    def parts(self) -> Iterator[tuple[cupy.ndarray, NDArray[np.int64], int]]:
        """Each buffer with the chunks that lie in it, and the bytes of the guard zone behind each of them."""
        for buffer, mine, guard in ((self.result, self.in_result, 0), (self.scratch, ~self.in_result, GUARD_NBYTES)):
            if mine.any():
                yield buffer, np.flatnonzero(mine), guard


class EncodedFrames:
    """Chunks of one codec in device memory, on their way to their places. Work is queued on the current stream.

    Parameters
    ----------
    codec
        A key of `FRAMING` whose format is known here.
    slab
        uint8, 1-D, on the device: holds the chunks.
    at, nbytes
        int64, shape (n,), host memory: where each chunk starts in `slab`, and its encoded size, in bytes.
    decoded_nbytes
        Decoded size of every chunk, in bytes.
    status
        From `xgpuzarr.kernels.launch.new_status`.

    Attributes
    ----------
    room_nbytes
        Bytes that each chunk needs at its place; more than `decoded_nbytes` where frames do not state their size.
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
        self.framing = FRAMING[codec]
        self.room_nbytes = decoded_nbytes
        if self.framing.check == "zstd" and not self._states_sizes():
            self.room_nbytes = -(-decoded_nbytes // MAX_BLOCK_NBYTES) * MAX_BLOCK_NBYTES

    def decode(self, places: Places, skip: cupy.ndarray | None = None) -> None:
        """Queue the decoding of all chunks, and the checks of what comes out.

        Parameters
        ----------
        skip
            bool, shape (n,), on the device: chunks that are known to be damaged.
        """
        self._problem = self._check() if skip is None else cupy.where(skip, np.int32(NOT_DECODED), self._check())
        self._overrun = cupy.zeros(1, np.int32)
        source, at, nbytes = self._source()
        parts = list(places.parts())
        pointed = [
            launch_frames.point_frames(
                self.framing.algorithm,
                source,
                at[mine],
                nbytes[mine],
                out=buffer,
                out_offset=places.offset[mine],
                out_nbytes=np.full(len(mine), self.room_nbytes),
                skip=self._problem[cupy.asarray(mine)],
                guard_nbytes=guard,
                status=self.status,
            )
            for buffer, mine, guard in parts
        ]
        self._source_and_dummies = source, pointed  # until the stream has passed
        actual, statuses = nvcomp.decompress_batch(
            self.framing.algorithm,
            *cupy.concatenate([columns for columns, _ in pointed], axis=1),
            max_chunk_nbytes=self.room_nbytes,
            total_nbytes=self.room_nbytes * len(at),
            stream=cupy.cuda.get_current_stream(),
        )
        start = 0
        for buffer, mine, guard in parts:
            own = slice(start, start + len(mine))
            self._judge(actual[own], statuses[own], buffer, mine, places.offset[mine], guard)
            start = own.stop

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that are not sound, or were not decoded as they should; valid once the stream has passed."""
        problem, overrun = self._problem.get(), self._overrun.get()
        # whatever was overrun may be a neighbour
        return np.arange(len(problem)) if overrun[0] else np.flatnonzero(problem)

    def describe(self, _index: int) -> str:
        """Say that the device did not decode a chunk."""
        return f"codec {self.codec!r}: the device does not decode these bytes"

    def _states_sizes(self) -> bool:
        """Say whether the first frame states its decoded size, as all of its writer's do then; waits for the stream."""
        start = int(self.at[0]) + self.framing.check_at
        head = self.slab[start : start + MAX_HEADER_NBYTES].get()
        heads = np.pad(head, (0, MAX_HEADER_NBYTES - len(head)))[None]
        return bool(ZstdHeaders.parse(heads).has_content_size[0])

    def _check(self) -> cupy.ndarray:
        """A `Problem` for each chunk, int32."""
        framing = self.framing
        nbytes = np.maximum(self.nbytes - framing.check_at, 0)
        problem = launch_frames.check_frames(
            framing.check,
            self.slab,
            self.at + framing.check_at,
            nbytes,
            expected_nbytes=self.decoded_nbytes,
            room_nbytes=self.room_nbytes,
        )
        if framing.has_prefix:
            stated = self._words(self.at, np.uint32)
            problem = cupy.where(stated == self.decoded_nbytes, problem, np.int32(Problem.SIZE))
        is_short = self.nbytes <= framing.before + framing.behind
        return cupy.where(cupy.asarray(is_short), np.int32(Problem.TOO_SHORT), problem)

    def _words(self, at: NDArray[np.int64], dtype: type[np.generic], *, big_endian: bool = False) -> cupy.ndarray:
        """One number of each chunk; what lies outside the slab is taken from its edge."""
        index = cupy.asarray(at)[:, None] + cupy.arange(np.dtype(dtype).itemsize)
        index = cupy.ascontiguousarray(index[:, ::-1]) if big_endian else index
        return self.slab[cupy.clip(index, 0, self.slab.size - 1)].view(dtype)[:, 0]

    def _source(self) -> tuple[cupy.ndarray, NDArray[np.int64], NDArray[np.int64]]:
        """Buffer, offsets and sizes of what nvCOMP takes, aligned as it asks."""
        at = self.at + self.framing.before
        nbytes = np.maximum(self.nbytes - self.framing.before - self.framing.behind, 0)
        return (*aligned(self.slab, at, nbytes, self.framing.algorithm, self.status), nbytes)

    def _judge(
        self,
        actual: cupy.ndarray,
        statuses: cupy.ndarray,
        buffer: cupy.ndarray,
        mine: NDArray[np.int64],
        offset: NDArray[np.int64],
        guard: int,
    ) -> None:
        """Queue the checks of chunks that were decoded into one buffer."""
        where = cupy.asarray(mine)
        problem, decoded = self._problem[where], np.full(len(mine), self.decoded_nbytes)
        is_exact = self.room_nbytes == self.decoded_nbytes
        launch_frames.judge_frames(
            actual,
            statuses,
            out=buffer,
            out_offset=offset,
            out_nbytes=decoded,
            skip=problem.copy(),
            guard_nbytes=guard if is_exact else 0,
            code=NOT_DECODED,
            problem=problem,
            overrun=self._overrun,
        )
        if guard and not is_exact:
            self._overrun |= launch.check_guards(buffer, offset + self.room_nbytes, guard).any().astype(np.int32)
        self._problem[where] = cupy.where(
            (problem == 0) & self._differs(buffer, mine, offset), np.int32(NOT_DECODED), problem
        )

    def _differs(self, buffer: cupy.ndarray, mine: NDArray[np.int64], offset: NDArray[np.int64]) -> cupy.ndarray:
        """Say of each chunk whether its content has another checksum than it states; False if it states none."""
        end, nbytes = self.at[mine] + self.nbytes[mine], np.full(len(mine), self.decoded_nbytes)
        match self.framing.check:
            case "gzip":  # RFC 1952, section 2.3.1: CRC32, ISIZE
                found = launch_checksums.crc32(buffer, offset, nbytes, status=self.status)
                return found != self._words(end - 8, np.uint32)
            case "zlib":  # RFC 1950, section 2.2
                found = launch_checksums.adler32(buffer, offset, nbytes, status=self.status)
                return found != self._words(end - 4, np.uint32, big_endian=True)
            case "zstd":  # RFC 8878, section 3.1.1: the low 4 bytes, if bit 2 of the frame header descriptor says so
                descriptor = self._words(self.at[mine] + self.framing.check_at + 4, np.uint8)
                has_one = (descriptor & np.uint8(4)) != 0
                summed = cupy.where(has_one, cupy.asarray(nbytes), 0)  # nothing to hash for the others
                found = launch_checksums.xxh64(buffer, offset, summed, status=self.status).astype(np.uint32)
                return has_one & (found != self._words(end - 4, np.uint32))
        return cupy.zeros(len(mine), np.bool_)


def aligned(
    slab: cupy.ndarray, at: NDArray[np.int64], nbytes: NDArray[np.int64], algorithm: str, status: cupy.ndarray
) -> tuple[cupy.ndarray, NDArray[np.int64]]:
    """Frames where each starts as nvCOMP asks: where they are, or else copied; the buffer, and their offsets."""
    if not np.any((slab.data.ptr + at) % nvcomp.decode_alignment(algorithm).input):
        return slab, at
    room = -(-nbytes // 16) * 16  # the most that any algorithm asks for
    aligned_at = np.cumsum(room) - room
    copy = cupy.empty(int(room.sum()), np.uint8)
    launch.copy_bytes(
        slab,
        copy,
        source_offset=at,
        out_offset=aligned_at,
        nbytes=nbytes,
        mean_nbytes=int(nbytes.mean()),
        status=status,
    )
    return copy, aligned_at
