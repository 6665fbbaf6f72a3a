"""Blosc headers on the host; the same lies, on both sides, are in ``tests/decoders/test_blosc.py``."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import Blosc, blosc

from xgpuzarr.plan.blosc_header import BloscHeader, Problem, check_chunk, describe


@given(
    n=st.integers(0, 200_000),
    typesize=st.sampled_from([1, 2, 4, 7, 8, 16, 255]),
    codec=st.sampled_from(["blosclz", "lz4", "lz4hc", "zlib", "zstd"]),
    level=st.sampled_from([0, 1, 5, 9]),
    shuffle=st.sampled_from([0, 1, 2]),
    blocksize=st.sampled_from([0, 256, 5000, 65536]),
    n_threads=st.sampled_from([1, 4]),
)
def test_what_numcodecs_writes_is_sound(
    n: int, typesize: int, codec: str, level: int, shuffle: int, blocksize: int, n_threads: int
) -> None:
    data = (np.arange(n) // 7).astype(np.uint8).tobytes()
    before = blosc.set_nthreads(n_threads)
    chunk = bytes(Blosc(codec, level, shuffle, blocksize, typesize=typesize).encode(data))
    blosc.set_nthreads(before)
    assert check_chunk(chunk, n) is Problem.NONE
    header = BloscHeader.parse(chunk)
    assert (header.decoded_nbytes, header.encoded_nbytes, header.typesize) == (n, len(chunk), typesize)


@given(chunk=st.binary(max_size=64), expected_nbytes=st.integers(0, 2**32))
def test_no_bytes_make_the_check_fail(chunk: bytes, expected_nbytes: int) -> None:
    problem = check_chunk(chunk, expected_nbytes)
    text = describe(problem, chunk[:16], nbytes=len(chunk), expected_nbytes=expected_nbytes)
    assert bool(text) == (problem is not Problem.NONE)


@given(
    flags=st.integers(0, 255),
    typesize=st.integers(0, 255),
    blocksize=st.integers(0, 300),
    body=st.lists(st.integers(0, 40), max_size=40),
)
def test_no_header_makes_the_check_fail(flags: int, typesize: int, blocksize: int, body: list[int]) -> None:
    data = struct.pack(f"<{len(body)}I", *body)
    chunk = struct.pack("<4B3I", 2, 1, flags, typesize, 256, blocksize, 16 + len(data)) + data
    assert check_chunk(chunk, 256) in Problem


def test_a_bad_header_costs_no_more_than_its_bytes() -> None:
    """2^32 - 1 blocks of one byte would need that many offsets."""
    chunk = struct.pack("<4B3I", 2, 1, 0x21, 4, 2**32 - 1, 1, 40) + bytes(24)
    assert check_chunk(chunk, 2**32 - 1) is Problem.TABLE


@pytest.mark.parametrize(
    ("head", "problem", "text"),
    [
        (b"\x02\x01", Problem.SHORT, "blosc needs a 16-byte header, got 2 bytes"),
        (
            struct.pack("<4B3I", 2, 1, 0x21, 4, 100, 100, 50),
            Problem.SIZE,
            "blosc header says 100 bytes, the chunk shape needs 400",
        ),
        (
            struct.pack("<4B3I", 2, 1, 0x21, 4, 400, 400, 50),
            Problem.STORED_SIZE,
            "blosc header says 50 encoded bytes, got 49 for 400 decoded bytes",
        ),
        (
            struct.pack("<4B3I", 2, 1, 0xE1, 4, 400, 400, 49),
            Problem.FLAGS,
            "blosc header has flags 0xe1, which no known codec or format uses",
        ),
        (struct.pack("<4B3I", 2, 1, 0x21, 4, 400, 400, 49), Problem.OVERLAP, "two blosc blocks overlap"),
    ],
)
def test_texts_say_what_was_met(head: bytes, problem: Problem, text: str) -> None:
    nbytes = len(head) if len(head) < 16 else 49
    if problem is not Problem.OVERLAP:
        assert check_chunk(head.ljust(nbytes, b"\0"), 400) is problem
    assert describe(problem, head, nbytes=nbytes, expected_nbytes=400) == text
