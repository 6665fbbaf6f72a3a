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
from xgpuzarr.plan import frames, gdeflate
from xgpuzarr.plan.zstd import ZstdHeaders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["GUARD_NBYTES", "EncodedFrames", "Places", "encoded_frames"]

GUARD_NBYTES = 256
"""Bytes behind each decoded chunk, or behind the result, that a sound decoder leaves alone."""

PREFIX_NBYTES = 4
"""The decoded size, little-endian, before each chunk of numcodecs' LZ4 and of the ``nvcomp`` codecs."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """One call of nvCOMP, a row a frame: its source, kept until the stream has passed, the chunk that each frame is of,
    chunks that were left out, and the room and the outcome of each frame.
    """

    source: cupy.ndarray
    chunk: NDArray[np.int64]
    unfit: NDArray[np.int64]
    room: NDArray[np.int64]
    actual: cupy.ndarray
    statuses: cupy.ndarray

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that were left out or failed; valid once the stream has passed."""
        failed = (self.statuses.get() != 0) | (self.actual.get() != self.room)
        return np.concatenate([self.unfit, self.chunk[failed]])


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

    Attributes
    ----------
    problems
        uint8, shape (n,), host memory: a `xgpuzarr.plan.frames.Problem` for each chunk.
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
        self._index = np.empty(0, np.int64)
        self._batches: list[_Batch] = []
        self._broken = cupy.zeros(0, np.int32)
        self._differs: list[tuple[NDArray[np.int64], cupy.ndarray]] = []
        self.problems = self._look()

    def describe(self, index: int) -> str:
        """Text of the problem of a chunk."""
        problem, framing = frames.Problem(int(self.problems[index])), FRAMING[self.codec]
        is_inside = framing.check and not self._is_prefix_wrong[index]
        codec, start = (framing.check, framing.check_at) if is_inside else (self.codec, 0)
        head = self._heads[index, start : start + frames.HEAD_NBYTES]
        nbytes = int(self.nbytes[index])
        return frames.describe(problem, codec, head, nbytes=nbytes, expected_nbytes=self.decoded_nbytes)

    def decode(self, index: NDArray[np.int64], places: Places) -> None:
        """Queue the decoding of some chunks, which have no problem, and the checks of what comes out."""
        self._index = index
        if not len(index):
            return
        guard_at = places.offset[~places.in_result] + self.decoded_nbytes
        launch.write_guards(places.scratch, guard_at, GUARD_NBYTES, status=self.status)
        self._decode_frames(index, places)
        self._broken = launch.check_guards(places.scratch, guard_at, GUARD_NBYTES)
        self._compare_checksums(index, places)

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that were not decoded as they should; valid once the stream has passed."""
        suspects = [index[differs.get()] for index, differs in self._differs]
        suspects += [batch.suspects() for batch in self._batches]
        if self._broken.get().any():
            suspects.append(self._index)  # whatever was overrun may be a neighbour
        return np.unique(np.concatenate([np.empty(0, np.int64), *suspects]))

    def _look(self) -> NDArray[np.uint8]:
        """Look at the first and last bytes of every chunk; waits for the stream."""
        framing = FRAMING[self.codec]
        self._heads = self._bytes_at(self.at, self.nbytes, PREFIX_NBYTES + frames.HEAD_NBYTES)
        tail = np.minimum(self.nbytes, frames.TAIL_NBYTES)
        self._tails = self._bytes_at(self.at + self.nbytes - tail, tail, frames.TAIL_NBYTES, at_end=True)
        problems = np.zeros(len(self.at), np.uint8)
        if framing.check:
            heads = self._heads[:, framing.check_at : framing.check_at + frames.HEAD_NBYTES]
            nbytes = self.nbytes - framing.check_at
            problems = frames.check_frames(framing.check, heads, self._tails, nbytes, self.decoded_nbytes)
        stated = self._heads[:, :PREFIX_NBYTES].copy().view("<u4")[:, 0]
        self._is_prefix_wrong = np.full(len(stated), framing.before == PREFIX_NBYTES) & (stated != self.decoded_nbytes)
        problems[self._is_prefix_wrong] = frames.Problem.SIZE
        problems[self.nbytes <= framing.before + framing.behind] = frames.Problem.TOO_SHORT
        return problems

    def _bytes_at(
        self, at: NDArray[np.int64], nbytes: NDArray[np.int64], width: int, *, at_end: bool = False
    ) -> NDArray[np.uint8]:
        """Up to `width` bytes of every chunk in host memory; zeros fill a row, before them if `at_end`."""
        n = len(at)
        rows = cupy.zeros((n, width), np.uint8)
        count = np.minimum(nbytes, width)
        row_at = np.arange(n, dtype=np.int64) * width
        launch.copy_bytes(
            self.slab,
            rows.reshape(-1),
            source_offset=at,
            out_offset=row_at + width - count if at_end else row_at,
            nbytes=count,
            mean_nbytes=width,
            status=self.status,
        )
        host: NDArray[np.uint8] = rows.get()
        return host

    def _decode_frames(self, index: NDArray[np.int64], places: Places) -> None:
        framing = FRAMING[self.codec]
        at = self.at[index] + framing.before
        nbytes = self.nbytes[index] - framing.before - framing.behind
        room = np.full(len(index), self.decoded_nbytes)
        self._batches.append(self._queue(framing.algorithm, index, at, nbytes, places.addresses(index), room))

    def _queue(
        self,
        algorithm: str,
        chunk: NDArray[np.int64],
        at: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        address: NDArray[np.uint64],
        room: NDArray[np.int64],
    ) -> _Batch:
        """Queue one call of nvCOMP; arguments are a row a frame."""
        source, stream = self.slab, cupy.cuda.get_current_stream()
        if np.any((source.data.ptr + at) % nvcomp.decode_alignment(algorithm).input):
            source, at = self._aligned(at, nbytes)
        columns = [cupy.asarray(column.astype(np.uint64)) for column in (source.data.ptr + at, nbytes, address, room)]
        unfit = chunk[:0]
        if algorithm in ("ans", "bitcomp", "cascaded"):  # formats in which only nvCOMP can read the size
            stated = nvcomp.decompressed_nbytes(algorithm, columns[0], columns[1], stream=stream).get()
            fits = stated == room
            columns = [column[cupy.asarray(np.flatnonzero(fits))] for column in columns]
            unfit, chunk, room = chunk[~fits], chunk[fits], room[fits]
        actual, statuses = nvcomp.decompress_batch(
            algorithm,
            *columns,
            max_chunk_nbytes=int(room.max(initial=0)),
            total_nbytes=int(room.sum()),
            stream=stream,
        )
        return _Batch(source, chunk, unfit, room, actual, statuses)

    def _aligned(self, at: NDArray[np.int64], nbytes: NDArray[np.int64]) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Copy frames to where each starts at a multiple of 16 bytes, the most that nvCOMP asks for."""
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
        framing = FRAMING[self.codec]
        match framing.check:
            case "gzip":  # RFC 1952, section 2.3.1: CRC32, ISIZE
                checksum, stated = launch_checksums.crc32, self._tails[:, :4].copy().view("<u4")[:, 0]
            case "zlib":  # RFC 1950, section 2.2
                checksum, stated = launch_checksums.adler32, self._tails[:, 4:].copy().view(">u4")[:, 0]
            case "zstd":  # RFC 8878, section 3.1.1: the low 4 bytes
                checksum, stated = launch_checksums.xxh64, self._tails[:, 4:].copy().view("<u4")[:, 0]
                index = index[ZstdHeaders.parse(self._heads[:, framing.check_at :]).has_checksum[index]]
            case _:
                return
        for buffer, mine in places.parts(index):
            nbytes = np.full(len(mine), self.decoded_nbytes)
            found = checksum(buffer, places.offset[mine], nbytes, status=self.status)
            expected = cupy.asarray(stated[mine].astype(np.uint32))
            self._differs.append((mine, found.astype(np.uint32) != expected))


