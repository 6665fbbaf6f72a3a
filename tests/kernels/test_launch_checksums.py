"""Checksum kernels against zlib, google-crc32c, numcodecs and xxHash's own test vectors."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
from numcodecs import Fletcher32, zstd

from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels import launch, launch_checksums

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

SIZES = [0, 1, 2, 3, 7, 8, 31, 32, 33, 1023, 1024, 1025, 4096, 65_535, 100_001]
CONTENTS = {
    "random": lambda n: np.random.default_rng(n).bytes(n),
    "zeros": bytes,
    "ones": lambda n: b"\xff" * n,  # words that are the modulus of Fletcher-32
}


def fletcher32_of(data: bytes) -> int:
    if not data:
        return 0
    return int.from_bytes(bytes(Fletcher32().encode(np.frombuffer(data, np.uint8)))[-4:], "little")


def xxh64_low_of(data: bytes) -> int:
    """Zstandard's content checksum."""
    frame = bytes(zstd.compress(data, 1, checksum=True))
    return int.from_bytes(frame[-4:], "little")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("name", "reference", "mask"),
    [
        ("adler32", zlib.adler32, 2**32 - 1),
        ("crc32", zlib.crc32, 2**32 - 1),
        ("crc32c", google_crc32c.value, 2**32 - 1),
        ("fletcher32", fletcher32_of, 2**32 - 1),
        ("xxh64", xxh64_low_of, 2**32 - 1),
    ],
)
def test_checksums_of_ranges_at_any_offset(
    xp: Any, to_numpy: ToNumpy, content: str, name: str, reference: Callable[[bytes], int], mask: int
) -> None:
    parts = [CONTENTS[content](n) for n in SIZES]
    nbytes = np.array(SIZES, dtype=np.int64)
    offset = np.cumsum(nbytes + 3) - nbytes
    buffer = np.frombuffer(b"".join(b"\x5a" * 3 + part for part in parts), np.uint8)
    status = launch.new_status()
    found = to_numpy(getattr(launch_checksums, name)(xp.asarray(buffer), offset, nbytes, status=status))
    launch.check_status(status, name)
    assert [int(value) & mask for value in found] == [reference(part) for part in parts]


@pytest.mark.parametrize("name", launch_checksums.__all__)
def test_a_range_outside_the_buffer_is_reported(xp: Any, name: str) -> None:
    checksum = getattr(launch_checksums, name)
    for offset, nbytes in [(0, 11), (-1, 4), (9, 2), (2**62, 2**62)]:
        status = launch.new_status()
        checksum(
            xp.asarray(np.zeros(10, np.uint8)),
            np.array([offset], np.int64),
            np.array([nbytes], np.int64),
            status=status,
        )
        with pytest.raises(XGpuZarrError, match="outside its buffer"):
            launch.check_status(status, name)


@pytest.mark.parametrize("name", launch_checksums.__all__)
def test_no_ranges_have_no_checksums(xp: Any, name: str) -> None:
    none = np.zeros(0, np.int64)
    found = getattr(launch_checksums, name)(xp.asarray(np.zeros(4, np.uint8)), none, none, status=launch.new_status())
    assert found.shape == (0,)
