"""Frames checked on the device as on the host, pointed at with a dummy in the place of bad ones, and judged."""

from __future__ import annotations

import gzip
import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import Zstd, lz4, zstd

from tests.frame_checks import check_frames, ends, is_corrupt
from tests.kernels.host_cuda import KERNELS
from tests.test_frame_checks import CONTENT, ENCODED, ENCODERS, UNUSUAL, contents
from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.kernels import launch, launch_frames
from xgpuzarr.plan.frames import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

PER_EXAMPLE = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
KIB = 1024


def check(
    xp: Any, codec: str, chunks: list[bytes], expected_nbytes: int, *, room_nbytes: int = 0, gap: int = 3
) -> list[Problem]:
    """What the device finds in chunks that lie anywhere in one buffer."""
    nbytes = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    encoded = np.frombuffer(b"".join(b"\xaa" * gap + chunk for chunk in chunks), np.uint8)
    problem = launch_frames.check_frames(
        codec,
        xp.asarray(encoded),
        np.cumsum(nbytes + gap) - nbytes,
        nbytes,
        expected_nbytes=expected_nbytes,
        room_nbytes=room_nbytes,
    )
    assert problem.dtype == np.int32
    return [Problem(number) for number in problem.tolist()]


def check_on_host(codec: str, chunks: list[bytes], expected_nbytes: int) -> list[Problem]:
    return [Problem(number) for number in check_frames(codec, *ends(chunks), expected_nbytes).tolist()]


@pytest.mark.parametrize("codec", launch_frames.CODECS)
def test_unusual_chunks_are_told_apart_as_on_the_host(xp: Any, codec: str) -> None:
    cases = [(bytes(chunk), problem) for name, chunk, problem in UNUSUAL if name == codec]
    found = check(xp, codec, [chunk for chunk, _ in cases], len(CONTENT))
    assert found == [problem for _, problem in cases]


@pytest.mark.parametrize("codec", launch_frames.CODECS)
def test_stumps_are_told_apart_as_on_the_host(xp: Any, codec: str) -> None:
    whole = [bytes(encode(CONTENT)) for encode in ENCODERS[codec]]
    stumps = [chunk[:n] for chunk in whole for n in range(12)]
    assert check(xp, codec, stumps, 100_000) == check_on_host(codec, stumps, 100_000)


@pytest.mark.parametrize(("codec", "encode"), ENCODED)
@PER_EXAMPLE
@given(content=contents, difference=st.sampled_from([0, 0, 0, -300, -1, 1, 300]))
def test_what_encoders_write_is_judged_as_on_the_host(
    xp: Any, codec: str, encode: Callable[[bytes], bytes], content: bytes, difference: int
) -> None:
    expected_nbytes = max(1, len(content) + difference)
    chunks = [bytes(encode(content))]
    assert check(xp, codec, chunks, expected_nbytes) == check_on_host(codec, chunks, expected_nbytes)


@pytest.mark.parametrize("codec", launch_frames.CODECS)
@PER_EXAMPLE
@given(chunks=st.lists(st.binary(max_size=100), max_size=8), expected_nbytes=st.integers(1, 2**40))
def test_any_bytes_are_judged_as_on_the_host(xp: Any, codec: str, chunks: list[bytes], expected_nbytes: int) -> None:
    found, on_host = check(xp, codec, chunks, expected_nbytes), check_on_host(codec, chunks, expected_nbytes)
    assert [a == b or Problem.BLOCK in (a, b) for a, b in zip(found, on_host, strict=True)] == [True] * len(chunks)


@PER_EXAMPLE
@given(
    at=st.integers(4, 17),
    byte=st.integers(0, 255),
    size_nbytes=st.sampled_from([0, 4, 8]),
    dictionary_id=st.sampled_from([(0, 0), (9, 1), (300, 2), (70_000, 4)]),
)
def test_changed_zstd_headers_are_judged_as_on_the_host(
    xp: Any, at: int, byte: int, size_nbytes: int, dictionary_id: tuple[int, int]
) -> None:
    chunk = zstd_frame(CONTENT, window_log=17, size_nbytes=size_nbytes, dictionary_id=dictionary_id)
    chunk = chunk[:at] + bytes([byte]) + chunk[at + 1 :]
    (found,), (on_host,) = check(xp, "zstd", [chunk], len(CONTENT)), check_on_host("zstd", [chunk], len(CONTENT))
    # the device looks at all blocks, the host at the first one
    assert found == on_host or found is Problem.BLOCK or not is_corrupt(np.array([found, on_host])).any()


LONG = np.random.default_rng(3).bytes(300 * KIB)  # three blocks of plain bytes


