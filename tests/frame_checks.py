"""A second opinion on the checks of ``frames.cu``, written another way: on arrays, from the ends of the chunks alone.

Formats: RFC 8878 (Zstandard), RFC 1952 (gzip), RFC 1950 (zlib), RFC 1951 (deflate), lz4's ``lz4_Block_format.md``
behind the 4-byte little-endian size that numcodecs puts before it, and snappy's ``format_description.txt``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.plan import zstd
from xgpuzarr.plan.frames import Problem
from xgpuzarr.plan.zstd import ZstdHeaders, little_endian_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

HEAD_NBYTES = 64
TAIL_NBYTES = 8

# Most decoded bytes that one encoded byte can stand for: fewer encoded bytes than that were cut short.
_LZ4_MAX_RATIO = 255  # a length byte adds at most 255
_DEFLATE_MAX_RATIO = 1032  # 2 bits, one for a length and one for a distance, give 258 bytes
_SNAPPY_MAX_RATIO = 22  # 3 bytes copy 64

_GZIP_OPTIONAL_FIELDS = 0x1E  # FHCRC, FEXTRA, FNAME, FCOMMENT
_GZIP_RESERVED = 0xE0


def is_corrupt(problems: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Say of each chunk whether it cannot be valid, whatever the bytes that were not looked at."""
    return (problems > Problem.NONE) & (problems < Problem.DICTIONARY)


