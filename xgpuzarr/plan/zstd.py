"""Where are the frames of a zstd chunk, and what do their headers promise? (RFC 8878, section 3.1)

`ZstdHeaders` reads the frame headers of a whole batch at once; `zstd_frames` walks one chunk from frame to frame by its
block headers. Neither decodes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import CorruptChunkError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAGIC",
    "MAX_BLOCK_NBYTES",
    "MAX_HEADER_NBYTES",
    "SKIPPABLE_MAGIC",
    "SKIPPABLE_MASK",
    "ZstdFrame",
    "ZstdHeaders",
    "little_endian_at",
    "zstd_content_nbytes",
    "zstd_frames",
]

MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC, SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
MAX_HEADER_NBYTES = 18
MAX_BLOCK_NBYTES = 128 << 10  # most that one block decodes to

_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
_DICTIONARY_ID_NBYTES = np.array([0, 1, 2, 4], np.int64)
_CONTENT_SIZE_NBYTES = np.array([0, 2, 4, 8], np.int64)
_RLE, _RESERVED = 1, 3  # types of block


@dataclass(frozen=True, slots=True)
class ZstdFrame:
    """One frame of a zstd chunk.

    Attributes
    ----------
    offset, nbytes
        Where the frame lies in the chunk, in bytes.
    content_nbytes
        Decoded size that the frame states, in bytes; None if it states none. 0 for a skippable frame.
    max_content_nbytes
        Most that its blocks can decode to, in bytes.
    window_nbytes
        How far back its blocks may refer, in bytes.
    has_checksum
        True if the low 4 bytes of XXH64 of the content end the frame.
    dictionary_id
        Dictionary that is needed; 0 for none.
    is_skippable
        True if it holds no content by definition.
    """

    offset: int
    nbytes: int
    content_nbytes: int | None
    max_content_nbytes: int
    window_nbytes: int
    has_checksum: bool
    dictionary_id: int
    is_skippable: bool


def zstd_frames(encoded: bytes | memoryview) -> list[ZstdFrame]:
    """Walk a zstd chunk from frame to frame.

    Raises
    ------
    CorruptChunkError
        A header breaks the format, the chunk ends inside a frame, or it is empty.
    """
    data = memoryview(encoded)
    frames: list[ZstdFrame] = []
    offset = 0
    while offset < len(data):
        frame = _skippable_frame(data, offset) or _frame(data, offset)
        frames.append(frame)
        offset += frame.nbytes
    if not frames:
        raise CorruptChunkError("zstd: no frame in 0 encoded bytes")
    return frames


def zstd_content_nbytes(encoded: bytes | memoryview) -> int | None:
    """Return the decoded size that all frames of a chunk state, in bytes; None if one states none or is damaged."""
    try:
        sizes = [frame.content_nbytes for frame in zstd_frames(encoded)]
    except CorruptChunkError:
        return None
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True, slots=True)
class ZstdHeaders:
    """Frame headers of a batch, as columns of shape (n,) (RFC 8878, section 3.1.1.1).

    Attributes
    ----------
    nbytes
        Size of the header, in bytes, the magic number included.
    content_nbytes, has_content_size
        Decoded size that the frame states, in bytes, and whether it does.
    window_nbytes
        Window size, in bytes; 0 for a frame that is one segment, whose window is its content.
    dictionary_id, has_dictionary_id
        0 means none, stated or not; and whether one is stated.
    has_checksum
        Whether 4 bytes follow the last block.
    is_reserved
        Whether the reserved bit is set, which a decoder must refuse.
    """

    nbytes: NDArray[np.int64]
    content_nbytes: NDArray[np.uint64]
    has_content_size: NDArray[np.bool_]
    window_nbytes: NDArray[np.uint64]
    dictionary_id: NDArray[np.uint64]
    has_dictionary_id: NDArray[np.bool_]
    has_checksum: NDArray[np.bool_]
    is_reserved: NDArray[np.bool_]

    @classmethod
    def parse(cls, heads: NDArray[np.uint8]) -> ZstdHeaders:
        """Read the headers at the start of each row of `heads`, shape (n, >= 18), whatever the bytes hold."""
        descriptor = heads[:, 4].astype(np.int64)
        is_single = (descriptor >> 5 & 1).astype(bool)
        size_flag = descriptor >> 6
        dictionary_nbytes = _DICTIONARY_ID_NBYTES[descriptor & 3]
        size_nbytes = np.where((size_flag == 0) & is_single, 1, _CONTENT_SIZE_NBYTES[size_flag])
        dictionary_at = np.where(is_single, 5, 6)
        size_at = dictionary_at + dictionary_nbytes
        base = np.uint64(1) << ((heads[:, 5] >> 3).astype(np.uint64) + np.uint64(10))
        window = base + base // np.uint64(8) * (heads[:, 5] & 7).astype(np.uint64)
        two_byte_bias = np.where(size_flag == 1, np.uint64(256), np.uint64(0))
        return cls(
            nbytes=size_at + size_nbytes,
            content_nbytes=little_endian_at(heads, size_at, size_nbytes) + two_byte_bias,
            has_content_size=size_nbytes > 0,
            window_nbytes=np.where(is_single, np.uint64(0), window),
            dictionary_id=little_endian_at(heads, dictionary_at, dictionary_nbytes),
            has_dictionary_id=dictionary_nbytes > 0,
            has_checksum=(descriptor & 4).astype(bool),
            is_reserved=(descriptor & 8).astype(bool),
        )


def little_endian_at(rows: NDArray[np.uint8], start: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Read one little-endian integer a row, each with its own place and its own length of 0 to 8 bytes."""
    n, width = rows.shape
    padded = np.zeros((n, width + 8), np.uint8)  # so that 8 bytes can be read from every place
    padded[:, :width] = rows
    # every 8 bytes of a row as one overlapping integer; picking one a row beats picking 8 bytes
    windows = np.ndarray((n, width + 1), "<u8", padded, strides=(width + 8, 1))
    picked: NDArray[np.uint64] = windows[np.arange(n), np.minimum(start, width)].astype(np.uint64)
    return picked & _LOW_BYTES[count]


