"""Is a Blosc chunk what its header says, and what the array's metadata promises? Asked before anything is decoded.

c-blosc and device decoders trust a chunk's header and block offsets: they read where these point. `check_chunk` looks
at all of them on the host, for one chunk in host memory; ``kernels/blosc.cu`` does the same on the device, for a batch,
and reports the same `Problem` numbers.

A chunk is a 16-byte header, a table of block offsets, and the blocks. A block is one stream, or one stream for each
byte of the element (see `BloscHeader.n_splits`); a stream is its int32 size and its bytes. Integers are little-endian.

Sources: c-blosc's ``README_CHUNK_FORMAT.rst``, and what c-blosc 1.21 accepts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HEADER_NBYTES", "BloscHeader", "Problem", "check_chunk", "describe"]

HEADER_NBYTES = 16

_CODECS = ("blosclz", "lz4", "snappy", "zlib", "zstd")
_UINT32 = struct.Struct("<I")
_SNAPPY = _CODECS.index("snappy")
_MEMCPYED, _FUTURE, _ONE_STREAM = 0x02, 0x08, 0x10
_MAX_SPLITS = 16
_MIN_SPLIT_ELEMENTS = 128


class Problem(IntEnum):
    """What is wrong with a chunk. The numbers are those of ``kernels/blosc.cuh``."""

    NONE = 0
    SHORT = 1
    VERSION = 2
    SIZE = 3
    STORED_SIZE = 4
    FLAGS = 5
    TYPESIZE = 6
    BLOCKSIZE = 7
    TABLE = 8
    BLOCK_OFFSET = 9
    STREAM_SIZE = 10
    OVERLAP = 11
    STREAM = 12


_TEXTS = {
    Problem.NONE: "",
    Problem.SHORT: "blosc needs a 16-byte header, got {nbytes} bytes",
    Problem.VERSION: "blosc header says format versions {version} and {codec_version}, known are 2 and 1",
    Problem.SIZE: "blosc header says {decoded} bytes, the chunk shape needs {expected}",
    Problem.STORED_SIZE: "blosc header says {encoded} encoded bytes, got {nbytes} for {decoded} decoded bytes",
    Problem.FLAGS: "blosc header has flags {flags:#04x}, which no known codec or format uses",
    Problem.TYPESIZE: "blosc header says elements of 0 bytes",
    Problem.BLOCKSIZE: "blosc header says blocks of {blocksize} bytes, in a chunk of {decoded} bytes and elements of "
    "{typesize}",
    Problem.TABLE: "blosc header says blocks of {blocksize} bytes, whose offsets do not fit {nbytes} encoded bytes",
    Problem.BLOCK_OFFSET: "a blosc block starts outside the {nbytes} encoded bytes",
    Problem.STREAM_SIZE: "a blosc stream runs past its block or the {nbytes} encoded bytes",
    Problem.OVERLAP: "two blosc blocks overlap",
    Problem.STREAM: "a blosc stream does not decode to its size",
}


@dataclass(frozen=True, slots=True)
class BloscHeader:
    """Fields of a header; sizes in bytes."""

    version: int
    codec_version: int
    flags: int
    typesize: int
    decoded_nbytes: int
    blocksize: int
    encoded_nbytes: int

    @classmethod
    def parse(cls, chunk: bytes | memoryview) -> BloscHeader:
        """Header of a chunk of at least `HEADER_NBYTES` bytes."""
        return cls(*struct.unpack_from("<4B3I", chunk))

    @property
    def codec(self) -> int:
        """Number of the compressor."""
        return self.flags >> 5

    @property
    def is_snappy(self) -> bool:
        """True if a compressor is at work, and it is Snappy."""
        return self.codec == _SNAPPY and not self.is_memcpyed

    @property
    def is_memcpyed(self) -> bool:
        """True if the chunk is the header and the plain bytes."""
        return bool(self.flags & _MEMCPYED)

    @property
    def n_blocks(self) -> int:
        """Blocks, the shorter last one included."""
        return -(-self.decoded_nbytes // self.blocksize)

    @property
    def n_splits(self) -> int:
        """Streams of each block; a last block that is shorter than the others is never split."""
        split = (
            not self.flags & _ONE_STREAM
            and self.typesize <= _MAX_SPLITS
            and self.blocksize // self.typesize >= _MIN_SPLIT_ELEMENTS
        )
        return self.typesize if split else 1

    @property
    def n_streams(self) -> int:
        """Streams of all blocks."""
        whole_blocks, leftover = divmod(self.decoded_nbytes, self.blocksize)
        return whole_blocks * self.n_splits + bool(leftover)


def check_chunk(chunk: bytes | memoryview, expected_nbytes: int) -> Problem:
    """Look at everything a chunk says of itself; the streams are not decoded.

    Parameters
    ----------
    chunk
        All encoded bytes of the chunk, host memory.
    expected_nbytes
        Decoded size that the array's metadata promises, in bytes.
    """
    if len(chunk) < HEADER_NBYTES:
        return Problem.SHORT
    header = BloscHeader.parse(chunk)
    checks = _header_checks(header, len(chunk), expected_nbytes)
    problem = next((problem for is_wrong, problem in checks if is_wrong), Problem.NONE)
    if problem or header.is_memcpyed or header.decoded_nbytes == 0:
        return problem
    return _check_blocks(header, chunk)


def describe(problem: Problem, head: bytes, *, nbytes: int, expected_nbytes: int) -> str:
    """Text of a problem, to stand behind the name of its chunk; "" for `Problem.NONE`.

    Parameters
    ----------
    head
        The first `HEADER_NBYTES` bytes of the chunk, or all of a shorter one.
    nbytes, expected_nbytes
        Its encoded size, and the decoded size its array promises, in bytes.
    """
    header = BloscHeader.parse(head.ljust(HEADER_NBYTES, b"\0"))
    return _TEXTS[problem].format(
        nbytes=nbytes,
        expected=expected_nbytes,
        version=header.version,
        codec_version=header.codec_version,
        flags=header.flags,
        typesize=header.typesize,
        decoded=header.decoded_nbytes,
        blocksize=header.blocksize,
        encoded=header.encoded_nbytes,
    )


def _header_checks(header: BloscHeader, nbytes: int, expected_nbytes: int) -> Iterator[tuple[bool, Problem]]:
    """Whether each thing is wrong, in order: a later check relies on the earlier ones."""
    yield header.version != 2, Problem.VERSION
    yield header.decoded_nbytes != expected_nbytes, Problem.SIZE
    yield header.encoded_nbytes != nbytes, Problem.STORED_SIZE
    yield bool(header.flags & _FUTURE), Problem.FLAGS
    yield header.typesize == 0, Problem.TYPESIZE
    if header.decoded_nbytes == 0:
        return
    yield not 1 <= header.blocksize <= header.decoded_nbytes, Problem.BLOCKSIZE
    if header.is_memcpyed:
        yield nbytes != header.decoded_nbytes + HEADER_NBYTES, Problem.STORED_SIZE
        return
    yield header.codec >= len(_CODECS), Problem.FLAGS
    yield header.codec_version != 1, Problem.VERSION
    yield header.blocksize % header.n_splits != 0, Problem.BLOCKSIZE
    # Each block has an offset, and each stream a size and at least one byte.
    yield 4 * header.n_blocks + 5 * header.n_streams > nbytes - HEADER_NBYTES, Problem.TABLE


def _check_blocks(header: BloscHeader, chunk: bytes | memoryview) -> Problem:
    """Follow the sizes of all streams. Most chunks have so few that a loop costs less than array operations would."""
    n_blocks, n_splits = header.n_blocks, header.n_splits
    starts: tuple[int, ...] = struct.unpack_from(f"<{n_blocks}I", chunk, HEADER_NBYTES)
    if min(starts) < HEADER_NBYTES + 4 * n_blocks or max(starts) >= len(chunk):
        return Problem.BLOCK_OFFSET
    leftover = header.decoded_nbytes % header.blocksize
    blocks = []
    for number, start in enumerate(starts, 1):
        is_leftover = leftover > 0 and number == n_blocks
        splits, nbytes = (1, leftover) if is_leftover else (n_splits, header.blocksize // n_splits)
        end = _streams_end(chunk, start, splits, len(chunk) if header.codec == _SNAPPY else nbytes)
        if end is None:
            return Problem.STREAM_SIZE
        blocks.append((start, end))
    blocks.sort()
    overlap = any(end > start for (_, end), (start, _) in pairwise(blocks))
    return Problem.OVERLAP if overlap else Problem.NONE


def _streams_end(chunk: bytes | memoryview, start: int, n_streams: int, max_nbytes: int) -> int | None:
    """Where the streams of the block at `start` end; None if one has a wrong size or runs past the chunk."""
    end = start
    for _ in range(n_streams):
        if end + 4 > len(chunk):
            return None
        (stored,) = _UINT32.unpack_from(chunk, end)
        end += 4 + stored
        if not 1 <= stored <= max_nbytes or end > len(chunk):
            return None
    return end
