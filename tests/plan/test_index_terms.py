"""Keys, axis by axis; `test_selection` holds what is refused and what the terms select."""

from __future__ import annotations

import numpy as np
import pytest

from xgpuzarr.errors import UnsupportedError
from xgpuzarr.plan.index_terms import Dropped, IndexArray, Kept, NewAxis, Separator, complete, terms


class Five:
    """An integer of some other library."""

    def __index__(self) -> int:
        return 5


def test_keys_are_completed_with_full_slices() -> None:
    full = slice(None)
    assert complete((), (3, 4)) == [full, full]
    assert complete(1, (3, 4)) == [1, full]
    assert complete((..., None, 1), (3, 4, 5)) == [full, full, None, 1]
    assert complete((0, ..., 1), (3, 4)) == [0, ..., 1]
    assert complete((Five(), np.uint8(2), np.array(3)), (9, 9, 9)) == [5, 2, 3]


def test_every_kind_of_term() -> None:
    mask = np.array([[True, False, False], [False, False, True]])
    key = (slice(None, None, -2), -1, None, mask, [-1, 0], True)
    *found, positions, scalar = terms(complete(key, (5, 4, 2, 3, 6)), (5, 4, 2, 3, 6))
    kept, dropped, new_axis, rows, columns = found
    assert (kept, dropped, new_axis) == (Kept(0, range(4, -1, -2)), Dropped(1, 3), NewAxis())
    for term, axis, expected in ((rows, 2, [0, 1]), (columns, 3, [0, 2]), (positions, 4, [5, 0]), (scalar, None, [0])):
        assert isinstance(term, IndexArray)
        assert (term.axis, term.positions.tolist()) == (axis, expected)
        assert term.positions.dtype == np.int64
    assert terms(complete((0, ..., 1), (3, 4)), (3, 4)) == [Dropped(0, 0), Separator(), Dropped(1, 1)]


def test_an_axis_that_int64_cannot_count_is_refused() -> None:
    complete(0, (2**63 - 1,))
    with pytest.raises(UnsupportedError, match="has an axis of more than 2"):
        complete(0, (3, 2**63))
