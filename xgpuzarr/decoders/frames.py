"""How does a batch of frames of one algorithm become decoded bytes on the device, with nothing taken on trust?

1. A kernel checks every chunk, and finds what its frame states and where it ends (`xgpuzarr.kernels.launch_frames`).
2. nvCOMP decodes, each frame to its place; a dummy stands in for what is not sound.
3. Sizes, statuses, guard zones and the checksums of the content, which nvCOMP does not look at, are judged by kernels.
4. Once the stream has passed, the host asks which chunks to look at again: `EncodedFrames.suspects`.

Nothing before that waits for the device, but for a look at the first zstd frame: does this writer state sizes?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import cupy
import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.kernels import launch, launch_checksums, launch_frames
from xgpuzarr.kernels.arguments import upload
from xgpuzarr.plan.byte_ranges import pack
from xgpuzarr.plan.zstd import MAX_BLOCK_NBYTES, MAX_HEADER_NBYTES, ZstdHeaders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["FRAMING", "GUARD_NBYTES", "EncodedFrames", "FrameBatch", "Framing", "Places", "aligned"]

GUARD_NBYTES = 256
"""Bytes behind each decoded chunk, or behind the result, that a sound decoder leaves alone."""

PREFIX_NBYTES = 4
"""The decoded size, little-endian, before each chunk of numcodecs' LZ4 and of the ``nvcomp`` codecs."""

