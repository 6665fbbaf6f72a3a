"""How do the tables of a selection's groups combine? Every combination of their rows, in C order, the last fastest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["along", "c_strides", "product_rows", "product_sum"]

Int64Array = npt.NDArray[np.int64]


def product_rows(coords: Sequence[Int64Array], axes: Sequence[tuple[int, ...]]) -> Int64Array:
    """Join one row of every group, for every combination.

    Parameters
    ----------
    coords
        For each group, int64, (n_rows, its axes).
    axes
        For each group, the columns of the result that its columns go to.

    Returns
    -------
    rows
        int64, (product of n_rows, all axes).
    """
    lengths = [len(rows) for rows in coords]
    joined = np.empty((*lengths, sum(map(len, axes))), np.int64)
    for number, (rows, group_axes) in enumerate(zip(coords, axes, strict=True)):
        for axis, column in zip(group_axes, rows.T, strict=True):
            joined[..., axis] = along(column, number, len(lengths))
    return joined.reshape(math.prod(lengths), joined.shape[-1])


def product_sum(parts: Sequence[Int64Array]) -> Int64Array:
    """Add one value of every group, for every combination: int64, (product of the lengths,)."""
    total = np.zeros([len(part) for part in parts], np.int64)
    for number, part in enumerate(parts):
        total += along(part, number, len(parts))
    return total.reshape(-1)


def along[T: np.generic](column: npt.NDArray[T], dim: int, ndim: int) -> npt.NDArray[T]:
    """Stand `column` along dimension `dim` of `ndim`, to broadcast."""
    return column.reshape([-1 if d == dim else 1 for d in range(ndim)])


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a C-order array."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
