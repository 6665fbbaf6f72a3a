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

CHECKSUMS = ["adler32", "crc32", "crc32c", "fletcher32"]
SIZES = [0, 1, 2, 3, 7, 8, 31, 32, 33, 1023, 1024, 1025, 4096, 65_535, 100_001]
CONTENTS = {
    "random": lambda n: np.random.default_rng(n).bytes(n),
    "zeros": bytes,
    "ones": lambda n: b"\xff" * n,  # words that are the modulus of Fletcher-32
}


def joined(parts: list[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Parts in one buffer, at no alignment, and where each lies."""
    nbytes = np.array([len(part) for part in parts], dtype=np.int64)
    return (
        np.frombuffer(b"".join(b"\x5a" * 3 + part for part in parts), np.uint8),
        np.cumsum(nbytes + 3) - nbytes,
        nbytes,
    )


def fletcher32_of(data: bytes) -> int:
    if not data:
        return 0
    return int.from_bytes(bytes(Fletcher32().encode(np.frombuffer(data, np.uint8)))[-4:], "little")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adler32", zlib.adler32),
        ("crc32", zlib.crc32),
        ("crc32c", google_crc32c.value),
        ("fletcher32", fletcher32_of),
    ],
)
def test_checksums_of_ranges_at_any_offset(
    xp: Any, to_numpy: ToNumpy, content: str, name: str, reference: Callable[[bytes], int]
) -> None:
    parts = [CONTENTS[content](n) for n in SIZES]
    buffer, offset, nbytes = joined(parts)
    status = launch.new_status()
    found = to_numpy(getattr(launch_checksums, name)(xp.asarray(buffer), offset, nbytes, status=status))
    launch.check_status(status, name)
    assert found.dtype == np.uint32
    assert found.tolist() == [reference(part) for part in parts]


@pytest.mark.parametrize("name", CHECKSUMS)
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


@pytest.mark.parametrize("name", CHECKSUMS)
def test_no_ranges_have_no_checksums(xp: Any, name: str) -> None:
    none = np.zeros(0, np.int64)
    found = getattr(launch_checksums, name)(xp.asarray(np.zeros(4, np.uint8)), none, none, status=launch.new_status())
    assert found.shape == (0,)


def zeros(xp: Any, n: int) -> Any:
    return xp.asarray(np.zeros(n, np.int32))


@pytest.mark.parametrize("is_big_endian", [False, True])
def test_checksums_are_compared_with_those_stored(xp: Any, to_numpy: ToNumpy, is_big_endian: bool) -> None:
    found = np.array([0x01020304, 0xF0000001, 7, 7, 0, 0], np.uint32)
    stored = found.astype(">u4" if is_big_endian else "<u4").tobytes()
    buffer = np.frombuffer(b"?" + stored[:8] + b"\1" + stored[9:], np.uint8)
    at = np.array([1, 5, 9, 9, 22, -1])  # the last two reach out of the buffer
    problem, skip = zeros(xp, 6), xp.asarray(np.array([0, 0, 0, 2, 0, 0], np.int32))
    launch_checksums.compare(
        xp.asarray(found), xp.asarray(buffer), at, is_big_endian=is_big_endian, skip=skip, code=9, problem=problem
    )
    assert to_numpy(problem).tolist() == [0, 0, 9, 0, 9, 9]


def test_a_range_with_another_checksum_is_noted_for_its_chunk(xp: Any, to_numpy: ToNumpy) -> None:
    buffer, found = np.zeros(4, np.uint8), np.array([0, 1, 1, 1], np.uint32)
    problem = zeros(xp, 3)
    launch_checksums.compare(
        xp.asarray(found), xp.asarray(buffer), np.zeros(4, np.int64), skip=zeros(xp, 4), code=9, problem=problem,
        chunk=np.array([0, 2, 2, 3]),
    )  # fmt: skip
    assert to_numpy(problem).tolist() == [0, 0, 9]


def check_contents(xp: Any, frames: list[bytes], contents: list[bytes], *, problem: Any = None) -> list[int]:
    """Problems of frames whose contents were decoded to a buffer."""
    frames_in, contents_in = joined(frames), joined(contents)
    problem = zeros(xp, len(frames)) if problem is None else xp.asarray(np.array(problem, np.int32))
    status = launch.new_status()
    launch_checksums.check_zstd_contents(
        xp.asarray(frames_in[0]), *frames_in[1:], xp.asarray(contents_in[0]), *contents_in[1:],
        code=9, problem=problem, status=status,
    )  # fmt: skip
    launch.check_status(status, "contents")
    return [int(number) for number in problem.tolist()]


@pytest.mark.parametrize("content", CONTENTS)
def test_the_content_of_a_zstd_frame_is_compared_with_its_checksum(xp: Any, content: str) -> None:
    contents = [CONTENTS[content](n) for n in SIZES if n]
    sound = [bytes(zstd.compress(part, 1, checksum=True)) for part in contents]
    assert check_contents(xp, sound, contents) == [0] * len(contents)
    others = [part[:-1] + bytes([part[-1] ^ 0x80]) for part in contents]
    assert check_contents(xp, sound, others) == [9] * len(contents)
    stated = [frame[:-1] + bytes([frame[-1] ^ 1]) for frame in sound]
    assert check_contents(xp, stated, contents) == [9] * len(contents)


def test_each_zstd_frame_says_itself_whether_it_has_a_checksum(xp: Any) -> None:
    has_one = [True, False, False, True, True]
    frames = [bytes(zstd.compress(b"content", 1, checksum=checksum)) for checksum in has_one]
    assert check_contents(xp, frames, [b"another"] * 5, problem=[0, 0, 5, 0, 5]) == [9, 0, 5, 9, 5]


def test_a_content_outside_the_buffer_is_reported(xp: Any) -> None:
    frame = np.frombuffer(bytes(zstd.compress(b"content", 1, checksum=True)), np.uint8)
    for offset, nbytes in [(0, 11), (-1, 4), (2**62, 2**62)]:
        status = launch.new_status()
        launch_checksums.check_zstd_contents(
            xp.asarray(frame), np.array([0]), np.array([len(frame)]), xp.asarray(np.zeros(10, np.uint8)),
            np.array([offset]), np.array([nbytes]), code=9, problem=zeros(xp, 1), status=status,
        )  # fmt: skip
        with pytest.raises(XGpuZarrError, match="outside its buffer"):
            launch.check_status(status, "contents")
