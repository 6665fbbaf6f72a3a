"""Host decoders fill a chunk exactly, or say what is wrong with its bytes; they never make more than fits."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import TYPE_CHECKING

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.decoders.host import decode_into
from xgpuzarr.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = np.random.default_rng(0).integers(0, 50, 3000, np.uint8).tobytes()
ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda data: bytes(numcodecs.Zstd(1).encode(data)),
    "lz4": lambda data: bytes(numcodecs.LZ4().encode(data)),
    "blosc": lambda data: bytes(numcodecs.Blosc("zstd").encode(data)),
    "gzip": lambda data: gzip.compress(data, 5),
    "zlib": lambda data: zlib.compress(data, 5),
}


def decode(codec: str, encoded: bytes, nbytes: int = len(CONTENT)) -> tuple[str, bytes]:
    """Problem, and what lies in a buffer of `nbytes` bytes; the bytes behind it are not touched."""
    room = np.full(nbytes + 64, 0xA5, np.uint8)
    problem = decode_into(codec, memoryview(encoded), room[:nbytes])
    assert (room[nbytes:] == 0xA5).all()
    return problem, room[:nbytes].tobytes()


@pytest.mark.parametrize("codec", ENCODE)
def test_fills_exactly(codec: str) -> None:
    for content in (CONTENT, b"x", bytes(100_000)):
        assert decode(codec, ENCODE[codec](content), len(content)) == ("", content)


@pytest.mark.parametrize("codec", ENCODE)
@pytest.mark.parametrize("nbytes", [1, len(CONTENT) - 1, len(CONTENT) + 1, 10 * len(CONTENT)])
def test_another_size_is_a_problem(codec: str, nbytes: int) -> None:
    problem, _ = decode(codec, ENCODE[codec](CONTENT), nbytes)
    assert str(nbytes) in problem


@pytest.mark.parametrize("codec", ENCODE)
def test_cut_short(codec: str) -> None:
    encoded = ENCODE[codec](CONTENT)
    for stop in (0, 1, 5, 15, 16, len(encoded) // 2, len(encoded) - 1):
        problem, _ = decode(codec, encoded[:stop])
        assert problem


@given(codec=st.sampled_from(["zstd", "lz4", "gzip", "zlib"]), at=st.integers(0), mask=st.integers(1, 255))
def test_one_wrong_byte_writes_nothing_outside(codec: str, at: int, mask: int) -> None:
    encoded = bytearray(ENCODE[codec](CONTENT))
    encoded[at % len(encoded)] ^= mask
    decode(codec, bytes(encoded))


@pytest.mark.parametrize(
    ("codec", "encoded", "at"),
    [
        ("zstd", bytes(numcodecs.Zstd(1, checksum=True).encode(CONTENT)), -1),
        ("gzip", gzip.compress(CONTENT), -5),
        ("gzip", gzip.compress(CONTENT), -1),
        ("zlib", zlib.compress(CONTENT), -1),
    ],
    ids=["zstd", "gzip CRC32", "gzip ISIZE", "zlib"],
)
def test_checksums_of_the_content_are_looked_at(codec: str, encoded: bytes, at: int) -> None:
    damaged = bytearray(encoded)
    damaged[at] ^= 1
    assert decode(codec, encoded) == ("", CONTENT)
    problem, _ = decode(codec, bytes(damaged))
    assert problem


def test_several_frames_and_members_are_one_chunk() -> None:
    parts = [CONTENT[:1000], CONTENT[1000:1001], CONTENT[1001:]]
    assert decode("gzip", b"".join(map(gzip.compress, parts)) + bytes(7)) == ("", CONTENT)
    assert decode("zstd", skippable_frame(b"note") + b"".join(map(zstd_frame, parts))) == ("", CONTENT)
    assert decode("zstd", zstd_frame(CONTENT, window_log=15, size_nbytes=0)) == ("", CONTENT)


def test_what_follows_a_zlib_stream() -> None:
    assert decode("zlib", zlib.compress(CONTENT) + b"abc")[0] == "zlib stream is followed by 3 stray bytes"


def test_a_small_stream_of_much_content_stops_at_the_size_of_a_chunk() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    assert decode("zlib", bomb, 1000)[0] == "deflate stream makes more than the 1000 bytes that the chunk shape needs"


def test_snappy_in_blosc_is_no_corruption_but_needs_another_c_blosc() -> None:
    encoded = bytearray(ENCODE["blosc"](CONTENT))
    encoded[2] = encoded[2] & 0x1F | 2 << 5
    with pytest.raises(UnsupportedError, match="compressed with snappy"):
        decode("blosc", bytes(encoded))


def test_a_blosc_header_that_lies_about_its_length() -> None:
    encoded = bytearray(ENCODE["blosc"](CONTENT))
    encoded[12:16] = struct.pack("<I", len(encoded) + 100)  # c-blosc would read past the end
    assert f"{len(encoded) + 100} encoded bytes, got {len(encoded)}" in decode("blosc", bytes(encoded))[0]
