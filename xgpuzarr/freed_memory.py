"""Host memory that a dask worker frees and maps again for every array: kept in the process instead.

distributed starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``. With that, glibc hands the memory of each NumPy array
above 128 KiB back to the kernel when the array is freed, and the next one is mapped anew, page by page. Planning a
block of 65 000 chunks makes some 130 such arrays: on one H200 that was 15 000 page faults and a fifth of the block's
time. Without the variable glibc learns from the first arrays freed to keep memory like theirs, within the limits set
here.

Source: ``mallopt(3)``; ``malloc/malloc.c`` of glibc 2.39, ``DEFAULT_MMAP_THRESHOLD_MAX`` and ``free``.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = ["keep_freed_memory"]

VARIABLE = "MALLOC_TRIM_THRESHOLD_"

SET_BY_DASK = "65536"
"""What distributed sets (``distributed.nanny.pre-spawn-environ``). Another value is the user's, and stays."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

MMAP_NBYTES = 32 << 20
"""Arrays from this size on are mapped by themselves; the most that glibc comes to without the variable."""


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 64 MiB of freed memory, if it is a dask worker that was told to keep none.

    Returns
    -------
    bool
        Whether anything was set: not outside of workers, where the user has chosen a value, or without glibc.
    """
    if os.environ.get(VARIABLE) != SET_BY_DASK or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_NBYTES) and mallopt(M_TRIM_THRESHOLD, 2 * MMAP_NBYTES))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # no POSIX system; no such name, as in musl
        return False