def _skippable_frame(data: memoryview, offset: int) -> ZstdFrame | None:
    if int.from_bytes(data[offset : offset + 4], "little") & SKIPPABLE_MASK != SKIPPABLE_MAGIC:
        return None
    nbytes = 8 + int.from_bytes(data[offset + 4 : offset + 8], "little")
    if offset + nbytes > len(data):
        raise CorruptChunkError(f"zstd: skippable frame at byte {offset} runs past {len(data)} encoded bytes")
    return ZstdFrame(offset, nbytes, 0, 0, 0, has_checksum=False, dictionary_id=0, is_skippable=True)


def _frame(data: memoryview, offset: int) -> ZstdFrame:
    head = bytes(data[offset : offset + MAX_HEADER_NBYTES])
    if int.from_bytes(head[:4], "little") != MAGIC:
        raise CorruptChunkError(f"zstd: no frame at byte {offset} of {len(data)}, got {head[:4].hex(' ')}")
    header = ZstdHeaders.parse(np.frombuffer(head.ljust(MAX_HEADER_NBYTES, b"\0"), np.uint8)[None])
    header_nbytes = int(header.nbytes[0])
    if header.is_reserved[0] or len(head) < header_nbytes:
        raise CorruptChunkError(f"zstd: frame header at byte {offset} breaks the format, got {head.hex(' ')}")
    content = int(header.content_nbytes[0]) if header.has_content_size[0] else None
    window = int(header.window_nbytes[0]) or content or 0
    has_checksum = bool(header.has_checksum[0])
    end, max_content = _walk_blocks(data, offset + header_nbytes, min(window, MAX_BLOCK_NBYTES))
    end += 4 if has_checksum else 0
    if end > len(data):
        raise CorruptChunkError(f"zstd: frame at byte {offset} runs past {len(data)} encoded bytes")
    dictionary_id = int(header.dictionary_id[0])
    return ZstdFrame(
        offset, end - offset, content, max_content, window, has_checksum, dictionary_id, is_skippable=False
    )


def _walk_blocks(data: memoryview, offset: int, max_block_nbytes: int) -> tuple[int, int]:
    """Return where the last block ends and the most that all can decode to, in bytes (RFC 8878, section 3.1.1.2)."""
    max_content = 0
    is_last = False
    while not is_last:
        header = int.from_bytes(data[offset : offset + 3], "little")
        is_last, block_type, size = bool(header & 1), header >> 1 & 3, header >> 3
        stored = 1 if block_type == _RLE else size
        if offset + 3 + stored > len(data):
            raise CorruptChunkError(f"zstd: block at byte {offset} runs past {len(data)} encoded bytes")
        if block_type == _RESERVED or size > max_block_nbytes:
            raise CorruptChunkError(
                f"zstd: block at byte {offset} breaks the format, got type {block_type} and {size} bytes where a block "
                f"has at most {max_block_nbytes}"
            )
        # raw and repeated bytes have a known size, compressed ones only a limit
        max_content += size if block_type <= _RLE else max_block_nbytes
        offset += 3 + stored
    return offset, max_content
