"""Calls shared among threads, or not shared where they are quick."""

from __future__ import annotations

import threading
import time

import pytest

from xgpuzarr.pool import run_all


@pytest.mark.parametrize("n_items", [0, 1, 2, 50])
@pytest.mark.parametrize("quick_s", [0.0, 1e-9, 60.0])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_each_item_once(n_items: int, quick_s: float, n_threads: int) -> None:
    seen: list[int] = []
    run_all(seen.append, iter(range(n_items)), n_threads, quick_s=quick_s)
    assert sorted(seen) == list(range(n_items))


def test_quick_calls_stay_on_the_calling_thread() -> None:
    threads: list[threading.Thread] = []
    run_all(lambda _: threads.append(threading.current_thread()), range(20), 4, quick_s=60.0)
    assert set(threads) == {threading.current_thread()}


def test_a_call_that_is_not_quick_hands_the_rest_to_threads() -> None:
    threads: dict[int, threading.Thread] = {}

    def call(number: int) -> None:
        threads[number] = threading.current_thread()
        if number == 2:
            time.sleep(0.05)

    run_all(call, range(6), 2, quick_s=0.04)
    here = threading.current_thread()
    assert [threads[number] is here for number in range(6)] == [True, True, True, False, False, False]


@pytest.mark.parametrize("quick_s", [0.0, 60.0])
def test_the_first_error_is_raised(quick_s: float) -> None:
    def call(number: int) -> None:
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        run_all(call, [0], 2, quick_s=quick_s)
    with pytest.raises(ValueError, match="item"):
        run_all(call, range(5), 2, quick_s=quick_s)
