"""Where do the chunks of a shard lie? Its index says so, and is believed only once it is checked.

A shard stores, before or after its chunks, an (offset, nbytes) pair of uint64 for each chunk in C order, both
2**64 - 1 for a chunk that is not stored, and optionally a CRC32C of them (Zarr v3, "sharding_indexed" codec, version
1.0, "Binary shard format").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt

from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.plan.byte_ranges import MISSING

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable

    from xgpuzarr.plan.byte_ranges import Spans
    from xgpuzarr.plan.layout import ShardLevel

__all__ = ["bytes_after", "check_shard_ranges", "parse_shard_index"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

NOT_STORED = np.uint64(2**64 - 1)
CHECKSUM_NBYTES = 4


def parse_shard_index(raw: Buffer, level: ShardLevel, *, label: str) -> tuple[UInt64Array, UInt64Array]:
    """Parse the index of one shard and verify its checksum; the entries themselves are not checked.

    Parameters
    ----------
    raw
        The index as stored, checksum included: `level.index_nbytes` bytes on the host, C-contiguous.
    level
        The shard level.
    label
        Names the shard in errors.

    Returns
    -------
    offset, nbytes
        uint64, one entry per chunk of the shard in C order, native byte order. Both are 2**64 - 1 for a chunk that
        is not stored.

    Raises
    ------
    CorruptChunkError
        The index is short, or its checksum differs.
    """
    index = bytes(raw)
    if len(index) != level.index_nbytes:
        raise CorruptChunkError(
            f"{label}: the shard index of {math.prod(level.grid_shape)} chunks takes {level.index_nbytes} bytes,"
            f" got {len(index)}"
        )
    if level.index_checksum:
        index, checksum = index[:-CHECKSUM_NBYTES], index[-CHECKSUM_NBYTES:]
        expected, actual = int.from_bytes(checksum, "little"), google_crc32c.value(index)
        if actual != expected:
            raise CorruptChunkError(f"{label}: the shard index has CRC32C {actual:#010x}, stored is {expected:#010x}")
    pairs = np.frombuffer(index, dtype=f"{level.index_byteorder}u8").reshape(-1, 2).astype(np.uint64)
    return pairs[:, 0], pairs[:, 1]


def check_shard_ranges(
    offset: UInt64Array,
    nbytes: UInt64Array,
    level: ShardLevel,
    *,
    shard_nbytes: int | Int64Array,
    label: Callable[[int], str],
) -> tuple[Int64Array, Int64Array]:
    """Check entries of a shard's index against the shard, and turn them into int64.

    Parameters
    ----------
    offset, nbytes
        Entries as `parse_shard_index` returns them, all or some.
    level
        The shard level.
    shard_nbytes
        Stored size of the shard, in bytes, for all entries or each: of the object, or of its range in an outer shard.
        At most 2**63 - 1, which stands for a size that the store does not tell.
    label
        Names the chunk of an entry, given by its position in `offset`, in errors.

    Returns
    -------
    offset, nbytes
        int64, relative to the shard; 0 and `byte_ranges.MISSING` for chunks that are not stored.

    Raises
    ------
    CorruptChunkError
        An entry is half missing or empty, passes the end of the shard, or overlaps the index.
    """
    missing = (offset == NOT_STORED) & (nbytes == NOT_STORED)
    is_at_start = level.index_location == "start"
    index_nbytes = min(level.index_nbytes, 2**63 - 1)  # of a shard that does not exist, it may be anything
    first = index_nbytes if is_at_start else 0
    last = np.maximum(shard_nbytes - (0 if is_at_start else index_nbytes), 0).astype(np.uint64)
    is_inside = (offset >= np.uint64(first)) & (offset <= last)
    # offset + nbytes may wrap around; the difference only does where the offset is outside anyway.
    fits = nbytes <= last - offset
    bad = ~missing & ~(is_inside & fits & (nbytes > 0))
    if bad.any():
        row = int(np.argmax(bad))
        at, size = int(offset[row]), int(nbytes[row])
        raise CorruptChunkError(
            f"{label(row)}: the shard index gives it offset {at} and {size} bytes; chunks of this shard are not empty"
            f" and lie in bytes {first}:{int(np.broadcast_to(last, offset.shape)[row])}"
        )
    return np.where(missing, 0, offset).astype(np.int64), np.where(missing, MISSING, nbytes.astype(np.int64))


def bytes_after(spans: Spans, level: ShardLevel) -> Int64Array:
    """Bytes that must follow each span in its object, so that no chunk in it lies in the shard's index.

    For stores that do not tell the size of an object, where `check_shard_ranges` cannot know where the index at its end
    begins. It is enough to look behind the span of an object that ends last.

    Parameters
    ----------
    spans
        Reads of objects, ordered by object.
    level
        The outermost shard level.

    Returns
    -------
    nbytes_after
        int64, (n_spans,); 0 where nothing need follow.
    """
    nbytes_after = np.zeros(len(spans.nbytes), np.int64)
    if level.index_location == "end" and len(nbytes_after):
        stop = spans.offset + spans.nbytes
        is_first = np.diff(spans.object_row, prepend=spans.object_row[0] - 1) != 0
        last_stop = np.maximum.reduceat(stop, np.flatnonzero(is_first))[np.cumsum(is_first) - 1]
        nbytes_after[stop == last_stop] = level.index_nbytes
    return nbytes_after
