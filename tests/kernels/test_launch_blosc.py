"""The LZ decoders on streams made by hand, sequence by sequence, so that every form of every token is met.

Whole chunks are in ``tests/decoders/test_blosc.py``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import lz4

from tests.kernels.host_cuda import KERNELS
from xgpuzarr.kernels import launch_blosc
from xgpuzarr.kernels.launch_blosc import GUARD_NBYTES, HeaderRow, Kind, StreamRow, Total
from xgpuzarr.plan.blosc_header import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

type Sequences = list[tuple[bytes, int, int]]
"""Literals, then a match: how far back, how many bytes (0: none)."""

PER_EXAMPLE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def expand(sequences: Sequences) -> bytes:
    """What any LZ format means by sequences."""
    out = bytearray()
    for literals, distance, length in sequences:
        out += literals
        for _ in range(length):
            out.append(out[-distance])
    return bytes(out)


def lz4_length(length: int) -> bytes:
    return b"" if length < 15 else b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])


def to_lz4(sequences: Sequences) -> bytes:
    out = b""
    for literals, distance, length in sequences:
        token = min(len(literals), 15) << 4 | (min(length - 4, 15) if length else 0)
        out += bytes([token]) + lz4_length(len(literals)) + literals
        if length:
            out += distance.to_bytes(2, "little") + lz4_length(length - 4)
    return out


def to_snappy(sequences: Sequences) -> bytes:
    total = sum(len(literals) + length for literals, _, length in sequences)
    out = b""
    while True:
        out += bytes([total & 0x7F | (0x80 if total > 0x7F else 0)])
        total >>= 7
        if not total:
            break
    for literals, distance, length in sequences:
        if literals:
            n = len(literals) - 1
            extra = b"" if n < 60 else n.to_bytes((n.bit_length() + 7) // 8, "little")
            out += bytes([(n if n < 60 else 59 + len(extra)) << 2]) + extra + literals
        for start in range(0, length, 64):
            part = min(length - start, 64)
            if 4 <= part <= 11 and distance < 2048:
                out += bytes([1 | part - 4 << 2 | distance >> 8 << 5, distance & 255])
            elif distance < 65536:
                out += bytes([2 | part - 1 << 2]) + distance.to_bytes(2, "little")
            else:
                out += bytes([3 | part - 1 << 2]) + distance.to_bytes(4, "little")
    return out


def to_blosclz(sequences: Sequences) -> bytes:
    out = b""
    for literals, distance, length in sequences:
        for start in range(0, len(literals), 32):
            part = literals[start : start + 32]
            out += bytes([len(part) - 1]) + part
        if length:
            far = distance > 8191
            near = (31 << 8 | 255) if far else distance - 1
            out += bytes([min(length - 2, 7) << 5 | near >> 8])
            if length >= 9:
                out += b"\xff" * ((length - 9) // 255) + bytes([(length - 9) % 255])
            out += bytes([near & 255])
            if far:
                out += (distance - 8192).to_bytes(2, "big")
    return out


FORMATS = {Kind.LZ4: (to_lz4, 65535), Kind.SNAPPY: (to_snappy, 200_000), Kind.BLOSCLZ: (to_blosclz, 8191 + 65536)}


def decode(
    xp: Any, to_numpy: ToNumpy, kind: Kind, streams: list[bytes], sizes: list[int]
) -> tuple[list[bytes], list[int]]:
    """Decode streams, each a chunk of its own; outputs and problems."""
    encoded = np.frombuffer(b"".join(streams), np.uint8)
    columns = np.zeros((len(StreamRow), len(streams)), dtype=np.int64)
    columns[StreamRow.ENCODED] = [len(stream) for stream in streams]
    columns[StreamRow.SOURCE] = np.cumsum(columns[StreamRow.ENCODED]) - columns[StreamRow.ENCODED]
    columns[StreamRow.DECODED] = sizes
    columns[StreamRow.DEST] = np.cumsum(sizes) - sizes
    columns[StreamRow.CHUNK] = np.arange(len(streams))
    columns[StreamRow.KIND] = kind
    out, problem = xp.asarray(np.zeros(sum(sizes), np.uint8)), xp.asarray(np.zeros(len(streams), np.int32))
    launch_blosc.decode_streams(xp.asarray(encoded), out, xp.asarray(columns), kind, problem)
    data = to_numpy(out).tobytes()
    parts = [data[start : start + size] for start, size in zip(columns[StreamRow.DEST], sizes, strict=True)]
    return parts, to_numpy(problem).tolist()


@st.composite
def sequence_lists(draw: st.DrawFn, max_distance: int) -> Sequences:
    sequences, size = [], 0
    lengths = st.sampled_from([4, 5, 8, 9, 10, 11, 12, 18, 19, 20, 31, 64, 65, 263, 264, 273, 274, 519, 600, 2000])
    for _ in range(draw(st.integers(1, 8))):
        n = draw(st.sampled_from([1, 2, 14, 15, 16, 31, 32, 33, 59, 60, 61, 64, 65, 269, 270, 271, 600, 70_000]))
        literals = np.random.default_rng(draw(st.integers(0, 5))).bytes(n)
        size += n
        distance = draw(
            st.sampled_from([1, 2, 3, 7, 31, 255, 256, 511, 512, 513, 2048, 8191, 8192, 65535, max_distance])
        )
        length = draw(lengths)
        sequences.append((literals, min(distance, size, max_distance), length))
        size += length
    sequences.append((b"the last literals", 1, 0))
    return sequences


@PER_EXAMPLE
@given(data=st.data(), kind=st.sampled_from(list(FORMATS)))
def test_streams_of_any_sequences(xp: Any, to_numpy: ToNumpy, data: st.DataObject, kind: Kind) -> None:
    encode, max_distance = FORMATS[kind]
    sequences = data.draw(sequence_lists(max_distance))
    want = expand(sequences)
    parts, problem = decode(xp, to_numpy, kind, [encode(sequences)], [len(want)])
    assert problem == [Problem.NONE]
    assert parts == [want]


def test_the_hand_made_lz4_streams_are_lz4() -> None:
    sequences: Sequences = [(b"x" * 300, 7, 400), (b"abc", 1, 15), (b"the last literals", 1, 0)]
    want = expand(sequences)
    assert bytes(lz4.decompress(len(want).to_bytes(4, "little") + to_lz4(sequences))) == want


@pytest.mark.parametrize("kind", FORMATS)
def test_cut_and_mistold_streams_are_problems(xp: Any, to_numpy: ToNumpy, kind: Kind) -> None:
    encode, _ = FORMATS[kind]
    sequences: Sequences = [(b"abcdefgh", 8, 300), (b"x" * 40, 3, 9), (b"the last literals", 1, 0)]
    stream, size = encode(sequences), len(expand(sequences))
    cuts = [stream[:n] for n in range(len(stream))]
    _, problem = decode(xp, to_numpy, kind, cuts, [size] * len(cuts))
    assert problem == [Problem.STREAM] * len(cuts)
    _, problem = decode(xp, to_numpy, kind, [stream] * 4, [size - 1, size, size + 1, 1])
    assert problem == [Problem.STREAM, Problem.NONE, Problem.STREAM, Problem.STREAM]


@pytest.mark.parametrize("kind", FORMATS)
def test_matches_that_reach_back_too_far_are_problems(xp: Any, to_numpy: ToNumpy, kind: Kind) -> None:
    encode, _ = FORMATS[kind]
    end = (b"the last literals", 1, 0)
    good, bad = [(b"abcdefgh", 8, 20), end], [(b"abcdefgh", 9, 20), end]
    size = len(expand(good))
    _, problem = decode(xp, to_numpy, kind, [encode(good), encode(bad)], [size, size])
    assert problem == [Problem.NONE, Problem.STREAM]


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (Kind.SNAPPY, b"\x64\xfc\xff\xff\xff\xff" + bytes(60)),  # literals: 2^32
        (Kind.SNAPPY, b"\x64\x00a" + b"\xff\xff\xff\xff\xff"),  # from 2^32 - 1 back
        (Kind.SNAPPY, b"\x64\x00a" + b"\xff\xff\xff\xff\x7f"),
        (Kind.LZ4, b"\xff" + b"\xff" * 300_000 + b"\0"),
        (Kind.LZ4, b"\x1fa\x01\x00" + b"\xff" * 300_000 + b"\0\x50hello"),
        (Kind.BLOSCLZ, b"\0a\xff" + b"\xff" * 300_000 + b"\0\0"),
    ],
)
def test_lengths_and_distances_of_any_size_are_problems(xp: Any, to_numpy: ToNumpy, kind: Kind, stream: bytes) -> None:
    _, problem = decode(xp, to_numpy, kind, [stream], [100])
    assert problem == [Problem.STREAM]


def test_a_long_run_is_a_sequence_of_one_length(xp: Any, to_numpy: ToNumpy) -> None:
    """70 million bytes of one value: a length of 275 000 bytes of 255."""
    n = 70_000_001
    parts, problem = decode(xp, to_numpy, Kind.LZ4, [to_lz4([(b"a", 1, n - 6), (b"hello", 1, 0)])], [n])
    assert problem == [Problem.NONE]
    assert parts[0] == b"a" * (n - 5) + b"hello"


@PER_EXAMPLE
@given(kind=st.sampled_from(list(FORMATS)), stream=st.binary(max_size=200), size=st.integers(0, 5000))
def test_no_bytes_make_a_decoder_leave_its_buffers(
    xp: Any, to_numpy: ToNumpy, kind: Kind, stream: bytes, size: int
) -> None:
    _, problem = decode(xp, to_numpy, kind, [stream], [size])
    assert problem[0] in (Problem.NONE, Problem.STREAM)


def test_numbers_shared_with_the_source_are_the_same() -> None:
    source = (KERNELS / "blosc.cuh").read_text() + (KERNELS / "blosc.cu").read_text()

    def names(start: str, prefix: str) -> list[str]:
        match = re.search(r"enum " + start + r" \{([^}]*)\}", source)
        assert match is not None
        return [name.removeprefix(prefix) for name in re.findall(r"[A-Z_0-9]{2,}", match[1])]

    numbered = dict(re.findall(r"PROBLEM_(\w+) = (\d+)", source))
    assert {name: int(number) for name, number in numbered.items()} == {p.name: int(p) for p in Problem}
    assert names("HeaderRow", "ROW_") == [*(row.name for row in HeaderRow), "N_HEADER_ROWS"]
    assert names("StreamRow", "ROW_") == [*(row.name for row in StreamRow), "N_STREAM_ROWS"]
    totals = re.search(r"enum Total \{(.*), N_TOTALS", source)
    assert totals is not None
    assert [name.removeprefix("TOTAL_") for name in totals[1].strip().split(", ")] == [total.name for total in Total]
    codecs = names("Codec", "CODEC_")[:-1]
    assert [kind.name for kind in Kind] == [{"ZLIB": "DEFLATE"}.get(name, name) for name in codecs] + ["RAW", "BAD"]
    assert f"GUARD_NBYTES = {GUARD_NBYTES}" in source
