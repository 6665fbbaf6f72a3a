"""What are the checksums of many byte ranges on the device? The launchers of ``checksums.cu``.

All take a buffer and the ranges in it, and return one number a range, on the device, ready on the current stream; the
caller compares them with what is stored. The rules of `xgpuzarr.kernels.launch` hold.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import check_bytes, device_column, launch
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = ["adler32", "crc32", "crc32c", "fletcher32", "xxh64"]

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
    sums = _weighted_sums(buffer, offset, nbytes, word_nbytes=1, modulus=_ADLER_MODULUS, status=status)
    low = (sums[:, 0] + 1) % _ADLER_MODULUS
    high = (sums[:, 1] + device_column(nbytes, (len(nbytes),)).astype(np.uint64)) % _ADLER_MODULUS
    return (high << 16 | low).astype(np.uint32)


def fletcher32(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """Fletcher-32 as HDF5 and numcodecs compute it, of each range; arguments and result as in `adler32`."""
    import cupy

    sums = _weighted_sums(buffer, offset, nbytes, word_nbytes=2, modulus=_FLETCHER_MODULUS, status=status)
    # Carries are folded back, so a multiple of the modulus shows as the modulus, unless all words are zero.
    folded = cupy.where(sums == 0, np.uint64(0), (sums + _FLETCHER_MODULUS - 1) % _FLETCHER_MODULUS + 1)
    return (folded[:, 1] << 16 | folded[:, 0]).astype(np.uint32)


def crc32(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """CRC-32 (RFC 1952) of each range; arguments and result as in `adler32`."""
    return _crc(buffer, offset, nbytes, _CRC32_POLYNOMIAL, status)


def crc32c(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """CRC-32C (RFC 3720) of each range; arguments and result as in `adler32`."""
    return _crc(buffer, offset, nbytes, _CRC32C_POLYNOMIAL, status)


def xxh64(buffer: cupy.ndarray, offset: Column, nbytes: Column, *, status: cupy.ndarray) -> cupy.ndarray:
    """XXH64 with seed 0 of each range, uint64; arguments as in `adler32`.

    The content checksum of a Zstandard frame is its lower 32 bits (RFC 8878, section 3.1.1). One thread does a range.
    """
    import cupy

    check_bytes(buffer, "buffer")
    n = len(offset)
    hashes = cupy.zeros(n, dtype=np.uint64)
    if n:
        launch(
            kernel_function(_SOURCE, "xxh64_hashes"),
            -(-n // 32),
            32,
            buffer,
            np.int64(buffer.nbytes),
            device_column(offset, (n,)),
            device_column(nbytes, (n,)),
            np.int64(n),
            hashes,
            status,
        )
    return hashes


def _weighted_sums(
    buffer: cupy.ndarray, offset: Column, nbytes: Column, *, word_nbytes: int, modulus: int, status: cupy.ndarray
) -> cupy.ndarray:
    """Sum of words and sum of words weighted from the end, of each range: uint64 (n, 2), not yet reduced."""
    import cupy

    check_bytes(buffer, "buffer")
    n = len(offset)
    sums = cupy.zeros((n, 2), dtype=np.uint64)
    if n:
        n_segments = _segments(buffer, n)
        launch(
            kernel_function(_SOURCE, "weighted_sums"),
            -(-n * n_segments // 128),
            128,
            buffer,
            np.int64(buffer.nbytes),
            device_column(offset, (n,)),
            device_column(nbytes, (n,)),
            np.int64(n),
            np.int64(n_segments),
            np.int32(word_nbytes),
            np.uint32(modulus),
            sums,
            status,
        )
    return sums


def _crc(buffer: cupy.ndarray, offset: Column, nbytes: Column, polynomial: int, status: cupy.ndarray) -> cupy.ndarray:
    import cupy

    check_bytes(buffer, "buffer")
    n = len(offset)
    remainders = cupy.zeros(n, dtype=np.uint32)
    powers = cupy.asarray(np.array(_shift_powers(polynomial), dtype=np.uint32))
    if n:
        n_segments = _segments(buffer, n)
        launch(
            kernel_function(_SOURCE, "crc_remainders"),
            -(-n * n_segments // 128),
            128,
            buffer,
            np.int64(buffer.nbytes),
            device_column(offset, (n,)),
            device_column(nbytes, (n,)),
            np.int64(n),
            np.int64(n_segments),
            np.uint32(polynomial),
            powers,
            np.int64(powers.size),
            remainders,
            status,
        )
    is_empty = device_column(nbytes, (n,)) == 0
    return cupy.where(is_empty, np.uint32(0), ~remainders)


@cache
def _shift_powers(polynomial: int) -> tuple[int, ...]:
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
    return tuple(powers)


def _segments(buffer: cupy.ndarray, n: int) -> int:
    """Threads a range, if the ranges fill the buffer evenly; more segments than that are done in turn."""
    return int(max(1, -(-buffer.nbytes // (n * _SEGMENT_NBYTES))))
