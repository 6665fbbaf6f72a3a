"""Shard indexes: what zarr-python writes is found, and what is damaged is refused."""

from __future__ import annotations

import struct
from typing import Any, Literal

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.plan.byte_ranges import MISSING, Spans
from xgpuzarr.plan.layout import ShardLevel
from xgpuzarr.plan.shard_index import bytes_after, check_shard_ranges, parse_shard_index

NOT_STORED = 2**64 - 1


def level_of(
    n_chunks: int,
    location: Literal["start", "end"] = "end",
    byteorder: Literal["<", ">"] = "<",
    *,
    checksum: bool = True,
) -> ShardLevel:
    return ShardLevel((n_chunks,), (1,), location, byteorder, checksum)


def check(entries: list[tuple[int, int]], level: ShardLevel, shard_nbytes: int = 1000) -> list[tuple[int, int]]:
    offset, nbytes = np.array(entries, np.uint64).T
    checked = check_shard_ranges(offset, nbytes, level, shard_nbytes=shard_nbytes, label="chunk {}".format)
    assert [column.dtype for column in checked] == [np.int64, np.int64]
    return list(zip(*(column.tolist() for column in checked), strict=True))


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("checksum", [False, True])
def test_chunks_that_zarr_wrote_are_found(
    location: Literal["start", "end"], endian: Literal["little", "big"], checksum: bool
) -> None:
    codec = ShardingCodec(
        chunk_shape=(2, 3),
        codecs=[BytesCodec(endian="little")],
        index_codecs=[BytesCodec(endian=endian), *([Crc32cCodec()] if checksum else [])],
        index_location=location,
    )
    store: dict[str, Any] = {}
    array = zarr.create_array(
        store, shape=(4, 9), dtype="<i4", chunks=(4, 9), serializer=codec, compressors=None, fill_value=0
    )
    values = np.arange(36, dtype="<i4").reshape(4, 9)
    values[:2, 3:6] = 0  # equals the fill value, so it is not stored
    array[:] = values
    shard = store["c/0/0"].to_bytes()

    level = ShardLevel((4, 9), (2, 3), location, "<" if endian == "little" else ">", checksum)
    raw = shard[: level.index_nbytes] if location == "start" else shard[-level.index_nbytes :]
    offset, nbytes = check_shard_ranges(
        *parse_shard_index(raw, level, label="shard"), level, shard_nbytes=len(shard), label=str
    )
    assert nbytes.tolist() == [24, MISSING, 24, 24, 24, 24]
    for number in np.flatnonzero(nbytes != MISSING).tolist():
        i, j = divmod(number, 3)
        chunk = np.frombuffer(shard, "<i4", 6, offset[number]).reshape(2, 3)
        np.testing.assert_array_equal(chunk, values[2 * i : 2 * i + 2, 3 * j : 3 * j + 3])


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1), st.booleans())
def test_entries_are_read_exactly(entries: list[tuple[int, int]], big: bool) -> None:
    byteorder: Literal["<", ">"] = ">" if big else "<"
    raw = struct.pack(f"{byteorder}{2 * len(entries)}Q", *(number for entry in entries for number in entry))
    level = level_of(len(entries), byteorder=byteorder)
    raw += struct.pack("<I", google_crc32c.value(raw))
    for buffer in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.uint8)):
        offset, nbytes = parse_shard_index(buffer, level, label="shard")
        assert offset.dtype == nbytes.dtype == np.dtype("=u8")
        assert list(zip(offset.tolist(), nbytes.tolist(), strict=True)) == entries


@given(st.integers(0, 8 * 36 - 1))
def test_any_flipped_bit_fails_the_checksum(bit: int) -> None:
    raw = bytearray(struct.pack("<4Q", 0, 10, 10, 20))
    raw += struct.pack("<I", google_crc32c.value(bytes(raw)))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptChunkError, match=r"shard 'x': the shard index has CRC32C 0x[0-9a-f]{8}, stored is 0x"):
        parse_shard_index(raw, level_of(2), label="shard 'x'")


