"""How much device memory does a read take beyond its result, and in which batches does it stay within a limit?

A chunk in flight holds its encoded bytes, the decoder's scratch, and its decoded bytes unless it is decoded straight
into the result. This is arithmetic on bytes; nothing is allocated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpuzarr.plan.byte_ranges import MISSING

__all__ = ["inflight_nbytes", "split_batches"]

Int64Array = npt.NDArray[np.int64]


def inflight_nbytes(
    encoded_nbytes: Int64Array, *, decoded_nbytes: int, scratch_factor: float, is_straight: npt.NDArray[np.bool_]
) -> Int64Array:
    """Device bytes that each chunk holds while its batch is in flight.

    Parameters
    ----------
    encoded_nbytes
        int64, (n_chunks,): encoded size of each chunk in bytes; `MISSING` for one that is not stored.
    decoded_nbytes
        Decoded size of a chunk, in bytes.
    scratch_factor
        Scratch of the decoder per decoded byte; 0 where nothing is decompressed.
    is_straight
        bool, (n_chunks,): the chunk is decoded straight into the result.

    Returns
    -------
    nbytes
        int64, (n_chunks,).
    """
    is_stored = encoded_nbytes != MISSING
    scratch_nbytes = int(np.ceil(decoded_nbytes * scratch_factor))
    nbytes = np.where(is_stored, encoded_nbytes + scratch_nbytes, 0)
    nbytes += np.where(is_straight, 0, decoded_nbytes)
    return nbytes


def split_batches(inflight: Int64Array, *, max_batch_bytes: int, max_first_bytes: int | None = None) -> list[slice]:
    """Cut chunks, in order, into as few batches as `max_batch_bytes` allows.

    Parameters
    ----------
    inflight
        int64, (n_chunks,): device bytes of each chunk, as `inflight_nbytes` gives them.
    max_batch_bytes
        Most device bytes of one batch. A chunk that needs more is a batch of its own: a chunk decodes whole.
    max_first_bytes
        Most of the first one. None: as of the others.

    Returns
    -------
    batches
        Rows of each batch. Together they are all rows, once; none is empty.
    """
    reach = np.cumsum(inflight)
    batches = []
    start, taken, most = 0, 0, max_batch_bytes if max_first_bytes is None else max_first_bytes
    while start < len(inflight):
        stop = max(int(np.searchsorted(reach, taken + most, side="right")), start + 1)
        batches.append(slice(start, stop))
        start, taken, most = stop, int(reach[stop - 1]), max_batch_bytes
    return batches