def ends(chunks: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """First and last bytes of each chunk, and its size: what `check_frames` takes."""
    heads = np.zeros((len(chunks), HEAD_NBYTES), np.uint8)
    tails = np.zeros((len(chunks), TAIL_NBYTES), np.uint8)
    for row, chunk in enumerate(chunks):
        head, tail = chunk[:HEAD_NBYTES], chunk[-TAIL_NBYTES:]
        heads[row, : len(head)] = np.frombuffer(head, np.uint8)
        tails[row, TAIL_NBYTES - len(tail) :] = np.frombuffer(tail, np.uint8)
    return heads, tails, np.array([len(chunk) for chunk in chunks], np.int64)


def check_frames(
    codec: str,
    heads: NDArray[np.uint8],
    tails: NDArray[np.uint8],
    nbytes: NDArray[np.int64],
    expected_nbytes: int,
) -> NDArray[np.uint8]:
    """Check the ends of a batch of encoded chunks against what they should decode to.

    Parameters
    ----------
    codec
        "zstd", "lz4" (numcodecs' framing), "gzip", "zlib", "deflate" (raw) or "snappy" (raw).
    heads
        First bytes of each chunk, shape (n, HEAD_NBYTES), host memory; zeros behind the end of a shorter chunk.
    tails
        Last bytes of each chunk, shape (n, TAIL_NBYTES); zeros before the start of a shorter chunk.
    nbytes
        Encoded size of each chunk, in bytes, shape (n,).
    expected_nbytes
        Decoded size of every chunk, in bytes; at least 1.

    Returns
    -------
    NDArray[np.uint8]
        A `Problem` for each chunk, shape (n,).
    """
    return _CHECKS[codec](heads, tails, nbytes, expected_nbytes)


def _check_zstd(
    heads: NDArray[np.uint8], _tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    magic = _little_endian(heads, 0, 4)
    header = ZstdHeaders.parse(heads)
    block = little_endian_at(heads, header.nbytes, np.full(len(heads), 3)).astype(np.int64)
    block_type, block_nbytes = block >> 1 & 3, block >> 3
    block_stored = np.where(block_type == 1, 1, block_nbytes)  # one byte, repeated
    room = nbytes - header.nbytes - 3 - 4 * header.has_checksum
    content = header.content_nbytes
    return _first_problem(
        (nbytes < 8, Problem.TOO_SHORT),
        ((magic & np.uint64(zstd.SKIPPABLE_MASK)) == zstd.SKIPPABLE_MAGIC, Problem.MORE_FRAMES),
        (magic != zstd.MAGIC, Problem.MAGIC),
        (header.is_reserved, Problem.HEADER),
        (header.has_content_size & (content > expected), Problem.SIZE),
        (room < 0, Problem.TOO_SHORT),
        ((block_type == 3) | (block_stored > room) | (block_nbytes > zstd.MAX_BLOCK_NBYTES), Problem.BLOCK),
        # nvCOMP 6.0.0 ends the CUDA context on a header with this field, even if it says 0: no dictionary
        (header.has_dictionary_id, Problem.DICTIONARY),
        (~header.has_content_size, Problem.SIZE_UNKNOWN),
        (content < expected, Problem.MORE_FRAMES),
    )


def _check_lz4(
    heads: NDArray[np.uint8], _tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    return _first_problem(
        (nbytes < 5, Problem.TOO_SHORT),
        (_little_endian(heads, 0, 4) != expected, Problem.SIZE),
        ((nbytes - 4) * _LZ4_MAX_RATIO < expected, Problem.TOO_SHORT),
    )


def _check_gzip(
    heads: NDArray[np.uint8], tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    flags = heads[:, 3]
    return _first_problem(
        (nbytes < 18, Problem.TOO_SHORT),
        (_little_endian(heads, 0, 2) != 0x8B1F, Problem.MAGIC),
        ((heads[:, 2] != 8) | (flags & _GZIP_RESERVED != 0), Problem.HEADER),
        ((nbytes - 18) * _DEFLATE_MAX_RATIO < expected, Problem.TOO_SHORT),
        # behind optional fields the first block may lie past what is at hand
        ((flags & _GZIP_OPTIONAL_FIELDS == 0) & _deflate_block_is_wrong(heads[:, 10:], nbytes - 18), Problem.BLOCK),
        # the trailer tells only of the last member, and zeros may follow it
        (_little_endian(tails, TAIL_NBYTES - 4, 4) != expected % 2**32, Problem.MORE_FRAMES),
    )


def _check_zlib(
    heads: NDArray[np.uint8], _tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    method, flags = heads[:, 0].astype(np.int64), heads[:, 1].astype(np.int64)
    return _first_problem(
        (nbytes < 8, Problem.TOO_SHORT),
        ((method & 15 != 8) | (method >> 4 > 7) | ((method * 256 + flags) % 31 != 0), Problem.HEADER),
        ((nbytes - 6) * _DEFLATE_MAX_RATIO < expected, Problem.TOO_SHORT),
        (flags & 0x20 != 0, Problem.DICTIONARY),
        (_deflate_block_is_wrong(heads[:, 2:], nbytes - 6), Problem.BLOCK),
    )


def _check_deflate(
    heads: NDArray[np.uint8], _tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    return _first_problem(
        ((nbytes < 2) | (nbytes * _DEFLATE_MAX_RATIO < expected), Problem.TOO_SHORT),
        (_deflate_block_is_wrong(heads, nbytes), Problem.BLOCK),
    )


def _check_snappy(
    heads: NDArray[np.uint8], _tails: NDArray[np.uint8], nbytes: NDArray[np.int64], expected: int
) -> NDArray[np.uint8]:
    stated, length = _snappy_preamble(heads)
    return _first_problem(
        (nbytes < 2, Problem.TOO_SHORT),
        (length > 5, Problem.HEADER),
        (stated != expected, Problem.SIZE),
        ((nbytes - length) * _SNAPPY_MAX_RATIO < expected, Problem.TOO_SHORT),
    )


_CHECKS: dict[str, Callable[[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64], int], NDArray[np.uint8]]] = {
    "zstd": _check_zstd,
    "lz4": _check_lz4,
    "gzip": _check_gzip,
    "zlib": _check_zlib,
    "deflate": _check_deflate,
    "snappy": _check_snappy,
}


def _deflate_block_is_wrong(heads: NDArray[np.uint8], nbytes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say of each raw deflate stream whether its first block cannot be one (RFC 1951, section 3.2.3)."""
    block_type = heads[:, 0] >> 1 & 3
    stored = _little_endian(heads, 1, 2).astype(np.int64)
    complement = _little_endian(heads, 3, 2).astype(np.int64)
    is_wrong: NDArray[np.bool_] = (block_type == 3) | (
        (block_type == 0) & ((stored ^ complement != 0xFFFF) | (stored + 5 > nbytes))
    )
    return is_wrong


def _snappy_preamble(heads: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the decoded size that starts each chunk, 7 bits a byte, and the bytes it takes; 6 for more than 5."""
    goes_on = heads[:, :6] >= 0x80
    goes_on[:, 5] = False
    length = goes_on.argmin(axis=1).astype(np.int64) + 1
    groups = (heads[:, :5] & 0x7F).astype(np.uint64) << (np.arange(5, dtype=np.uint64) * np.uint64(7))
    return np.where(np.arange(5) < length[:, None], groups, np.uint64(0)).sum(axis=1, dtype=np.uint64), length


def _first_problem(*cases: tuple[NDArray[np.bool_], Problem]) -> NDArray[np.uint8]:
    return np.select([mask for mask, _ in cases], [np.uint8(problem) for _, problem in cases], np.uint8(0))


def _little_endian(rows: NDArray[np.uint8], start: int, count: int) -> NDArray[np.uint64]:
    n = len(rows)
    return little_endian_at(rows, np.full(n, start), np.full(n, count))
