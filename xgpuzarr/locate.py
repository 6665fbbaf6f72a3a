"""Where in its object does each chunk of a plan lie? Shard indexes are read and checked here, before any chunk is.

1. Objects are taken in blocks, so that their indexes fit in memory.
2. At each level of sharding the indexes of all shards are read on many threads, each object opened once.
3. The entries of all chunks are then picked and checked at once, and are the shards of the next level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import ChunkReadError, CorruptChunkError, UnsupportedError
from xgpuzarr.plan.byte_ranges import ByteRanges
from xgpuzarr.plan.shard_index import NOT_STORED, check_shard_ranges, parse_shard_index
from xgpuzarr.pool import run_all
from xgpuzarr.readers.protocol import MISSING, ObjectRead
from xgpuzarr.readers.store import StoreReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgpuzarr.plan.layout import ShardLevel
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.readers.protocol import Reader, ReadError

__all__ = ["locate"]

UNKNOWN_NBYTES = 1 << 62
"""Stands for the size of an object that the store does not tell cheaply. A read past the end is an error, and so is one
of chunks that the index cannot follow (`xgpuzarr.plan.shard_index.bytes_after`)."""

OBJECTS_A_TASK = 64
"""Objects whose sizes or indexes one task asks for: many take as long as starting a task."""

QUICK_S = 0.01
"""A task that takes less, in seconds, found its bytes in the page cache. The time is Python's own then, and twice as
much on several threads, which wait for one another's lock."""

REMOTE_OBJECTS_A_TASK = 4096
"""The same for stores that answer requests, where many are under way at once."""

INDEXES_NBYTES = 256 << 20
"""Most bytes of indexes held at once, and of one: 16 million chunks in a shard."""


