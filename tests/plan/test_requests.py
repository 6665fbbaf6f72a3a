"""Requests bring every byte of a span once, and no answer of one size is taken for all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.plan.requests import MIN_SPAN_NBYTES, cut


@given(span_nbytes=st.lists(st.integers(1, 5000), max_size=6), max_nbytes=st.integers(MIN_SPAN_NBYTES, 2000))
def test_parts_of_each_span(span_nbytes: list[int], max_nbytes: int) -> None:
    requests = cut(np.array(span_nbytes, np.int64), max_nbytes)
    assert (np.diff(requests.span) >= 0).all()
    assert (requests.nbytes <= max_nbytes).all()
    for span, nbytes in enumerate(span_nbytes):
        mine = requests.span == span
        start, stop = requests.start[mine].tolist(), requests.stop[mine].tolist()
        if nbytes < MIN_SPAN_NBYTES:
            assert start == []
            continue
        assert [0, *stop] == [*start, nbytes]
        assert requests.nbytes[mine].min() >= MIN_SPAN_NBYTES // 2 - 1
        assert len(set(requests.nbytes[mine].tolist())) > 1


def test_cuts_are_even_but_for_a_byte() -> None:
    requests = cut(np.array([100, 101, 10, 300]), 100)
    assert requests.span.tolist() == [0, 0, 1, 1, 3, 3, 3, 3]
    assert requests.start.tolist() == [0, 51, 0, 50, 0, 76, 150, 225]
    assert requests.nbytes.tolist() == [51, 49, 50, 51, 76, 74, 75, 75]


def test_sizes_beyond_int32() -> None:
    requests = cut(np.array([10**13]), 10**12)
    assert requests.stop[-1] == 10**13
    assert requests.nbytes.max() <= 10**12
