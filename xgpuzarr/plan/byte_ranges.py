"""Which reads fetch the chunks of a plan, when an object holds many of them?

`ByteRanges` says where each chunk lies in its object. `coalesce` joins neighbours into `Spans`, each one read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MISSING", "ByteRanges", "Spans", "coalesce", "pack"]

Int64Array = npt.NDArray[np.int64]

MISSING = -1
"""In place of the size of an object, or of a chunk in a shard, that is not stored; it reads as the fill value."""


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Where encoded chunks lie; int64 columns, one row per chunk.

    Attributes
    ----------
    object_row
        Row of the chunk's object in the plan's `object_coords`.
    offset
        First byte in the object.
    nbytes
        Encoded size in bytes; `MISSING` for a chunk that is not stored.
    """

    object_row: Int64Array
    offset: Int64Array
    nbytes: Int64Array

    def order(self) -> Int64Array:
        """Rows by object, then by offset."""
        if self.object_row.max(initial=0) < 1 << 20 and self.offset.max(initial=0) < 1 << 43:
            # NumPy sorts one column of integers several times as fast as two
            return np.argsort(self.object_row << 43 | self.offset)
        return np.lexsort((self.offset, self.object_row))

    def take(self, rows: Int64Array) -> ByteRanges:
        """Those of some chunks."""
        return ByteRanges(self.object_row[rows], self.offset[rows], self.nbytes[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Reads that fetch all chunks of some `ByteRanges`; int64 columns.

    Attributes
    ----------
    object_row, offset, nbytes
        (n_spans,): the object and the byte range to read, by object then offset. Every span holds a chunk.
    chunk_span
        (n_chunks,): the span that holds the chunk; `MISSING` for a chunk that is not stored.
    chunk_offset
        (n_chunks,): the chunk's first byte in its span; `MISSING` for a chunk that is not stored.
    """

    object_row: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    chunk_span: Int64Array
    chunk_offset: Int64Array


def coalesce(ranges: ByteRanges, *, max_gap_bytes: int, max_read_bytes: int) -> Spans:
    """Join the byte ranges of each object into reads.

    Parameters
    ----------
    ranges
        Byte ranges of chunks, in any order; they may overlap. ``offset + nbytes`` fits int64.
    max_gap_bytes
        Ranges with at most this many unwanted bytes between them are joined.
    max_read_bytes
        Joining stops where a read would grow larger. A chunk is never split, so one alone may be larger.
    """
    chunk_span = np.full(len(ranges.nbytes), MISSING, np.int64)
    chunk_offset = chunk_span.copy()
    stored = np.flatnonzero(ranges.nbytes != MISSING)
    if len(stored) == 0:
        none = np.empty(0, np.int64)
        return Spans(none, none, none, chunk_span, chunk_offset)
    if len(stored) == len(chunk_span) and np.all(np.diff(ranges.object_row) > 0):
        # one chunk an object: nothing to join
        alone = np.arange(len(stored))
        return Spans(ranges.object_row, ranges.offset, ranges.nbytes, alone, np.zeros_like(alone))
    order = stored[ranges.take(stored).order()]
    object_row, offset = ranges.object_row[order], ranges.offset[order]
    stop = offset + ranges.nbytes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = object_row[1:] != object_row[:-1]
    is_apart = bool(np.all(is_first[1:] | (offset[1:] >= stop[:-1])))
    reach = stop if is_apart else _reach(stop, is_first)
    is_first[1:] |= offset[1:] - reach[:-1] > max_gap_bytes
    starts = _split(np.flatnonzero(is_first), offset, reach, max_read_bytes)
    span_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    chunk_span[order] = span_of
    chunk_offset[order] = offset - offset[starts][span_of]
    return Spans(
        object_row=object_row[starts],
        offset=offset[starts],
        nbytes=np.maximum.reduceat(stop, starts) - offset[starts],
        chunk_span=chunk_span,
        chunk_offset=chunk_offset,
    )


def pack(nbytes: Int64Array) -> tuple[Int64Array, int]:
    """Offsets that lay pieces of these sizes one after the other on 16-byte boundaries, and the room they take."""
    room = -(-nbytes // 16) * 16
    at = np.cumsum(room) - room
    return at, int(room.sum())


def _reach(stop: Int64Array, is_first: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the running maximum of `stop` within each run that `is_first` opens."""
    # Ranks are small, so adding a multiple per run keeps later runs above earlier ones without overflow.
    ascending = np.argsort(stop, kind="stable")
    rank = np.empty_like(ascending)
    rank[ascending] = np.arange(len(stop))
    run = np.cumsum(is_first) * len(stop)
    return stop[ascending[np.maximum.accumulate(rank + run) - run]]


def _split(starts: Int64Array, offset: Int64Array, reach: Int64Array, max_read_bytes: int) -> Int64Array:
    """Cut runs that are longer than `max_read_bytes`, as late as each cut can be."""
    stops = np.append(starts[1:], len(offset))
    cut = [starts]
    too_long = reach[stops - 1] - offset[starts] > max_read_bytes
    for start, stop in zip(starts[too_long].tolist(), stops[too_long].tolist(), strict=True):
        at = start
        while True:
            limit = min(int(offset[at]) + max_read_bytes, int(reach[stop - 1]))  # within int64
            fits = int(np.searchsorted(reach[at:stop], limit, side="right"))
            at += max(fits, 1)
            if at >= stop:
                break
            cut.append(np.array([at]))
    return np.sort(np.concatenate(cut))
