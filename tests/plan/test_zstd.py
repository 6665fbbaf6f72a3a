"""The walk over zstd frames, with numcodecs' zstd as the judge of what a valid chunk is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import Zstd

from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.plan.zstd import ZstdFrame, ZstdHeaders, zstd_content_nbytes, zstd_frames

if TYPE_CHECKING:
    Draw = st.DrawFn

contents = st.one_of(
    st.binary(max_size=700),
    st.builds(lambda value, count: bytes([value]) * count, st.integers(0, 255), st.integers(0, 300_000)),
    st.builds(lambda unit, count: unit * count, st.binary(min_size=2, max_size=50), st.integers(0, 5000)),
)


def can_state(size_nbytes: int, content: bytes, window_log: int | None) -> bool:
    match size_nbytes:
        case 0:
            return window_log is not None
        case 1:
            return window_log is None and len(content) < 256
        case 2:
            return 256 <= len(content) < 256 + 65536
        case _:
            return True


@st.composite
def frames(draw: Draw) -> tuple[bytes, bytes, dict[str, Any]]:
    """A frame, its content, and what its header states."""
    content = draw(contents)
    window_log = draw(st.sampled_from([None, 19, 24, 27]))
    header = {
        "window_log": window_log,
        "size_nbytes": draw(st.sampled_from([n for n in (0, 1, 2, 4, 8) if can_state(n, content, window_log)])),
        "checksum": draw(st.booleans()),
    }
    return zstd_frame(content, level=draw(st.sampled_from([1, 9])), **header), content, header


@given(frames())
def test_frame_of_a_valid_chunk_is_read_as_written(frame: tuple[bytes, bytes, dict[str, Any]]) -> None:
    encoded, content, header = frame
    if content:  # numcodecs refuses a size of 0
        assert bytes(Zstd().decode(encoded)) == content
    (found,) = zstd_frames(encoded)
    assert (found.offset, found.nbytes) == (0, len(encoded))
    assert found.content_nbytes == (len(content) if header["size_nbytes"] else None)
    assert found.max_content_nbytes >= len(content)
    assert found.window_nbytes == (len(content) if header["window_log"] is None else 1 << header["window_log"])
    assert found.has_checksum is header["checksum"]
    assert found.dictionary_id == 0
    assert not found.is_skippable


@given(st.lists(st.one_of(frames(), st.binary(max_size=40)), min_size=1, max_size=4))
def test_frames_follow_each_other_to_the_end(parts: list[tuple[bytes, bytes, dict[str, Any]] | bytes]) -> None:
    encoded = [skippable_frame(part, len(part) % 16) if isinstance(part, bytes) else part[0] for part in parts]
    contents = [b"" if isinstance(part, bytes) else part[1] for part in parts]
    is_stated = all(isinstance(part, bytes) or part[2]["size_nbytes"] for part in parts)
    chunk = b"".join(encoded)
    found = zstd_frames(chunk)
    assert [frame.nbytes for frame in found] == [len(part) for part in encoded]
    assert [frame.is_skippable for frame in found] == [isinstance(part, bytes) for part in parts]
    assert zstd_content_nbytes(chunk) == (len(b"".join(contents)) if is_stated else None)


@given(frames(), st.data())
def test_chunk_cut_short_is_refused(frame: tuple[bytes, bytes, dict[str, Any]], data: st.DataObject) -> None:
    encoded = frame[0]
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(CorruptChunkError, match=r"^zstd: "):
        zstd_frames(cut)
    assert zstd_content_nbytes(cut) is None


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_end_in_frames_or_an_error(data: bytes, is_frame: bool) -> None:
    data = bytes.fromhex("28b52ffd") * is_frame + data
    try:
        found = zstd_frames(data)
    except CorruptChunkError:
        return
    assert sum(frame.nbytes for frame in found) == len(data)


@pytest.mark.parametrize(
    ("content_nbytes", "block", "max_content_nbytes"),
    [
        (70_000, "raw", 70_000),
        (70_000, "rle", 70_000),
        (70_000, "compressed", 70_000),
        (200_000, "compressed", 2 << 17),
    ],
)
def test_most_that_blocks_decode_to(content_nbytes: int, block: str, max_content_nbytes: int) -> None:
    content = {
        "raw": np.random.default_rng(1).bytes(content_nbytes),
        "rle": bytes(content_nbytes),
        "compressed": (np.arange(content_nbytes) ** 2 % 251).astype("u1").tobytes(),
    }[block]
    (frame,) = zstd_frames(zstd_frame(content))
    assert frame.max_content_nbytes == max_content_nbytes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda frame: frame[:4] + bytes([frame[4] | 8]) + frame[5:], "frame header at byte 0 breaks the format"),
        (lambda frame: frame[:13] + b"\x07\x00\x00", "block at byte 13 breaks the format, got type 3"),
        (
            lambda frame: frame[:13] + (100 << 3 | 1).to_bytes(3, "little"),
            "block at byte 13 runs past 16 encoded bytes",
        ),
        (lambda frame: frame[:13] + (1000 << 3 | 3).to_bytes(3, "little") + b"a", "got type 1 and 1000 bytes where a"),
        (lambda frame: frame + b"abcdefgh", "no frame at byte 116 of 124, got 61 62 63 64"),
        (lambda frame: frame + skippable_frame(b"abc")[:-1], "skippable frame at byte 116 runs past 126 encoded bytes"),
        (lambda frame: frame[:0], "no frame in 0 encoded bytes"),
    ],
)
def test_damage_is_named(damage: Any, message: str) -> None:
    frame = zstd_frame(np.random.default_rng(2).bytes(100))
    assert len(frame) == 4 + 1 + 8 + 3 + 100
    with pytest.raises(CorruptChunkError, match=message):
        zstd_frames(damage(frame))


@pytest.mark.parametrize(("dictionary_id", "nbytes"), [(7, 1), (700, 2), (700_000, 4), (0, 4)])
def test_dictionary_is_read(dictionary_id: int, nbytes: int) -> None:
    (frame,) = zstd_frames(zstd_frame(b"abc", dictionary_id=(dictionary_id, nbytes)))
    assert frame == ZstdFrame(0, 4 + 1 + nbytes + 8 + 3 + 3, 3, 3, 3, False, dictionary_id, False)


def test_headers_of_a_batch_are_read_as_one_by_one() -> None:
    headers = [(None, 1), (None, 2), (None, 4), (None, 8), (17, 0), (17, 2), (20, 4), (31, 8)]
    encoded = [zstd_frame(b"x" * (200 if n == 1 else 300), window_log=log, size_nbytes=n) for log, n in headers]
    heads = np.stack([np.frombuffer(frame.ljust(64, b"\0")[:64], np.uint8) for frame in encoded])
    parsed = ZstdHeaders.parse(heads)
    assert parsed.nbytes.tolist() == [6, 7, 9, 13, 6, 8, 10, 14]
    assert parsed.has_content_size.tolist() == [n > 0 for _, n in headers]
    assert parsed.content_nbytes.tolist() == [200, 300, 300, 300, 0, 300, 300, 300]
    assert parsed.window_nbytes.tolist() == [0, 0, 0, 0, 1 << 17, 1 << 17, 1 << 20, 1 << 31]
