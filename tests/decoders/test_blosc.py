"""Blosc chunks of every kind against numcodecs: the kernels on the host under sanitizers; ``-m gpu``: on a device."""

from __future__ import annotations

import ctypes
import itertools
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numcodecs import Blosc, blosc, lz4, zstd

from xgpuzarr.decoders import nvcomp
from xgpuzarr.decoders.blosc import decode_blosc
from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels import arguments, launch
from xgpuzarr.plan.blosc_header import BloscHeader, Problem, check_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = ["blosclz", "lz4", "lz4hc", "zlib", "zstd"]
SHUFFLES = [Blosc.NOSHUFFLE, Blosc.SHUFFLE, Blosc.BITSHUFFLE]


def elements(nbytes: int, typesize: int, seed: int = 0) -> bytes:
    """Bytes like those of smooth measurements: high bytes repeat, low bytes are noise, and part is constant."""
    rng = np.random.default_rng(seed)
    n = -(-nbytes // typesize) + 1
    columns = [rng.integers(0, 256, n) if k == 0 else np.cumsum(rng.random(n) < 0.1 / k) for k in range(typesize)]
    data = np.stack(columns, axis=1).astype(np.uint8)
    data[n // 3 : n // 2] = 7
    return data.tobytes()[:nbytes]


def encode(
    data: bytes, typesize: int, *, codec: str = "lz4", level: int = 5, shuffle: int = 1, blocksize: int = 0
) -> bytes:
    return bytes(Blosc(codec, level, shuffle, blocksize, typesize=typesize).encode(data))


DECODE: dict[str, Callable[[bytes], Any]] = {
    "zstd": zstd.decompress,
    "deflate": lambda data: zlib.decompress(data, -15),
    "lz4": lz4.decompress,
}


def decompress_on_host(algorithm: str, *columns: np.ndarray[Any, Any], **_: Any) -> tuple[Any, Any]:
    """Stand-in for `nvcomp.decompress_batch`, which needs a device."""
    actual, statuses = np.zeros(len(columns[0]), np.uint64), np.zeros(len(columns[0]), np.int32)
    for row, (source, nbytes, to, room) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        encoded = ctypes.string_at(source, nbytes)
        if algorithm == "lz4":
            encoded = room.to_bytes(4, "little") + encoded  # numcodecs' own framing
        try:
            data = bytes(DECODE[algorithm](encoded))
        except (RuntimeError, zlib.error):
            statuses[row] = 1
            continue
        actual[row] = len(data)
        ctypes.memmove(to, data, min(room, len(data)))
    return actual, statuses


@pytest.fixture(autouse=True)
def _nvcomp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(nvcomp, "decompress_batch", decompress_on_host)


def run(
    xp: Any,
    chunks: list[bytes],
    chunk_nbytes: int,
    *,
    gap: int = 3,
    out_gap: int = 0,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Decode chunks that lie anywhere in one buffer; problems, and the output, one row a chunk."""
    nbytes = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    offset = np.cumsum(nbytes + gap) - nbytes
    encoded = np.frombuffer(b"".join(b"\xaa" * gap + chunk for chunk in chunks), np.uint8)
    out_offset = (chunk_nbytes + out_gap) * np.arange(len(chunks), dtype=np.int64) + out_gap
    out = xp.asarray(np.full((chunk_nbytes + out_gap) * len(chunks), 0xEE, dtype=np.uint8))
    status = launch.new_status()
    on_device = hasattr(xp, "asnumpy")
    problem = decode_blosc(
        xp.asarray(encoded),
        offset,
        nbytes,
        chunk_nbytes=chunk_nbytes,
        out=out,
        status=status,
        out_offset=out_offset if out_gap else None,
    )
    launch.check_status(status, "blosc")
    if on_device:
        problem, out = xp.asnumpy(problem), xp.asnumpy(out)
    rows = out.reshape(len(chunks), chunk_nbytes + out_gap)
    assert (rows[:, :out_gap] == 0xEE).all()
    return problem, rows[:, out_gap:]


@pytest.mark.parametrize("typesize", [1, 2, 3, 4, 8, 12, 16, 17, 255])
@pytest.mark.parametrize("nbytes", [1, 7, 8, 130, 1000, 4096, 16 * 255 + 3, 65536, 200_003])
def test_every_kind_of_chunk_in_one_batch_equals_numcodecs(xp: Any, typesize: int, nbytes: int) -> None:
    data = elements(nbytes, typesize)
    noise = np.random.default_rng(1).bytes(nbytes)  # stored raw, or as a plain copy
    half = data[: nbytes // 2] + noise[nbytes // 2 :]
    blocksizes = [0, 300, 1024, 2048 * typesize] if nbytes >= 1000 else [0]
    kinds = list(itertools.product(CODECS, SHUFFLES, blocksizes, [1, 9]))
    sources = [(data, half, noise)[k % 3] for k in range(len(kinds))]
    chunks = [
        encode(source, typesize, codec=codec, shuffle=shuffle, blocksize=blocksize, level=level)
        for source, (codec, shuffle, blocksize, level) in zip(sources, kinds, strict=True)
    ]
    assert nbytes < 4096 or {BloscHeader.parse(chunk).is_memcpyed for chunk in chunks} == {True, False}
    problem, out = run(xp, chunks, nbytes)
    assert problem.tolist() == [Problem.NONE] * len(chunks)
    for kind, source, row in zip(kinds, sources, out, strict=True):
        assert row.tobytes() == source, kind


@pytest.mark.parametrize("out_gap", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("typesize", [1, 2, 4, 8, 16])
def test_chunks_go_to_any_place_of_the_output(xp: Any, typesize: int, out_gap: int) -> None:
    sources = [elements(30_000, typesize, seed) for seed in range(6)]
    chunks = [encode(s, typesize, shuffle=k % 3, blocksize=4096) for k, s in enumerate(sources)]
    problem, out = run(xp, chunks, 30_000, out_gap=out_gap)
    assert not problem.any()
    assert [row.tobytes() for row in out] == sources


def test_blocks_in_the_order_that_threads_finish(xp: Any) -> None:
    """c-blosc's threads append blocks as they finish; here the blocks stand in reverse."""
    data = elements(300_000, 4)
    chunk = encode(data, 4, blocksize=8192)  # c-blosc makes that 65536
    header = BloscHeader.parse(chunk)
    starts = [*struct.unpack_from(f"<{header.n_blocks}I", chunk, 16), len(chunk)]
    blocks = [chunk[a:b] for a, b in itertools.pairwise(starts)]
    assert len(blocks) == 5
    places = np.cumsum([0, *(len(block) for block in reversed(blocks))])[:-1][::-1] + 16 + 4 * 5
    turned = chunk[:16] + struct.pack("<5I", *places) + b"".join(reversed(blocks))
    assert blosc.decompress(turned) == data
    assert check_chunk(turned, len(data)) is Problem.NONE
    problem, out = run(xp, [chunk, turned], len(data))
    assert not problem.any()
    assert [row.tobytes() for row in out] == [data, data]


@pytest.mark.parametrize("codec", ["blosclz", "lz4", "lz4hc"])
@pytest.mark.parametrize("distance", [1, 3, 600, 8191, 8192, 8193, 60_000, 70_000])
def test_repeats_near_and_far(xp: Any, codec: str, distance: int) -> None:
    data = np.random.default_rng(4).bytes(distance) * (1 + 200_000 // distance)
    chunk = encode(data, 1, codec=codec, shuffle=0, level=9, blocksize=len(data))
    problem, out = run(xp, [chunk], len(data))
    assert problem.tolist() == [Problem.NONE]
    assert out[0].tobytes() == data


def test_what_the_grid_does_not_hold_is_done_in_turn(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of two blocks stands in for the limit of 2^31 - 1."""
    monkeypatch.setattr(arguments, "_MAX_BLOCKS", 2)
    kinds = list(itertools.product(CODECS, SHUFFLES))
    sources = [elements(100_000, 4, seed) for seed in range(len(kinds))]
    chunks = [encode(s, 4, codec=c, shuffle=f, blocksize=8192) for s, (c, f) in zip(sources, kinds, strict=True)]
    problem, out = run(xp, chunks, 100_000)
    assert not problem.any()
    assert [row.tobytes() for row in out] == sources


def test_empty_batches_and_empty_chunks(xp: Any) -> None:
    problem, out = run(xp, [], 100)
    assert problem.shape == (0,)
    empty = encode(b"", 4)
    problem, out = run(xp, [empty, empty], 0)
    assert problem.tolist() == [0, 0]
    assert out.size == 0
    assert run(xp, [empty], 8)[0].tolist() == [Problem.SIZE]


def test_an_output_that_is_too_small_is_reported(xp: Any) -> None:
    data = elements(4000, 4)
    chunk = np.frombuffer(encode(data, 4), np.uint8)
    status = launch.new_status()
    decode_blosc(
        xp.asarray(chunk),
        np.zeros(1, np.int64),
        np.array([chunk.size], np.int64),
        chunk_nbytes=4000,
        out=xp.asarray(np.zeros(3999, np.uint8)),
        status=status,
    )
    with pytest.raises(XGpuZarrError, match="outside its buffer"):
        launch.check_status(status, "blosc")


def replace(chunk: bytes, at: int, value: int, nbytes: int = 4) -> bytes:
    return chunk[:at] + value.to_bytes(nbytes, "little") + chunk[at + nbytes :]


def first_stream(chunk: bytes) -> int:
    return int(struct.unpack_from("<I", chunk, 16)[0])


LIES: dict[str, tuple[Callable[[bytes], bytes], Problem]] = {
    "empty": (lambda _: b"", Problem.SHORT),
    "15 bytes": (lambda c: c[:15], Problem.SHORT),
    "version": (lambda c: replace(c, 0, 3, 1), Problem.VERSION),
    "codec version": (lambda c: replace(c, 1, 2, 1), Problem.VERSION),
    "flag of a later format": (lambda c: replace(c, 2, c[2] | 8, 1), Problem.FLAGS),
    "codec 7": (lambda c: replace(c, 2, c[2] | 0xE0, 1), Problem.FLAGS),
    "plain copy": (lambda c: replace(c, 2, c[2] | 2, 1), Problem.STORED_SIZE),
    "typesize 0": (lambda c: replace(c, 3, 0, 1), Problem.TYPESIZE),
    "nbytes + 1": (lambda c: replace(c, 4, 140_001), Problem.SIZE),
    "nbytes 2^32 - 1": (lambda c: replace(c, 4, 2**32 - 1), Problem.SIZE),
    "nbytes 0": (lambda c: replace(c, 4, 0), Problem.SIZE),
    "blocksize 0": (lambda c: replace(c, 8, 0), Problem.BLOCKSIZE),
    "blocksize past the chunk": (lambda c: replace(c, 8, 140_001), Problem.BLOCKSIZE),
    "blocksize 2^32 - 1": (lambda c: replace(c, 8, 2**32 - 1), Problem.BLOCKSIZE),
    "blocksize no multiple of typesize": (lambda c: replace(c, 8, 65535), Problem.BLOCKSIZE),
    "blocksize 1": (lambda c: replace(c, 8, 1), Problem.TABLE),
    "cbytes + 1": (lambda c: replace(c, 12, len(c) + 1), Problem.STORED_SIZE),
    "cut short": (lambda c: c[:-1], Problem.STORED_SIZE),
    "cut to the header": (lambda c: replace(c[:16], 12, 16), Problem.TABLE),
    "bytes behind": (lambda c: c + b"\0", Problem.STORED_SIZE),
    "block in the header": (lambda c: replace(c, 16, 15), Problem.BLOCK_OFFSET),
    "block in the table": (lambda c: replace(c, 16, 16), Problem.BLOCK_OFFSET),
    "block at the end": (lambda c: replace(c, 16, len(c)), Problem.BLOCK_OFFSET),
    "block past the end": (lambda c: replace(c, 20, 2**32 - 1), Problem.BLOCK_OFFSET),
    "block in the last bytes": (lambda c: replace(c, 20, len(c) - 3), Problem.STREAM_SIZE),
    "stream of 0 bytes": (lambda c: replace(c, first_stream(c), 0), Problem.STREAM_SIZE),
    "stream past its block": (lambda c: replace(c, first_stream(c), 16385), Problem.STREAM_SIZE),
    "stream of 2^32 - 1 bytes": (lambda c: replace(c, first_stream(c), 2**32 - 1), Problem.STREAM_SIZE),
    "two blocks in one place": (lambda c: replace(c, 20, first_stream(c)), Problem.OVERLAP),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_found_on_both_sides(xp: Any, lie: str) -> None:
    data = elements(140_000, 4)
    good = encode(data, 4, blocksize=8192)
    change, want = LIES[lie]
    bad = change(good)
    header = BloscHeader.parse(good)
    assert (header.blocksize, header.n_blocks, header.n_splits) == (65536, 3, 4)
    assert check_chunk(good, len(data)) is Problem.NONE
    assert check_chunk(bad, len(data)) is want
    problem, out = run(xp, [good, bad, good], len(data))
    assert problem.tolist() == [Problem.NONE, want, Problem.NONE]
    assert out[0].tobytes() == out[2].tobytes() == data


def test_blocks_with_a_gap_between_them_are_for_the_host(xp: Any) -> None:
    """The format does not forbid it, but nothing writes it."""
    data = elements(140_000, 4)
    good = encode(data, 4, blocksize=8192)
    starts = struct.unpack_from("<3I", good, 16)
    table = struct.pack("<3I", *(start + 4 for start in starts))
    gapped = replace(good[:16] + table + b"gap!" + good[28:], 12, len(good) + 4)
    assert blosc.decompress(gapped) == data
    assert check_chunk(gapped, len(data)) is Problem.NONE
    assert run(xp, [good, gapped], len(data))[0].tolist() == [Problem.NONE, Problem.OVERLAP]


@pytest.mark.parametrize("xp", ["host"], indirect=True)
def test_one_broken_guard_zone_makes_every_chunk_suspect(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def overrun(algorithm: str, *columns: np.ndarray[Any, Any], **_: Any) -> tuple[Any, Any]:
        result = decompress_on_host(algorithm, *columns)
        ctypes.memset(int(columns[2][0] + columns[3][0]), 0, 1)
        return result

    data = elements(140_000, 4)
    chunks = [encode(data, 4, codec="zstd", blocksize=8192)] * 3
    assert run(xp, chunks, len(data))[0].tolist() == [Problem.NONE] * 3
    monkeypatch.setattr(nvcomp, "decompress_batch", overrun)
    assert run(xp, chunks, len(data))[0].tolist() == [Problem.STREAM] * 3


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_found_or_harmless(xp: Any, codec: str) -> None:
    """Flipped bits: never a byte outside the buffers, never other bytes than numcodecs has.

    On a device, bytes that nvCOMP alone looks at stay whole: it may end the CUDA context on damage, and with it every
    test that follows in this process. What is checked before it, block offsets and stream sizes, is damaged there too.
    """
    data = elements(6000, 4)
    good = encode(data, 4, codec=codec, blocksize=2048)
    is_own = codec not in ("zlib", "zstd")
    places = np.arange(16, len(good)) if is_own or not hasattr(xp, "asnumpy") else checked_places(good)
    rng = np.random.default_rng(2)
    damaged = []
    for place in rng.choice(places, 150):
        chunk = bytearray(good)
        chunk[place] ^= 1 << rng.integers(8)
        damaged.append(bytes(chunk))
    problem, out = run(xp, damaged, len(data))
    assert np.count_nonzero(problem) > 10
    for chunk, found, row in zip(damaged, problem, out, strict=True):
        if found == Problem.NONE:
            assert blosc.decompress(chunk) == row.tobytes()


def checked_places(chunk: bytes) -> np.ndarray[Any, Any]:
    """Block offsets and the sizes of first streams: wrong, they leave a gap between two blocks, or an overlap."""
    n_blocks = BloscHeader.parse(chunk).n_blocks
    starts = [*range(16, 16 + 4 * n_blocks, 4), *struct.unpack_from(f"<{n_blocks}I", chunk, 16)]
    return np.array([start + byte for start in starts for byte in range(4)])
