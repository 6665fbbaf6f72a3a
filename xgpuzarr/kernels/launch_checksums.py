"""What are the checksums of byte ranges on the device, and are they the stored ones? Launchers of ``checksums.cu``.

=====================================  =========================================================================
`adler32`, `crc32`, `crc32c`,          one number a range
`fletcher32`
`compare`                              which of them differ from those stored
`check_zstd_contents`                  which Zstandard frames state another checksum of their content than it has
=====================================  =========================================================================

Everything is on the device, ready on the current stream. The rules of `xgpuzarr.kernels.launch` hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import check_bytes, device_columns, launch_items
from xgpuzarr.kernels.compile import device_constant

if TYPE_CHECKING:
    import cupy
    from numpy.typing import NDArray

    from xgpuzarr.kernels.arguments import Column

__all__ = ["adler32", "check_zstd_contents", "compare", "crc32", "crc32c", "fletcher32"]

_SOURCE = "checksums.cu"
_SEGMENT_NBYTES = 1024  # SEGMENT_NBYTES of the source
_ADLER_MODULUS = 65521
_FLETCHER_MODULUS = 65535
_CRC32_POLYNOMIAL = 0xEDB88320
_CRC32C_POLYNOMIAL = 0x82F63B78


def adler32(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """Adler-32 (RFC 1950) of each range.

    Parameters
    ----------
    buffer
        Contiguous bytes, uint8, on the device.
    offset, nbytes
        int64 ``(n,)``: the ranges in `buffer`, in bytes.
    status
        From `xgpuzarr.kernels.launch.new_status`.

    Returns
    -------
    cupy.ndarray
        uint32 ``(n,)``.
    """
    return _weighted_sums(buffer, offset, nbytes, word_nbytes=1, modulus=_ADLER_MODULUS, status=status)


def fletcher32(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """Fletcher-32 as HDF5 and numcodecs compute it, of each range; arguments and result as in `adler32`."""
    return _weighted_sums(buffer, offset, nbytes, word_nbytes=2, modulus=_FLETCHER_MODULUS, status=status)


def crc32(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """CRC-32 (RFC 1952) of each range; arguments and result as in `adler32`."""
    return _crc(buffer, offset, nbytes, _CRC32_POLYNOMIAL, status)


def crc32c(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """CRC-32C (RFC 3720) of each range; arguments and result as in `adler32`."""
    return _crc(buffer, offset, nbytes, _CRC32C_POLYNOMIAL, status)


def compare(
    found: cupy.ndarray,
    buffer: cupy.ndarray,
    stored_at: Column,
    *,
    skip: cupy.ndarray,
    code: int,
    problem: cupy.ndarray,
    is_big_endian: bool = False,
    chunk: Column | None = None,
) -> None:
    """Note which checksums are not those stored.

    Parameters
    ----------
    found
        uint32 ``(n,)``: the checksums of some ranges.
    buffer
        Contiguous bytes, uint8, on the device.
    stored_at
        int64 ``(n,)``: where in `buffer` the four bytes lie that should be those checksums. Where that is outside, they
        differ.
    skip
        int32 ``(n,)``: ranges with another number than 0 are not looked at.
    code
        What to store in `problem`, other than 0.
    problem
        int32 ``(n_chunks,)``: the chunk of a range with another checksum gets `code`, others stay. May be `skip`.
    is_big_endian
        Byte order of what is stored; little-endian by default.
    chunk
        int64 ``(n,)``: the chunk of each range; by default range r is of chunk r.
    """
    check_bytes(buffer, "buffer")
    n = len(found)
    launch_items(
        _SOURCE,
        "compare_checksums",
        n,
        128,
        found,
        buffer,
        buffer.nbytes,
        *device_columns(n, stored_at),
        np.int32(is_big_endian),
        skip,
        *(device_columns(n, chunk) if chunk is not None else [None]),
        n,
        np.int32(code),
        problem,
        problem.size,
    )


def check_zstd_contents(
    encoded: cupy.ndarray,
    frame_offset: Column,
    frame_nbytes: Column,
    decoded: cupy.ndarray,
    offset: Column,
    nbytes: Column,
    *,
    code: int,
    problem: cupy.ndarray,
    status: cupy.ndarray,
) -> None:
    """Note which Zstandard frames do not hold the content that their checksum is of (RFC 8878, section 3.1.1).

    Frames that state no checksum are not looked at.

    Parameters
    ----------
    encoded, decoded
        Contiguous bytes, uint8, on the device.
    frame_offset, frame_nbytes
        int64 ``(n,)``: where each frame lies in `encoded`, in bytes. It ends with its checksum, if it has one.
    offset, nbytes
        int64 ``(n,)``: where its content lies in `decoded`.
    code
        What to store in `problem`, other than 0.
    problem
        int32 ``(n,)``: gets `code` where the checksums differ. Frames with a problem already are not looked at.
    status
        From `xgpuzarr.kernels.launch.new_status`.
    """
    check_bytes(encoded, "encoded")
    check_bytes(decoded, "decoded")
    n = len(problem)
    frame_offset, frame_nbytes, offset, nbytes = device_columns(n, frame_offset, frame_nbytes, offset, nbytes)
    launch_items(
        _SOURCE,
        "check_zstd_contents",
        n,
        32,
        encoded,
        encoded.nbytes,
        frame_offset,
        frame_nbytes,
        decoded,
        decoded.nbytes,
        offset,
        nbytes,
        n,
        np.int32(code),
        problem,
        status,
    )


def _weighted_sums(
    buffer: cupy.ndarray, offset: Column, nbytes: Column, *, word_nbytes: int, modulus: int, status: cupy.ndarray
) -> cupy.ndarray:
    """Sum of words and sum of words weighted from the end, of each range, joined: uint32 (n,)."""
    import cupy

    check_bytes(buffer, "buffer")
    n = len(offset)
    offset, nbytes = device_columns(n, offset, nbytes)
    sums, joined = cupy.zeros((n, 2), dtype=np.uint64), cupy.empty(n, dtype=np.uint32)
    n_segments, words = _segments(buffer, n), (np.int32(word_nbytes), np.uint32(modulus))
    ranges = (buffer, buffer.nbytes, offset, nbytes, n, n_segments)
    launch_items(_SOURCE, "weighted_sums", n * n_segments, 128, *ranges, *words, sums, status)
    launch_items(_SOURCE, "join_sums", n, 128, sums, nbytes, n, *words, joined)
    return joined


def _crc(buffer: cupy.ndarray, offset: Column, nbytes: Column, polynomial: int, status: cupy.ndarray) -> cupy.ndarray:
    import cupy

    check_bytes(buffer, "buffer")
    n = len(offset)
    remainders = cupy.zeros(n, dtype=np.uint32)
    powers = device_constant(f"powers of {polynomial}", lambda: _shift_powers(polynomial))
    n_segments = _segments(buffer, n)
    ranges = (buffer, buffer.nbytes, *device_columns(n, offset, nbytes), n, n_segments)
    table = (np.uint32(polynomial), powers, powers.size)
    launch_items(_SOURCE, "crc_remainders", n * n_segments, 128, *ranges, *table, remainders, status)
    return remainders


def _shift_powers(polynomial: int) -> NDArray[np.uint32]:
    """x to the power 8 * 2^k modulo a reflected polynomial, for every k that a 63-bit size can need."""

    def multiply(a: int, b: int) -> int:
        product = 0
        for bit in range(31, -1, -1):
            if a >> bit & 1:
                product ^= b
            b = b >> 1 ^ (polynomial if b & 1 else 0)
        return product

    powers = [1 << 31 - 8]
    while len(powers) < 63:
        powers.append(multiply(powers[-1], powers[-1]))
    return np.array(powers, dtype=np.uint32)


def _segments(buffer: cupy.ndarray, n: int) -> int:
    """Threads a range, if the ranges fill the buffer evenly; more segments than that are done in turn."""
    return int(max(1, -(-buffer.nbytes // (max(n, 1) * _SEGMENT_NBYTES))))
