"""Joining byte ranges: every chunk is found in its span, and no read is larger or stranger than asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.plan.byte_ranges import MISSING, ByteRanges, Spans, coalesce, pack

Range = tuple[int, int, int]


def ranges_of(rows: list[Range]) -> ByteRanges:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return ByteRanges(*columns.T)


def spans_of(rows: list[Range], max_gap_bytes: int = 0, max_read_bytes: int = 10**6) -> list[Range]:
    return as_rows(coalesce(ranges_of(rows), max_gap_bytes=max_gap_bytes, max_read_bytes=max_read_bytes))


def as_rows(spans: Spans) -> list[Range]:
    return list(zip(spans.object_row.tolist(), spans.offset.tolist(), spans.nbytes.tolist(), strict=True))


rows_strategy = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(-1, 12)))


@given(rows_strategy, st.integers(0, 10), st.integers(1, 40))
def test_spans_hold_every_chunk_and_little_else(rows: list[Range], max_gap_bytes: int, max_read_bytes: int) -> None:
    spans = coalesce(ranges_of(rows), max_gap_bytes=max_gap_bytes, max_read_bytes=max_read_bytes)
    members: list[list[Range]] = [[] for _ in spans.offset]
    for row, span, at in zip(rows, spans.chunk_span.tolist(), spans.chunk_offset.tolist(), strict=True):
        object_row, offset, nbytes = row
        if nbytes == MISSING:
            assert (span, at) == (MISSING, MISSING)
            continue
        assert spans.object_row[span] == object_row
        assert spans.offset[span] + at == offset
        assert 0 <= at <= at + nbytes <= spans.nbytes[span]
        members[span].append(row)
    for (_, offset, nbytes), held in zip(as_rows(spans), members, strict=True):
        assert offset == min(at for _, at, _ in held)
        assert offset + nbytes == max(at + size for _, at, size in held)
        assert nbytes <= max_read_bytes or nbytes == max(size for _, _, size in held) or len(held) == 1
        covered = offset
        for _, at, size in sorted(held):
            assert at - covered <= max_gap_bytes
            covered = max(covered, at + size)
    places = [(object_row, offset) for object_row, offset, _ in as_rows(spans)]
    assert places == sorted(places)


@given(rows_strategy, st.integers(0, 10))
def test_neighbours_within_the_gap_are_joined(rows: list[Range], max_gap_bytes: int) -> None:
    spans = spans_of(rows, max_gap_bytes)
    for (left_object, offset, nbytes), (right_object, right, _) in itertools.pairwise(spans):
        assert left_object != right_object or right - (offset + nbytes) > max_gap_bytes


def test_by_hand() -> None:
    rows = [(1, 30, 10), (0, 0, 10), (0, 10, 5), (0, 20, 5), (0, 0, MISSING), (1, 0, 20)]
    assert spans_of(rows) == [(0, 0, 15), (0, 20, 5), (1, 0, 20), (1, 30, 10)]
    assert spans_of(rows, max_gap_bytes=5) == [(0, 0, 25), (1, 0, 20), (1, 30, 10)]
    assert spans_of(rows, max_gap_bytes=10) == [(0, 0, 25), (1, 0, 40)]
    spans = coalesce(ranges_of(rows), max_gap_bytes=5, max_read_bytes=100)
    assert spans.chunk_span.tolist() == [2, 0, 0, 0, MISSING, 1]
    assert spans.chunk_offset.tolist() == [0, 0, 10, 20, MISSING, 0]


@pytest.mark.parametrize(
    ("max_read_bytes", "expected"),
    [
        (30, [(0, 0, 30), (0, 30, 10)]),
        (29, [(0, 0, 20), (0, 20, 20)]),
        (10, [(0, 0, 10), (0, 10, 10), (0, 20, 10), (0, 30, 10)]),
        (1, [(0, 0, 10), (0, 10, 10), (0, 20, 10), (0, 30, 10)]),
    ],
)
def test_reads_are_cut_between_chunks(max_read_bytes: int, expected: list[Range]) -> None:
    assert spans_of([(0, 10 * k, 10) for k in range(4)], max_read_bytes=max_read_bytes) == expected


def test_chunks_in_objects_of_their_own_are_read_alone() -> None:
    ranges = ByteRanges(np.array([0, 2, 5]), np.array([0, 7, 0]), np.array([10, 3, 0]))
    spans = coalesce(ranges, max_gap_bytes=100, max_read_bytes=1)
    assert (spans.object_row.tolist(), spans.offset.tolist()) == ([0, 2, 5], [0, 7, 0])
    assert spans.nbytes.tolist() == [10, 3, 0]
    assert (spans.chunk_span.tolist(), spans.chunk_offset.tolist()) == ([0, 1, 2], [0, 0, 0])


def test_a_chunk_inside_another_is_read_with_it() -> None:
    assert spans_of([(0, 0, 100), (0, 10, 5), (0, 100, 10)]) == [(0, 0, 110)]


def test_nothing_stored_is_nothing_to_read() -> None:
    assert spans_of([]) == []
    assert spans_of([(0, 0, MISSING)]) == []


def test_offsets_near_the_end_of_int64_do_not_overflow() -> None:
    top = 2**63 - 1
    assert spans_of([(0, 0, 5), (0, top - 9, 9), (1, top - 5, 5)], max_gap_bytes=top) == [
        (0, 0, 5),
        (0, top - 9, 9),
        (1, top - 5, 5),
    ]


def test_pieces_are_packed_on_boundaries_of_16_bytes() -> None:
    at, nbytes = pack(np.array([1, 16, 0, 17]))
    assert (at.tolist(), nbytes) == ([0, 16, 32, 32], 64)
