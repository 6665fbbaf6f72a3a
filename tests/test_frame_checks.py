"""The second opinion on frames is a sound one: what numcodecs wrote passes, what contradicts the metadata does not."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import LZ4, GZip, Zlib, Zstd

from tests.frame_checks import check_frames, ends, is_corrupt
from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.plan.frames import Problem


def deflate(content: bytes, level: int = 6) -> bytes:
    return zlib.compress(content, level, wbits=-15)


def snappy(content: bytes) -> bytes:
    """Snappy's format with nothing compressed: the size, then literals of up to 60 bytes."""
    size, preamble = len(content), b""
    while size >= 0x80:
        preamble, size = preamble + bytes([size & 0x7F | 0x80]), size >> 7
    literals = [content[i : i + 60] for i in range(0, len(content), 60)]
    return preamble + bytes([size]) + b"".join(bytes([len(part) - 1 << 2]) + part for part in literals)


ENCODERS = {
    "zstd": [Zstd(1).encode, Zstd(19).encode, Zstd(3, checksum=True).encode],
    "lz4": [LZ4().encode],
    "gzip": [GZip(0).encode, GZip(6).encode],
    "zlib": [Zlib(0).encode, Zlib(1).encode, Zlib(9).encode],
    "deflate": [lambda content: deflate(content, 0), deflate],
    "snappy": [snappy],
}
ENCODED = [(codec, encode) for codec, encoders in ENCODERS.items() for encode in encoders]

contents = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.builds(lambda value, count: bytes([value]) * count, st.integers(0, 255), st.integers(1, 1_000_000)),
    st.builds(lambda seed, count: np.random.default_rng(seed).bytes(count), st.integers(0, 9), st.integers(1, 200_000)),
)


def check(codec: str, chunk: bytes, expected_nbytes: int) -> Problem:
    (problem,) = check_frames(codec, *ends([chunk]), expected_nbytes)
    return Problem(problem)


@pytest.mark.parametrize(("codec", "encode"), ENCODED)
@given(content=contents)
def test_valid_chunks_pass(codec, encode, content):
    assert check(codec, bytes(encode(content)), len(content)) is Problem.NONE


@pytest.mark.parametrize(
    ("codec", "encode"), [case for case in ENCODED if case[0] in ("zstd", "lz4", "gzip", "snappy")]
)
@given(content=contents, difference=st.integers(-300, 300).filter(bool))
def test_chunks_of_another_size_do_not_pass(codec, encode, content, difference):
    if len(content) + difference < 1:
        return
    problem = check(codec, bytes(encode(content)), len(content) + difference)
    if codec in ("lz4", "snappy") or (codec == "zstd" and difference < 0):
        assert problem in (Problem.SIZE, Problem.TOO_SHORT)
    else:  # a later frame or member could hold the rest
        assert problem is Problem.MORE_FRAMES


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("nbytes", [0, 1, 4, 5, 7])
def test_stumps_are_corrupt(codec, nbytes):
    chunk = bytes(ENCODERS[codec][0](np.random.default_rng(0).bytes(100_000)))[:nbytes]
    problems = check_frames(codec, *ends([chunk]), 100_000)
    assert is_corrupt(problems).tolist() == [True]


CONTENT = bytes(range(200)) * 2
HALF = CONTENT[:200]
NAMED_GZIP = (
    gzip.compress(CONTENT)[:3] + b"\x08" + gzip.compress(CONTENT)[4:10] + b"name\0" + gzip.compress(CONTENT)[10:]
)