def locate(plan: ReadPlan, reader: Reader, n_threads: int, rows: NDArray[np.int64]) -> ByteRanges:
    """Byte ranges of chunks of a sharded array.

    Parameters
    ----------
    plan
        Its layout has at least one shard level.
    reader
        Reader of the array's store.
    n_threads
        Threads to read indexes on, where storage is slow enough for several to help.
    rows
        Plan rows of the chunks, in any order.

    Returns
    -------
    ByteRanges
        One row for each of `rows`; ``nbytes == MISSING`` for chunks that do not exist.

    Raises
    ------
    CorruptChunkError
        An index is damaged, or leads outside its shard.
    ChunkReadError
        A shard cannot be read.
    UnsupportedError
        A shard has an index of more than `INDEXES_NBYTES`.
    """
    object_row = plan.object_row[rows]
    offset = np.zeros(len(rows), np.int64)
    nbytes = np.full(len(rows), MISSING, np.int64)
    order = np.argsort(object_row, kind="stable")
    sorted_objects = object_row[order]
    block = max(1, INDEXES_NBYTES // max(level.index_nbytes for level in plan.layout.shard_levels))
    first = 0
    while first < len(rows):
        start = int(sorted_objects[first])
        last = int(np.searchsorted(sorted_objects, start + block))
        mine = order[first:last]
        offset[mine], nbytes[mine] = _locate_block(plan, reader, n_threads, start, rows[mine])
        first = last
    return ByteRanges(object_row, offset, nbytes)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Shards of one level: the object each is in, and its byte range there; `MISSING` bytes if it does not exist."""

    object: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def _locate_block(
    plan: ReadPlan, reader: Reader, n_threads: int, start: int, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte ranges of the chunks at `rows`, which are in the objects from row `start` on."""
    in_object = plan.object_row[rows] - start
    keys = plan.keys(slice(start, start + int(in_object[-1]) + 1))
    shards = _Shards(np.arange(len(keys)), np.zeros(len(keys), np.int64), _object_nbytes(plan, reader, keys, n_threads))
    in_shard = in_object
    for depth, level in enumerate(plan.layout.shard_levels):
        entries = plan.level_index[rows, depth]
        chunk_offset, chunk_nbytes = check_shard_ranges(
            *_read_entries(plan, reader, n_threads, keys, depth, shards, in_shard, entries),
            level,
            shard_nbytes=np.where(shards.nbytes == MISSING, UNKNOWN_NBYTES, shards.nbytes)[in_shard],
            label=lambda number: plan.label(int(rows[number])),
        )
        chunk_offset += shards.start[in_shard]
        if depth + 1 < len(plan.layout.shard_levels):
            number = in_shard * (int(entries.max()) + 1) + entries
            _, first, in_shard = np.unique(number, return_index=True, return_inverse=True)
            shards = _Shards(in_object[first], chunk_offset[first], chunk_nbytes[first])
    return chunk_offset, chunk_nbytes


def _object_nbytes(plan: ReadPlan, reader: Reader, keys: list[str], n_threads: int) -> NDArray[np.int64]:
    nbytes = np.empty(len(keys), np.int64)

    def look(start: int) -> None:
        try:
            sizes = [reader.object_nbytes(key) for key in keys[start : start + OBJECTS_A_TASK]]
        except ChunkReadError as error:
            raise _named(plan, error) from error
        nbytes[start : start + len(sizes)] = [UNKNOWN_NBYTES if size is None else size for size in sizes]

    run_all(look, range(0, len(keys), OBJECTS_A_TASK), n_threads, quick_s=QUICK_S)
    return nbytes


def _read_entries(
    plan: ReadPlan,
    reader: Reader,
    n_threads: int,
    keys: list[str],
    depth: int,
    shards: _Shards,
    in_shard: NDArray[np.int64],
    entries: NDArray[np.int64],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Offset and size that a shard's index gives each chunk, as stored; nothing is stored in shards that do not exist.

    Chunk i is entry ``entries[i]`` of shard ``in_shard[i]``.
    """
    level, outermost = plan.layout.shard_levels[depth], plan.layout.shard_levels[0]
    offset = np.full(len(in_shard), NOT_STORED)
    nbytes = offset.copy()
    by_object, object_bounds = _grouped(shards.object, len(keys))
    by_shard, shard_bounds = _grouped(in_shard, len(shards.object))
    is_too_large = level.index_nbytes > INDEXES_NBYTES
    nbytes_after = outermost.index_nbytes if depth and outermost.index_location == "end" else 0
    is_remote = isinstance(reader, StoreReader)
    n_at_once = REMOTE_OBJECTS_A_TASK if is_remote else OBJECTS_A_TASK

    def read_objects(start: int) -> None:
        wanted: list[tuple[str, list[int], ObjectRead]] = []
        for number in range(start, min(start + n_at_once, len(keys))):
            label = f"array {plan.layout.path!r} of store {plan.layout.store_name!r}, key {keys[number]!r}"
            mine = by_object[object_bounds[number] : object_bounds[number + 1]]
            present = mine[shards.nbytes[mine] != MISSING].tolist()
            places = [_index_place(level, int(shards.start[s]), int(shards.nbytes[s]), label) for s in present]
            if places:
                wanted.append((label, present, ObjectRead(keys[number], tuple(places), nbytes_after)))
        try:
            found = reader.read([item for *_, item in wanted])
        except (ChunkReadError, CorruptChunkError) as error:
            raise _named(plan, error) from error
        for (label, present, _), raws in zip(wanted, found, strict=True):
            if raws is None and shards.nbytes[present[0]] != UNKNOWN_NBYTES:
                raise ChunkReadError(f"{label}: the shard vanished while it was being read")
            if raws is not None and is_too_large:
                raise UnsupportedError(
                    f"{label}: a shard of {math.prod(level.grid_shape)} chunks has an index of {level.index_nbytes} "
                    f"bytes, which may take {INDEXES_NBYTES}; write the array with larger chunks, or smaller shards"
                )
            for shard, raw in zip(present, raws or [], strict=raws is not None):
                index = parse_shard_index(raw, level, label=label)
                chunks = by_shard[shard_bounds[shard] : shard_bounds[shard + 1]]
                offset[chunks], nbytes[chunks] = (column[entries[chunks]] for column in index)

    run_all(read_objects, range(0, len(keys), n_at_once), n_threads, quick_s=0.0 if is_remote else QUICK_S)
    return offset, nbytes


def _named(plan: ReadPlan, error: ReadError) -> ReadError:
    """Name the array too, in the error of a reader, which knows store and key."""
    return type(error)(f"array {plan.layout.path!r}, shard index: {error}")


def _grouped(owner: NDArray[np.int64], n_owners: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices into `owner` by the value there, and where those of each value start, with the end of the last."""
    order = np.argsort(owner, kind="stable")
    return order, np.searchsorted(owner[order], np.arange(n_owners + 1))


def _index_place(level: ShardLevel, start: int, nbytes: int, label: str) -> tuple[int, int]:
    """Byte range, in its object, of the index of a shard."""
    if nbytes < level.index_nbytes and nbytes != UNKNOWN_NBYTES:
        raise CorruptChunkError(
            f"{label}: a shard of {nbytes} bytes is too short for its index of {level.index_nbytes} bytes"
        )
    if level.index_nbytes > INDEXES_NBYTES:  # it is not read: a byte tells whether the shard exists
        return start, 1
    if level.index_location == "start":
        return start, level.index_nbytes
    if nbytes == UNKNOWN_NBYTES:  # its last bytes can still be asked for
        return -level.index_nbytes, level.index_nbytes
    return start + nbytes - level.index_nbytes, level.index_nbytes
