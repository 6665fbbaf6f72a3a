"""One pool of host threads for all reads of the process: reads at once (dask threads) must not multiply threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["executor", "run_all"]

_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def run_all[T](call: Callable[[T], None], items: Iterable[T], n_threads: int, *, quick_s: float = 0.0) -> None:
    """Call a function with each item on `n_threads` threads; the first error stops the rest and is raised.

    No call is running any more when this returns or raises.

    Parameters
    ----------
    quick_s
        While calls take less than so many seconds, they are made on the calling thread, one after the other.
    """
    todo = deque(items)
    took_s = 0.0
    while todo and (len(todo) == 1 or n_threads == 1 or took_s < quick_s):
        began = time.perf_counter()
        call(todo.popleft())
        took_s = time.perf_counter() - began
    if not todo:
        return
    pool = executor(n_threads)
    futures = [pool.submit(call, item) for item in todo]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # none may still write to the output once it is handed out or dropped


def executor(n_threads: int) -> ThreadPoolExecutor:
    """Give the pool of `n_threads` threads of this process."""
    with _pools_lock:
        if n_threads not in _pools:
            _pools[n_threads] = ThreadPoolExecutor(n_threads, thread_name_prefix="xgpuzarr")
        return _pools[n_threads]


def _forget_pools() -> None:
    """Threads do not survive a fork: the child makes its own."""
    global _pools_lock  # noqa: PLW0603
    _pools.clear()
    _pools_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