def blocks_of(frame: bytes, header_nbytes: int) -> list[int]:
    """Where the block headers of a frame stand."""
    places, at, is_last = [], header_nbytes, False
    while not is_last:
        places.append(at)
        word = int.from_bytes(frame[at : at + 3], "little")
        is_last, at = bool(word & 1), at + 3 + (1 if word >> 1 & 3 == 1 else word >> 3)
    return places


def test_every_block_of_a_zstd_frame_is_looked_at(xp: Any) -> None:
    good = zstd_frame(LONG)
    places = blocks_of(good, 13)
    assert len(places) == 3
    third = places[2]
    word = int.from_bytes(good[third : third + 3], "little")
    bad = {
        "past the end": (word + (1 << 3), Problem.BLOCK),
        "of a reserved type": (word | 6, Problem.BLOCK),
        "not the last": (word & ~1, Problem.BLOCK),
    }
    for name, (changed, problem) in bad.items():
        chunk = good[:third] + changed.to_bytes(3, "little") + good[third + 3 :]
        assert check_on_host("zstd", [chunk], len(LONG)) == [Problem.NONE], name
        assert check(xp, "zstd", [good, chunk, good], len(LONG)) == [Problem.NONE, problem, Problem.NONE], name
    assert check(xp, "zstd", [good[:-1]], len(LONG)) == [Problem.BLOCK]
    # plain blocks of more than the stated size; blocks that cannot reach it
    assert check(xp, "zstd", [good[:5] + (1).to_bytes(8, "little") + good[13:]], 1) == [Problem.BLOCK]
    assert check(xp, "zstd", [zstd_frame(bytes(9))[:5] + (10**6).to_bytes(8, "little") + b"\x4b\0\0\0"], 10**6) == [
        Problem.BLOCK
    ]


def test_bytes_behind_a_zstd_frame_are_for_the_host_unless_skippable(xp: Any) -> None:
    for size_nbytes in (8, 0):
        frame = zstd_frame(CONTENT, window_log=20, size_nbytes=size_nbytes, checksum=True)
        note = skippable_frame(b"note")
        chunks = [frame, frame + b"\0", frame + b"\1" * 40, frame + frame, frame + note[:-1], frame + 9 * note]
        found = check(xp, "zstd", chunks, len(CONTENT), room_nbytes=384 * KIB)
        assert found == [Problem.NONE] + [Problem.MORE_FRAMES] * 5, size_nbytes
        chunks = [frame[:-1], frame + note, frame + 8 * note]
        found = check(xp, "zstd", chunks, len(CONTENT), room_nbytes=384 * KIB)
        assert found == [Problem.BLOCK, Problem.NONE, Problem.NONE], size_nbytes


def test_a_frame_without_its_size_needs_room_for_what_its_blocks_may_hold(xp: Any) -> None:
    text = bytes(range(256)) * 1100  # compressed: each of three blocks may hold 128 KiB
    frame = zstd_frame(text, window_log=20, size_nbytes=0)
    assert len(blocks_of(frame, 6)) == 3
    for room_nbytes, problem in [(0, 65), (384 * KIB - 1, 65), (384 * KIB, 0)]:
        assert check(xp, "zstd", [frame], len(text), room_nbytes=room_nbytes) == [Problem(problem)]
    plain = zstd_frame(LONG, window_log=20, size_nbytes=0)  # not compressed: the size is known
    assert check(xp, "zstd", [plain], len(LONG), room_nbytes=len(LONG)) == [Problem.NONE]
    assert check(xp, "zstd", [plain], len(LONG), room_nbytes=len(LONG) - 1) == [Problem.SIZE_UNKNOWN]


def test_a_frame_of_very_many_blocks_is_left_to_the_host(xp: Any) -> None:
    frame = bytes(Zstd(1).encode(bytes(3)))[:4] + b"\x20\x03" + b"\0\0\0" * 70 + b"\x1b\0\0\x05"
    assert zstd.decompress(frame) == b"\x05" * 3
    assert check(xp, "zstd", [frame], 3) == [Problem.MORE_FRAMES]
    assert check(xp, "zstd", [frame[:6] + frame[6 + 30 :]], 3) == [Problem.NONE]


def test_chunks_outside_the_buffer_are_too_short(xp: Any) -> None:
    frame = zstd_frame(CONTENT)
    encoded = xp.asarray(np.frombuffer(frame, np.uint8))
    offset, nbytes = np.array([0, 1, -1, 0]), np.array([len(frame), len(frame), 5, -2])
    problem = launch_frames.check_frames("zstd", encoded, offset, nbytes, expected_nbytes=len(CONTENT))
    assert problem.tolist() == [Problem.NONE, *[Problem.TOO_SHORT] * 3]


