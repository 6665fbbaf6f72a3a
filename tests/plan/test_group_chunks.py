"""Chunks touched by one group, by hand and counted; `test_read_plan` follows their regions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.plan.group_chunks import PointChunks, SliceChunks, group_chunks, linear_ids, n_touched
from xgpuzarr.plan.selection import AxisSlice, Points


@given(st.integers(0, 50), st.integers(-9, 9).filter(bool), st.integers(0, 12), st.integers(1, 8))
def test_a_slice_touches_the_chunks_of_its_positions(start: int, step: int, count: int, length: int) -> None:
    start -= min(0, step * max(count - 1, 0))
    group = AxisSlice(0, start, step, count)
    table = group_chunks(group, (100,), (length,))
    assert isinstance(table, SliceChunks)
    expected = sorted({(start + step * i) // length for i in range(count)})
    assert table.chunk_coords.tolist() == [[chunk] for chunk in expected]
    assert n_touched(group, length) == len(expected)
    assert sorted(table.count.tolist()) == sorted(
        sum((start + step * i) // length == chunk for i in range(count)) for chunk in expected
    )


def test_a_slice_by_hand() -> None:
    table = group_chunks(AxisSlice(0, 9, -2, 4), (4,), (3,))  # 9 7 5 3
    assert isinstance(table, SliceChunks)
    assert table.chunk_coords.tolist() == [[1], [2], [3]]
    assert table.out_start.tolist() == [2, 1, 0]
    assert table.count.tolist() == [2, 1, 1]
    assert table.inner_start.tolist() == [2, 1, 0]
    assert table.region(0) == (slice(2, 4), (slice(2, None, -2),))
    assert table.output_rows().tolist() == [2, 1, 0, 0]
    assert table.output_inner()[0].tolist() == [0, 1, 2, 0]


def test_points_by_hand() -> None:
    coords = (np.array([9, 0, 8, 1]), np.array([0, 5, 1, 5]))
    table = group_chunks(Points((0, 2), coords), (4, 3), (3, 2))
    assert isinstance(table, PointChunks)
    assert table.chunk_coords.tolist() == [[0, 2], [2, 0], [3, 0]]
    assert table.order is not None
    assert table.order.tolist() == [1, 3, 2, 0]
    assert table.starts.tolist() == [0, 2, 3, 4]
    out, inner = table.region(0)
    assert isinstance(out, np.ndarray)
    assert (out.tolist(), [along.tolist() for along in inner]) == ([1, 3], [[0, 1], [1, 1]])
    assert table.output_rows().tolist() == [2, 0, 1, 0]
    assert [along.tolist() for along in table.output_inner()] == [[0, 0, 2, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("scale", [1, 2**40])
@given(data=st.data())
def test_linear_ids_keep_order_and_equality(scale: int, data: st.DataObject) -> None:
    n_axes = data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.tuples(*[st.integers(0, 3)] * n_axes), min_size=1))
    columns = [column * scale for column in np.array(rows, np.int64).T]
    grid_shape = (3 * scale + 1,) * n_axes
    assert (math.prod(grid_shape) > 2**63) == (scale > 1 and n_axes > 1)
    ids = linear_ids(columns, grid_shape).tolist()
    for left, left_id in zip(rows, ids, strict=True):
        for right, right_id in zip(rows, ids, strict=True):
            assert (left < right, left == right) == (left_id < right_id, left_id == right_id)