UNUSUAL = [
    ("zstd", zstd_frame(CONTENT, window_log=27), Problem.NONE),
    ("zstd", zstd_frame(CONTENT, dictionary_id=(0, 4)), Problem.DICTIONARY),
    ("zstd", zstd_frame(CONTENT) + skippable_frame(b"abc"), Problem.NONE),
    ("zstd", zstd_frame(CONTENT, window_log=17, size_nbytes=0), Problem.SIZE_UNKNOWN),
    ("zstd", zstd_frame(HALF) + zstd_frame(HALF), Problem.MORE_FRAMES),
    ("zstd", skippable_frame(b"abc", 15) + zstd_frame(CONTENT), Problem.MORE_FRAMES),
    ("zstd", zstd_frame(CONTENT, dictionary_id=(7, 1)), Problem.DICTIONARY),
    ("zstd", zstd_frame(CONTENT + b"x"), Problem.SIZE),
    ("zstd", b"\x28\xb5\x2f\xfe" + zstd_frame(CONTENT)[4:], Problem.MAGIC),
    ("zstd", zstd_frame(CONTENT)[:4] + b"\xe8" + zstd_frame(CONTENT)[5:], Problem.HEADER),
    ("zstd", zstd_frame(CONTENT)[:13] + b"\x07" + zstd_frame(CONTENT)[14:], Problem.BLOCK),
    ("zstd", zstd_frame(CONTENT)[:100], Problem.BLOCK),
    ("lz4", (400).to_bytes(4, "little") + b"\0", Problem.TOO_SHORT),
    ("gzip", NAMED_GZIP, Problem.NONE),
    ("gzip", gzip.compress(HALF) + gzip.compress(HALF), Problem.MORE_FRAMES),
    ("gzip", gzip.compress(CONTENT) + b"\0\0\0\0", Problem.MORE_FRAMES),
    ("gzip", b"\x1f\x8c" + gzip.compress(CONTENT)[2:], Problem.MAGIC),
    ("gzip", gzip.compress(CONTENT)[:2] + b"\x07" + gzip.compress(CONTENT)[3:], Problem.HEADER),
    ("gzip", gzip.compress(CONTENT)[:3] + b"\x80" + gzip.compress(CONTENT)[4:], Problem.HEADER),
    ("gzip", gzip.compress(CONTENT, 0)[:11] + b"\0" + gzip.compress(CONTENT, 0)[12:], Problem.BLOCK),
    ("zlib", b"\x79" + zlib.compress(CONTENT)[1:], Problem.HEADER),
    ("zlib", b"\x78\xbb" + b"\0\0\0\0" + zlib.compress(CONTENT)[2:], Problem.DICTIONARY),
    ("zlib", zlib.compress(CONTENT)[:2] + b"\x07" + zlib.compress(CONTENT)[3:], Problem.BLOCK),
    ("deflate", deflate(CONTENT, 0)[:-1], Problem.BLOCK),
    ("snappy", b"\xff\xff\xff\xff\xff\x01" + snappy(CONTENT)[2:], Problem.HEADER),
]


@pytest.mark.parametrize(("codec", "chunk", "problem"), UNUSUAL)
def test_what_is_unusual_is_told_apart(codec, chunk, problem):
    assert check(codec, chunk, len(CONTENT)) is problem


@pytest.mark.parametrize("codec", ["gzip", "zlib", "deflate"])
def test_longest_runs_are_not_taken_for_short_chunks(codec):
    content = bytes(3_000_000)
    assert check(codec, bytes(ENCODERS[codec][-1](content)), len(content)) is Problem.NONE


def test_batch_is_checked_row_by_row():
    good = zstd_frame(CONTENT, checksum=True)
    chunks = [
        good,
        good[:7],
        zstd_frame(HALF),
        b"abcdefgh" * 20,
        zstd_frame(CONTENT, window_log=17, size_nbytes=0),
        good,
    ]
    problems = check_frames("zstd", *ends(chunks), len(CONTENT))
    assert problems.dtype == np.uint8
    assert problems.tolist() == [0, Problem.TOO_SHORT, Problem.MORE_FRAMES, Problem.MAGIC, Problem.SIZE_UNKNOWN, 0]
    assert is_corrupt(problems).tolist() == [False, True, False, True, False, False]


def test_empty_batch():
    assert check_frames("lz4", *ends([]), 10).shape == (0,)
