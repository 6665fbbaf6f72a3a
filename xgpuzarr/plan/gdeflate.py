"""Where are the pages of a ``gdeflate`` chunk, and do they fit its size?

The codec of zarrs cuts a chunk into pages of 64 KiB, and writes as little-endian 64-bit integers: the decoded size, the
number of pages, and the encoded size of each; then the pages (zarrs, "gdeflate codec").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.plan.frames import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PAGE_NBYTES", "SIZE_NBYTES", "check_headers", "header_nbytes", "n_pages", "page_offsets"]

PAGE_NBYTES = 1 << 16
"""Decoded size of every page but the last, in bytes."""

SIZE_NBYTES = 8
"""Size of each number in the header, in bytes."""


def n_pages(decoded_nbytes: int) -> int:
    """Pages of a chunk of this decoded size."""
    return -(-decoded_nbytes // PAGE_NBYTES)


def header_nbytes(decoded_nbytes: int) -> int:
    """Size of everything before the first page, in bytes."""
    return SIZE_NBYTES * (2 + n_pages(decoded_nbytes))


def check_headers(headers: NDArray[np.uint64], nbytes: NDArray[np.int64], decoded_nbytes: int) -> NDArray[np.uint8]:
    """Check the headers of a batch of chunks.

    Parameters
    ----------
    headers
        uint64, shape (n, 2 + n_pages): the header that each chunk should have; whatever lies there, or zeros.
    nbytes
        int64, shape (n,): encoded size of each chunk, in bytes.
    decoded_nbytes
        Decoded size of every chunk, in bytes.

    Returns
    -------
    NDArray[np.uint8]
        A `Problem` for each chunk, shape (n,).
    """
    pages = headers[:, 2:]
    in_chunk = (pages > 0) & (pages <= nbytes[:, None].astype(np.uint64))
    total = np.where(in_chunk, pages, np.uint64(0)).sum(axis=1).astype(np.int64)
    fits = in_chunk.all(axis=1) & (header_nbytes(decoded_nbytes) + total == nbytes)
    return np.select(
        [
            nbytes < header_nbytes(decoded_nbytes),
            headers[:, 0] != decoded_nbytes,
            (headers[:, 1] != n_pages(decoded_nbytes)) | ~fits,
        ],
        [np.uint8(Problem.TOO_SHORT), np.uint8(Problem.SIZE), np.uint8(Problem.HEADER)],
        np.uint8(Problem.NONE),
    )


def page_offsets(headers: NDArray[np.uint64], decoded_nbytes: int) -> NDArray[np.int64]:
    """Where each page starts in its chunk, in bytes: int64, shape (n, n_pages)."""
    sizes = headers[:, 2:].astype(np.int64)
    return header_nbytes(decoded_nbytes) + np.cumsum(sizes, axis=1) - sizes