class EncodedPages(EncodedFrames):
    """Chunks of zarrs' ``gdeflate``: each is many frames, whose places stand before the first."""

    def _look(self) -> NDArray[np.uint8]:
        width = gdeflate.header_nbytes(self.decoded_nbytes)
        self._heads = self._bytes_at(self.at, self.nbytes, max(width, frames.HEAD_NBYTES))
        self._is_prefix_wrong = np.ones(len(self.at), np.bool_)
        self._headers = np.ascontiguousarray(self._heads[:, :width]).view("<u8").astype(np.uint64)
        return gdeflate.check_headers(self._headers, self.nbytes, self.decoded_nbytes)

    def _decode_frames(self, index: NDArray[np.int64], places: Places) -> None:
        headers, n_pages = self._headers[index], gdeflate.n_pages(self.decoded_nbytes)
        start = np.arange(n_pages, dtype=np.int64) * gdeflate.PAGE_NBYTES
        room = np.minimum(self.decoded_nbytes - start, gdeflate.PAGE_NBYTES)
        at = self.at[index][:, None] + gdeflate.page_offsets(headers, self.decoded_nbytes)
        self._batches.append(
            self._queue(
                "gdeflate",
                np.repeat(index, n_pages),
                at.reshape(-1),
                headers[:, 2:].astype(np.int64).reshape(-1),
                (places.addresses(index)[:, None] + start.astype(np.uint64)).reshape(-1),
                np.tile(room, len(index)),
            )
        )


def encoded_frames(
    codec: str,
    slab: cupy.ndarray,
    at: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    *,
    decoded_nbytes: int,
    status: cupy.ndarray,
) -> EncodedFrames:
    """Chunks of any codec but Blosc; arguments as for `EncodedFrames`."""
    kind = EncodedPages if codec == "gdeflate" else EncodedFrames
    return kind(codec, slab, at, nbytes, decoded_nbytes=decoded_nbytes, status=status)