NOT_DECODED = 255
"""In the place of a `xgpuzarr.plan.frames.Problem`: the device decoded something else than it should have."""


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
        What `xgpuzarr.kernels.launch_frames` calls this format, and where it starts; "" for formats that only nvCOMP
        knows.
    checksum_from_end
        How far before the end of a chunk the checksum of its content stands, where it always has one.
    """

    algorithm: str
    before: int = 0
    behind: int = 0
    check: str = ""
    check_at: int = 0
    checksum_from_end: int = 0


FRAMING: dict[str, Framing] = {
    "gdeflate": Framing("gdeflate"),
    "gzip": Framing("gzip", check="gzip", checksum_from_end=8),  # CRC32, ISIZE: RFC 1952, section 2.3.1
    "lz4": Framing("lz4", before=PREFIX_NBYTES, check="lz4"),
    "zlib": Framing("deflate", before=2, behind=4, check="zlib", checksum_from_end=4),  # RFC 1950, section 2.2
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
    """Where each chunk of a batch is decoded to: the first ones into the result, the others into scratch.

    Attributes
    ----------
    result, scratch
        uint8, 1-D, on the device. Behind the room of each chunk in `scratch` are `GUARD_NBYTES` bytes.
    n_in_result
        How many go to the result.
    offset
        int64, shape (n,): where each starts there, in bytes.
    """

    result: cupy.ndarray
    scratch: cupy.ndarray
    n_in_result: int
    offset: NDArray[np.int64]

    def parts(self) -> Iterator[tuple[cupy.ndarray, slice, int]]:
        """Each buffer with the chunks that lie in it, and the bytes of the guard zone behind each of them."""
        if self.n_in_result:
            yield self.result, slice(self.n_in_result), 0
        if self.n_in_result < len(self.offset):
            yield self.scratch, slice(self.n_in_result, None), GUARD_NBYTES


@dataclass(eq=False)
class FrameBatch(ABC):
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

    codec: str
    slab: cupy.ndarray
    at: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    _: KW_ONLY
    decoded_nbytes: int
    status: cupy.ndarray

    @property
    def framing(self) -> Framing:
        """How the codec wraps what nvCOMP takes."""
        return FRAMING[self.codec]

    @cached_property
    def room_nbytes(self) -> int:
        """Bytes that each chunk needs at its place; more than `decoded_nbytes` where frames do not state their size."""
        return self.decoded_nbytes

    @abstractmethod
    def decode(self, places: Places, skip: cupy.ndarray | None = None) -> None:
        """Queue the decoding of all chunks, and the checks of what comes out.

        Parameters
        ----------
        skip
            int32, shape (n,), on the device: not 0 for chunks that are known to be damaged.
        """

    @abstractmethod
    def suspects(self) -> NDArray[np.int64]:
        """Chunks that are not sound, or were not decoded as they should; valid once the stream has passed."""

    def describe(self, _index: int) -> str:
        """Say what is wrong with a suspect, as far as that is known."""
        return f"codec {self.codec!r}: the device does not decode these bytes"


class EncodedFrames(FrameBatch):
    """Chunks of a codec whose format is known here."""

    @cached_property
    def room_nbytes(self) -> int:
        """As in `FrameBatch`; that of zstd waits for the stream."""
        if self.framing.check == "zstd" and not self._states_sizes():
            return -(-self.decoded_nbytes // MAX_BLOCK_NBYTES) * MAX_BLOCK_NBYTES
        return self.decoded_nbytes

    def decode(self, places: Places, skip: cupy.ndarray | None = None) -> None:
        """Queue the decoding of all chunks, and the checks of what comes out; as `FrameBatch.decode`."""
        framing, n = self.framing, len(self.at)
        frame_nbytes = np.maximum(self.nbytes - framing.before - framing.behind, 0)
        source, frame_at = aligned(self.slab, self.at + framing.before, frame_nbytes, framing.algorithm, self.status)
        at, nbytes, *columns = upload(
            self.at,
            self.nbytes,
            frame_at,
            frame_nbytes,
            places.offset,
            np.full(n, self.room_nbytes),
            np.full(n, self.decoded_nbytes),
            self.at + self.nbytes - framing.checksum_from_end,
        )
        self._problem = launch_frames.check_frames(
            framing.check,
            self.slab,
            at,
            nbytes,
            expected_nbytes=self.decoded_nbytes,
            room_nbytes=self.room_nbytes,
            prefix_nbytes=framing.check_at,
            skip=skip,
        )
        self._overrun = cupy.zeros(1, np.int32)
        parts = [
            _Part(buffer, guard, self._problem[own], own, *(column[own] for column in columns))
            for buffer, own, guard in places.parts()
        ]
        pointed = [self._point(source, part) for part in parts]
        actual, statuses = nvcomp.decompress_batch(
            framing.algorithm,
            *(pointed[0] if len(pointed) == 1 else cupy.concatenate(pointed, axis=1)),
            max_chunk_nbytes=self.room_nbytes,
            total_nbytes=self.room_nbytes * n,
            stream=cupy.cuda.get_current_stream(),
        )
        for part in parts:
            self._judge(actual[part.own], statuses[part.own], part)
            self._check_content(source, part)
        self._source_and_columns = source, pointed  # until the stream has passed

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that are not sound, or were not decoded as they should; valid once the stream has passed."""
        problem, overrun = self._problem.get(), self._overrun.get()
        # whatever was overrun may be a neighbour
        return np.arange(len(problem)) if overrun[0] else np.flatnonzero(problem)

    def _states_sizes(self) -> bool:
        """Say whether the first frame states its decoded size, as all of its writer's do then; waits for the stream."""
        start = int(self.at[0]) + self.framing.check_at
        head = self.slab[start : start + MAX_HEADER_NBYTES].get()
        heads = np.pad(head, (0, MAX_HEADER_NBYTES - len(head)))[None]
        return bool(ZstdHeaders.parse(heads).has_content_size[0])

    def _point(self, source: cupy.ndarray, part: _Part) -> cupy.ndarray:
        return launch_frames.point_frames(
            self.framing.algorithm,
            source,
            part.frame_at,
            part.frame_nbytes,
            out=part.buffer,
            out_offset=part.offset,
            out_nbytes=part.room,
            skip=part.problem,
            guard_nbytes=part.guard,
            status=self.status,
        )

    def _judge(self, actual: cupy.ndarray, statuses: cupy.ndarray, part: _Part) -> None:
        """Queue the checks of what nvCOMP says of some chunks, and of the guard zones behind them."""
        launch_frames.judge_frames(
            actual,
            statuses,
            out=part.buffer,
            out_offset=part.offset,
            out_nbytes=part.decoded,
            room_nbytes=part.room,
            skip=part.problem,
            guard_nbytes=part.guard,
            code=NOT_DECODED,
            problem=part.problem,
            overrun=self._overrun,
        )

    def _check_content(self, source: cupy.ndarray, part: _Part) -> None:
        """Queue the comparison of the checksum that each chunk states, if any, with that of its content."""
        content, problem = (part.buffer, part.offset, part.decoded), part.problem
        match self.framing.check:
            case "zstd":
                frame = (source, part.frame_at, part.frame_nbytes)
                launch_checksums.check_zstd_contents(
                    *frame, *content, code=NOT_DECODED, problem=problem, status=self.status
                )
            case "gzip" | "zlib" as check:
                checksum = launch_checksums.crc32 if check == "gzip" else launch_checksums.adler32
                launch_checksums.compare(
                    checksum(*content, status=self.status),
                    self.slab,
                    part.stored_at,
                    is_big_endian=check == "zlib",
                    skip=problem,
                    code=NOT_DECODED,
                    problem=problem,
                )


class _Part(NamedTuple):
    """Chunks of a batch that are decoded into one buffer: device columns, a row a chunk, int64 but for `problem`.

    In bytes: frames in the source, outputs in the buffer, and where in the slab the checksum of the content stands.
    """

    buffer: cupy.ndarray
    guard: int
    problem: cupy.ndarray
    own: slice
    frame_at: cupy.ndarray
    frame_nbytes: cupy.ndarray
    offset: cupy.ndarray
    room: cupy.ndarray
    decoded: cupy.ndarray
    stored_at: cupy.ndarray


def aligned(
    slab: cupy.ndarray, at: NDArray[np.int64], nbytes: NDArray[np.int64], algorithm: str, status: cupy.ndarray
) -> tuple[cupy.ndarray, NDArray[np.int64]]:
    """Frames where each starts as nvCOMP asks: where they are, or else copied; the buffer, and their offsets."""
    if not np.any((slab.data.ptr + at) % nvcomp.decode_alignment(algorithm).input):
        return slab, at
    aligned_at, copy_nbytes = pack(nbytes)  # at multiples of the most that any algorithm asks for
    copy = cupy.empty(copy_nbytes, np.uint8)
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