@pytest.mark.parametrize("n_bytes", [0, 35, 37])
def test_an_index_of_another_size_is_corrupt(n_bytes: int) -> None:
    with pytest.raises(CorruptChunkError, match=f"the shard index of 2 chunks takes 36 bytes, got {n_bytes}"):
        parse_shard_index(bytes(n_bytes), level_of(2), label="shard")


def test_entries_inside_the_shard_pass() -> None:
    end, start = level_of(4), level_of(4, "start")
    assert end.index_nbytes == 68
    entries = [(0, 932), (931, 1), (NOT_STORED, NOT_STORED)]
    assert check(entries, end) == [(0, 932), (931, 1), (0, MISSING)]
    assert check([(68, 932), (999, 1)], start) == [(68, 932), (999, 1)]
    assert check([(68, 2**63 - 69)], start, 2**63 - 1) == [(68, 2**63 - 69)]


@pytest.mark.parametrize(
    ("level", "entry"),
    [
        (level_of(4), (0, 933)),  # into the index
        (level_of(4), (932, 1)),
        (level_of(4, "start"), (67, 5)),
        (level_of(4), (5000, 1)),  # beyond the end
        (level_of(4, "start"), (68, 933)),
        (level_of(4), (2**64 - 2, 10)),  # wraps around to 8
        (level_of(4), (10, 2**64 - 5)),
        (level_of(4), (NOT_STORED, 10)),  # half missing
        (level_of(4), (0, NOT_STORED)),
        (level_of(4), (10, 0)),  # nothing decodes from nothing
    ],
)
def test_entries_that_lead_elsewhere_are_corrupt(level: ShardLevel, entry: tuple[int, int]) -> None:
    with pytest.raises(CorruptChunkError) as caught:
        check([(100, 5), (NOT_STORED, NOT_STORED), entry, entry], level)
    first, last = (0, 932) if level.index_location == "end" else (68, 1000)
    assert str(caught.value) == (
        f"chunk 2: the shard index gives it offset {entry[0]} and {entry[1]} bytes;"
        f" chunks of this shard are not empty and lie in bytes {first}:{last}"
    )


@pytest.mark.parametrize("entry", [(2**63, 1), (2**63 - 1, 1), (2**64 - 2, 2), (1, 0)])
def test_in_the_largest_shard_ranges_still_fit_int64(entry: tuple[int, int]) -> None:
    with pytest.raises(CorruptChunkError):
        check([entry], level_of(4, "start"), 2**63 - 1)


def test_a_shard_smaller_than_its_index_holds_nothing() -> None:
    with pytest.raises(CorruptChunkError):
        check([(0, 1)], level_of(4), 20)
    assert check([(NOT_STORED, NOT_STORED)], level_of(4), 20) == [(0, MISSING)]


def test_the_index_must_follow_the_span_that_ends_last() -> None:
    columns = {"object_row": [2, 2, 2, 5, 7, 7], "offset": [0, 10, 40, 0, 0, 50], "nbytes": [9, 90, 20, 3, 60, 10]}
    spans = Spans(**{name: np.array(column) for name, column in columns.items()}, chunk_span=None, chunk_offset=None)
    assert bytes_after(spans, level_of(3)).tolist() == [0, 52, 0, 52, 52, 52]
    assert bytes_after(spans, level_of(3, "start")).tolist() == [0] * 6


def test_no_spans_need_no_bytes_after() -> None:
    none = np.empty(0, np.int64)
    assert bytes_after(Spans(none, none, none, none, none), level_of(3)).tolist() == []


@pytest.mark.parametrize("location", ["start", "end"])
def test_a_shard_that_does_not_exist_may_have_any_index(location: Literal["start", "end"]) -> None:
    assert check([(NOT_STORED, NOT_STORED)], level_of(2**70, location)) == [(0, MISSING)]
