"""Device bytes of chunks in flight, and batches that stay within a limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.plan.byte_ranges import MISSING
from xgpuzarr.plan.memory import inflight_nbytes, peak_nbytes, split_batches


def test_a_chunk_in_flight_holds_encoded_scratch_and_decoded_bytes() -> None:
    encoded = np.array([10, 20, MISSING, MISSING], np.int64)
    is_slab = np.array([False, True, False, True])
    inflight = inflight_nbytes(encoded, decoded_nbytes=101, scratch_factor=2.5, is_slab=is_slab)
    assert inflight.dtype == np.int64
    assert inflight.tolist() == [10 + 253 + 101, 20 + 253, 101, 0]


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_batches_are_all_chunks_in_order_and_as_few_as_can_be(inflight: list[int], max_batch_bytes: int) -> None:
    batches = split_batches(np.array(inflight, np.int64), max_batch_bytes=max_batch_bytes)
    rows = [row for batch in batches for row in range(batch.start, batch.stop)]
    assert rows == list(range(len(inflight)))
    for number, batch in enumerate(batches):
        nbytes = sum(inflight[batch])
        assert batch.stop > batch.start
        assert nbytes <= max_batch_bytes or batch.stop - batch.start == 1
        if number + 1 < len(batches):
            assert nbytes + inflight[batch.stop] > max_batch_bytes


@pytest.mark.parametrize(("n_in_flight", "expected"), [(1, 1000 + 9), (2, 1000 + 14), (3, 1000 + 16), (7, 1000 + 16)])
def test_the_peak_is_the_result_and_the_largest_run_of_batches(n_in_flight: int, expected: int) -> None:
    inflight = np.array([1, 1, 4, 5, 5], np.int64)
    batches = [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert peak_nbytes(inflight, batches, n_in_flight=n_in_flight, out_nbytes=1000) == expected


def test_an_empty_read_takes_its_result() -> None:
    none = np.empty(0, np.int64)
    assert split_batches(none, max_batch_bytes=5) == []
    assert peak_nbytes(none, [], n_in_flight=2, out_nbytes=0) == 0
