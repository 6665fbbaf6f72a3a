"""Where in its object does each chunk of a plan lie? Shard indexes are read and checked here, before any chunk is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.plan.byte_ranges import ByteRanges
from xgpuzarr.plan.shard_index import check_shard_ranges, parse_shard_index
from xgpuzarr.readers.protocol import MISSING, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from xgpuzarr.plan.layout import ShardLevel
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.readers.protocol import Reader

    type Map = Callable[[Callable[[int], None], Iterable[int]], None]

__all__ = ["locate", "rows_by_object"]

UNKNOWN_NBYTES = 1 << 62
"""Stands for the size of an object that the store does not tell cheaply: no bound, a read past the end is an error."""


def locate(plan: ReadPlan, reader: Reader, run_all: Map) -> ByteRanges:
    """Byte range of every chunk of a plan of a sharded array.

    Parameters
    ----------
    plan
        Its layout has at least one shard level.
    reader
        Reader of the array's store.
    run_all
        Calls a function with each of many numbers, in any order and on any threads.

    Returns
    -------
    ByteRanges
        Rows as in the plan; ``nbytes == MISSING`` for chunks that do not exist.

    Raises
    ------
    CorruptChunkError
        An index is damaged, or leads outside its shard.
    ChunkReadError
        A shard cannot be read.
    """
    offset = np.zeros(plan.n_chunks, np.int64)
    nbytes = np.full(plan.n_chunks, MISSING, np.int64)
    rows, starts = rows_by_object(plan)

    def locate_object(number: int) -> None:
        mine = rows[starts[number] : starts[number + 1]]
        found = _locate_in_object(plan, reader, number, mine)
        if found is not None:
            offset[mine], nbytes[mine] = found

    run_all(locate_object, range(plan.n_objects))
    return ByteRanges(plan.object_row, offset, nbytes)


def rows_by_object(plan: ReadPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Plan rows sorted by object, and where each object's rows start (one entry more than there are objects)."""
    rows = np.argsort(plan.object_row, kind="stable")
    starts = np.searchsorted(plan.object_row[rows], np.arange(plan.n_objects + 1))
    return rows, starts.astype(np.int64)


def _locate_in_object(
    plan: ReadPlan, reader: Reader, number: int, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Byte ranges of the chunks at `rows`, all in one object; None if the object does not exist."""
    key = plan.keys(slice(number, number + 1))[0]
    object_nbytes = reader.object_nbytes(key)
    if object_nbytes == MISSING:
        return None
    # shards found so far, outermost first a single one: the object
    start, nbytes = np.zeros(1, np.int64), np.full(1, UNKNOWN_NBYTES if object_nbytes is None else object_nbytes)
    in_shard = np.zeros(len(rows), np.int64)
    for depth, level in enumerate(plan.layout.shard_levels):
        tables = _read_indexes(plan, reader, key, level, start, nbytes)
        if tables is None:
            return None
        chunk_start, chunk_nbytes = np.zeros(len(rows), np.int64), np.full(len(rows), MISSING, np.int64)
        for shard, (offset_table, nbytes_table) in tables.items():
            inside = np.flatnonzero(in_shard == shard)
            entries = plan.level_index[rows[inside], depth]
            offset, size = check_shard_ranges(
                offset_table[entries],
                nbytes_table[entries],
                level,
                shard_nbytes=int(nbytes[shard]),
                label=partial(_label, plan, rows[inside]),
            )
            chunk_start[inside], chunk_nbytes[inside] = offset + start[shard], size
        pairs = np.stack([in_shard, plan.level_index[rows, depth]], axis=1)
        _, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        start, nbytes, in_shard = chunk_start[first], chunk_nbytes[first], inverse.reshape(-1)
    return chunk_start, chunk_nbytes


def _label(plan: ReadPlan, rows: NDArray[np.int64], number: int) -> str:
    return plan.label(int(rows[number]))


def _read_indexes(
    plan: ReadPlan,
    reader: Reader,
    key: str,
    level: ShardLevel,
    start: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> dict[int, tuple[NDArray[np.uint64], NDArray[np.uint64]]] | None:
    """Read the index of each shard of an object that exists; None if the object does not."""
    label = f"array {plan.layout.path!r}, key {key!r}"
    shards = np.flatnonzero(nbytes != MISSING).tolist()
    ranges = []
    for shard in shards:
        at, size = int(start[shard]), int(nbytes[shard])
        if size < level.index_nbytes:
            raise CorruptChunkError(
                f"{label}: a shard of {size} bytes is too short for its index of {level.index_nbytes} bytes"
            )
        if level.index_location == "end":
            # of an object of unknown size the last bytes can be asked for
            at = -level.index_nbytes if size == UNKNOWN_NBYTES else at + size - level.index_nbytes
        ranges.append((at, level.index_nbytes))
    if not ranges:
        return {}
    (raws,) = reader.read([ObjectRead(key, tuple(ranges))])
    if raws is None:
        return None
    return {shard: parse_shard_index(raw, level, label=label) for shard, raw in zip(shards, raws, strict=True)}
