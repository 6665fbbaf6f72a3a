"""Device bytes of chunks in flight, and batches that stay within a limit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.plan.byte_ranges import MISSING
from xgpuzarr.plan.memory import inflight_nbytes, split_batches


def test_a_chunk_in_flight_holds_encoded_scratch_and_decoded_bytes() -> None:
    encoded = np.array([10, 20, MISSING, MISSING], np.int64)
    is_straight = np.array([False, True, False, True])
    inflight = inflight_nbytes(encoded, decoded_nbytes=101, scratch_factor=2.5, is_straight=is_straight)
    assert inflight.dtype == np.int64
    assert inflight.tolist() == [10 + 253 + 101, 20 + 253, 101, 0]


@given(st.lists(st.integers(0, 50)), st.integers(1, 100), st.none() | st.integers(1, 100))
def test_batches_are_all_chunks_in_order_and_as_few_as_can_be(
    inflight: list[int], max_batch_bytes: int, max_first_bytes: int | None
) -> None:
    batches = split_batches(
        np.array(inflight, np.int64), max_batch_bytes=max_batch_bytes, max_first_bytes=max_first_bytes
    )
    rows = [row for batch in batches for row in range(batch.start, batch.stop)]
    assert rows == list(range(len(inflight)))
    for number, batch in enumerate(batches):
        nbytes = sum(inflight[batch])
        most = max_first_bytes if number == 0 and max_first_bytes is not None else max_batch_bytes
        assert batch.stop > batch.start
        assert nbytes <= most or batch.stop - batch.start == 1
        if number + 1 < len(batches):
            assert nbytes + inflight[batch.stop] > most


def test_no_chunks_are_no_batches() -> None:
    assert split_batches(np.empty(0, np.int64), max_batch_bytes=5) == []
