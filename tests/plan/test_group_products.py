"""Combinations of the rows of groups, beside `itertools.product`."""

from __future__ import annotations

import itertools

import numpy as np

from xgpuzarr.plan.group_products import c_strides, product_rows, product_sum


def test_rows_are_every_combination_in_c_order() -> None:
    coords = [np.array([[10, 11], [20, 21]]), np.array([[1], [2], [3]])]
    rows = product_rows(coords, [(2, 0), (1,)])
    assert rows.tolist() == [[b, c, a] for (a, b), (c,) in itertools.product(*(group.tolist() for group in coords))]


def test_without_groups_there_is_one_row_and_without_rows_none() -> None:
    assert product_rows([], []).shape == (1, 0)
    assert product_rows([np.empty((0, 1), np.int64), np.zeros((2, 1), np.int64)], [(0,), (1,)]).shape == (0, 2)


def test_sums_are_of_every_combination_in_c_order() -> None:
    parts = [[100, 200], [10, 20, 30], [1]]
    assert product_sum([np.array(part) for part in parts]).tolist() == [sum(each) for each in itertools.product(*parts)]


def test_strides_are_numpy_s() -> None:
    shape = (3, 4, 5)
    assert c_strides(shape) == tuple(stride // 8 for stride in np.zeros(shape).strides)
    assert c_strides(()) == ()