def test_the_size_before_a_frame_is_looked_at(xp: Any) -> None:
    frame, size = zstd_frame(CONTENT), len(CONTENT).to_bytes(4, "little")
    chunks = [size + frame, b"\1" + size[1:] + frame, size + frame[:-1], size + frame[:3], size, size[:3], frame]
    nbytes = np.array([len(chunk) for chunk in chunks])
    encoded = xp.asarray(np.frombuffer(b"".join(chunks), np.uint8))
    problem = launch_frames.check_frames(
        "zstd", encoded, np.cumsum(nbytes) - nbytes, nbytes, expected_nbytes=len(CONTENT), prefix_nbytes=4
    )
    assert problem.tolist() == [
        Problem.NONE, Problem.SIZE, Problem.BLOCK, Problem.TOO_SHORT, Problem.TOO_SHORT, Problem.TOO_SHORT, Problem.SIZE
    ]  # fmt: skip


def test_what_is_known_to_be_wrong_stays(xp: Any) -> None:
    frame = zstd_frame(CONTENT)
    problem = launch_frames.check_frames(
        "zstd",
        xp.asarray(np.frombuffer(frame, np.uint8)),
        np.zeros(4, np.int64),
        np.array([len(frame), len(frame), 1, 1]),
        expected_nbytes=len(CONTENT),
        skip=xp.asarray(np.array([0, 99, 99, 0], np.int32)),
    )
    assert problem.tolist() == [Problem.NONE, 99, 99, Problem.TOO_SHORT]


def test_no_chunks(xp: Any) -> None:
    assert check(xp, "zstd", [], 10) == []


# ---- pointing and judging -------------------------------------------------------------------------------------------

DECODE: dict[str, Callable[[bytes], Any]] = {
    "zstd": zstd.decompress,
    "lz4": lambda frame: lz4.decompress((1).to_bytes(4, "little") + frame),
    "gzip": gzip.decompress,
    "deflate": lambda frame: zlib.decompress(frame, -15),
    "snappy": lambda frame: frame[2:] if frame[:2] == b"\x01\0" else None,  # 1 byte: a literal of 1
}


@pytest.mark.parametrize("algorithm", DECODE)
def test_frames_to_leave_out_become_the_dummy(xp: Any, to_numpy: ToNumpy, algorithm: str) -> None:
    source, out = xp.asarray(np.zeros(100, np.uint8)), xp.asarray(np.zeros(200, np.uint8))
    status = launch.new_status()
    columns = launch_frames.point_frames(
        algorithm,
        source,
        np.array([7, 10**9, 90]),
        np.array([20, -5, 10]),
        out=out,
        out_offset=np.array([0, -1, 100]),
        out_nbytes=np.array([60, 10**9, 90]),
        skip=xp.asarray(np.array([0, 3, 0], np.int32)),
        guard_nbytes=10,
        status=status,
    )
    launch.check_status(status, "frames")
    dummy = launch_frames.dummy_frame(algorithm)
    columns, written, stand_in = to_numpy(columns).astype(np.int64), to_numpy(out), to_numpy(dummy)
    source_at, out_start, dummy_at = (int(launch_frames.device_address(array)) for array in (source, out, dummy))
    assert columns[:, 0].tolist() == [source_at + 7, 20, out_start, 60]
    assert columns[:, 2].tolist() == [source_at + 90, 10, out_start + 100, 90]
    frame_at, frame_nbytes, out_at, out_nbytes = (columns[:, 1] - [dummy_at, 0, dummy_at, 0]).tolist()
    assert frame_at == 0
    assert frame_nbytes <= out_at
    assert out_at + out_nbytes <= stand_in.size
    assert len(DECODE[algorithm](stand_in[:frame_nbytes].tobytes())) == out_nbytes == 1
    assert np.flatnonzero(written).tolist() == [*range(60, 70), *range(190, 200)]


def test_frames_outside_their_buffers_are_left_out_and_reported(xp: Any, to_numpy: ToNumpy) -> None:
    buffer = xp.asarray(np.zeros(100, np.uint8))
    for source_offset, out_offset in [(91, 0), (-1, 0), (0, 71), (0, -1)]:
        status = launch.new_status()
        columns = launch_frames.point_frames(
            "zstd",
            buffer,
            np.array([source_offset]),
            np.array([10]),
            out=buffer,
            out_offset=np.array([out_offset]),
            out_nbytes=np.array([20]),
            skip=xp.asarray(np.zeros(1, np.int32)),
            guard_nbytes=10,
            status=status,
        )
        assert to_numpy(columns)[0, 0] == launch_frames.device_address(launch_frames.dummy_frame("zstd"))
        with pytest.raises(XGpuZarrError, match="outside its buffer"):
            launch.check_status(status, "frames")


