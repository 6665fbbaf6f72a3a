"""Zstd chunks that numcodecs does not write: other frame headers around its blocks (RFC 8878, section 3.1.1.1)."""

from __future__ import annotations

from numcodecs import Zstd

SIZE_FLAGS = {0: 0, 1: 0, 2: 1, 4: 2, 8: 3}
DICTIONARY_FLAGS = {0: 0, 1: 1, 2: 2, 4: 3}


def zstd_frame(
    content: bytes,
    *,
    level: int = 1,
    checksum: bool = False,
    window_log: int | None = None,
    size_nbytes: int = 8,
    dictionary_id: tuple[int, int] = (0, 0),
) -> bytes:
    """One frame of `content`.

    Parameters
    ----------
    window_log
        Logarithm of the window that the header states; None makes the frame a single segment.
    size_nbytes
        Bytes that state the decoded size: 0 (only with a window), 1 (only without), 2, 4 or 8.
    dictionary_id
        The id, and the bytes that state it.
    """
    encoded = bytes(Zstd(level, checksum).encode(content))
    descriptor = (
        SIZE_FLAGS[size_nbytes] << 6 | (window_log is None) << 5 | checksum << 2 | DICTIONARY_FLAGS[dictionary_id[1]]
    )
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    stated = len(content) - (256 if size_nbytes == 2 else 0)
    return b"".join(
        [
            encoded[:4],
            bytes([descriptor]),
            window,
            dictionary_id[0].to_bytes(dictionary_id[1], "little"),
            stated.to_bytes(size_nbytes, "little") if size_nbytes else b"",
            encoded[_header_nbytes(encoded) :],
        ]
    )


def skippable_frame(payload: bytes, number: int = 0) -> bytes:
    return (0x184D2A50 + number).to_bytes(4, "little") + len(payload).to_bytes(4, "little") + payload


def _header_nbytes(encoded: bytes) -> int:
    is_single = encoded[4] >> 5 & 1
    return 6 - is_single + [is_single, 2, 4, 8][encoded[4] >> 6]
