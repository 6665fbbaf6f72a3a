"""Host memory that a dask worker gives back and maps again for every array: some of it kept instead.

distributed starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``. With that, glibc hands the memory of each NumPy array
above 128 KiB back to the kernel when the array is freed, and the next one is mapped anew, page by page. Planning a
block of 65 000 chunks for the device makes some 130 such arrays: on one H200 that was 15 000 page faults and a fifth of
the block's time. The limits set here are for columns of that size. They are far below those that glibc comes to by
itself, with which workers kept so much decoded data that dask paused them.

Source: ``mallopt(3)``; ``malloc/malloc.c`` and ``malloc/arena.c`` of glibc 2.39.
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

MMAP_NBYTES = 8 << 20
"""Arrays from this size on are mapped by themselves, and given back: three columns of 350 000 chunks."""

KEPT_NBYTES = 32 << 20
"""Most of what a thread has freed that is kept."""


@functools.cache
def keep_freed_memory() -> bool:
    """Let each thread of this process keep some freed memory, if distributed's setting has it keep none.

    Returns
    -------
    bool
        Whether anything was set: not without that setting, beside settings of the user's, or without glibc.
    """
    if os.environ.get(VARIABLE) != SET_BY_DASK or _has_own_settings() or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_NBYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_NBYTES))


def _has_own_settings() -> bool:
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # no POSIX system; no such name, as in musl
        return False