def judge(
    xp: Any, *, broken: int | None = None, statuses: tuple[int, ...] = (0, 0, 0), chunk: Any = None
) -> tuple[list[int], list[int]]:
    """Judge three frames of 20 bytes with guard zones of 10, the second of them left out."""
    out, status = xp.asarray(np.zeros(100, np.uint8)), launch.new_status()
    places = {"out": out, "out_offset": np.array([0, 30, 60]), "out_nbytes": np.array([20, 20, 20])}
    skip = xp.asarray(np.array([0, 1, 0], np.int32))
    launch_frames.point_frames(
        "zstd", out, np.zeros(3, np.int64), np.ones(3, np.int64), **places, skip=skip, guard_nbytes=10, status=status
    )
    if broken is not None:
        out[broken] += 1
    problem, overrun = xp.asarray(np.zeros(3, np.int32)), xp.asarray(np.zeros(1, np.int32))
    launch_frames.judge_frames(
        xp.asarray(np.array([20, 8, 20], np.uint64)),
        xp.asarray(np.array(statuses, np.int32)),
        **places,
        skip=skip,
        guard_nbytes=10,
        code=12,
        problem=problem,
        overrun=overrun,
        chunk=chunk,
    )
    return problem.tolist(), overrun.tolist()


def test_frames_are_judged_by_size_status_and_guard_zone(xp: Any) -> None:
    assert judge(xp) == ([0, 0, 0], [0])
    assert judge(xp, statuses=(0, 5, 5)) == ([0, 0, 12], [0])
    assert judge(xp, statuses=(-1, 0, 0), chunk=np.array([2, 1, 0])) == ([0, 0, 12], [0])
    for byte in (20, 29):
        assert judge(xp, broken=byte) == ([12, 0, 0], [12])
    assert judge(xp, broken=19) == judge(xp, broken=30) == judge(xp, broken=50) == ([0, 0, 0], [0])


def test_a_frame_of_another_size_failed(xp: Any) -> None:
    problem, overrun = xp.asarray(np.zeros(2, np.int32)), xp.asarray(np.zeros(1, np.int32))
    launch_frames.judge_frames(
        xp.asarray(np.array([19, 20], np.uint64)),
        xp.asarray(np.zeros(2, np.int32)),
        out=xp.asarray(np.zeros(40, np.uint8)),
        out_offset=np.array([0, 20]),
        out_nbytes=np.array([20, 20]),
        skip=xp.asarray(np.zeros(2, np.int32)),
        guard_nbytes=0,
        code=7,
        problem=problem,
        overrun=overrun,
    )
    assert (problem.tolist(), overrun.tolist()) == ([7, 0], [0])


def test_a_guard_zone_lies_behind_the_room_of_a_frame(xp: Any) -> None:
    found = []
    for broken in (20, 29, 30, 39):
        out, status, problem = (
            xp.asarray(np.zeros(40, np.uint8)),
            launch.new_status(),
            xp.asarray(np.zeros(1, np.int32)),
        )
        where, room_nbytes, overrun = np.array([0]), np.array([30]), xp.asarray(np.zeros(1, np.int32))
        launch_frames.point_frames(
            "zstd", out, where, np.array([1]), out=out, out_offset=where, out_nbytes=room_nbytes, skip=problem,
            guard_nbytes=10, status=status,
        )  # fmt: skip
        out[broken] += 1
        launch_frames.judge_frames(
            xp.asarray(np.array([20], np.uint64)), xp.asarray(np.zeros(1, np.int32)), out=out, out_offset=where,
            out_nbytes=np.array([20]), room_nbytes=room_nbytes, skip=problem, guard_nbytes=10, code=7, problem=problem,
            overrun=overrun,
        )  # fmt: skip
        found.append((problem.tolist(), overrun.tolist()))
    assert found == [([0], [0]), ([0], [0]), ([7], [7]), ([7], [7])]


def test_numbers_shared_with_the_source_are_the_same() -> None:
    source = (KERNELS / "frames.cu").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"PROBLEM_(\w+) = (\d+)", source)}
    assert numbers == {problem.name: int(problem) for problem in Problem}
    match = re.search(r"enum FrameCodec \{([^}]*)\}", source)
    assert match is not None
    assert [name.lower() for name in re.findall(r"FRAME_(\w+)", match[1])] == list(launch_frames.CODECS)
