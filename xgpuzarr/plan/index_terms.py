"""What does an index say, axis by axis?

`complete` normalises a key to one item per axis; `terms` checks the items against the shape and makes every position
non-negative. Neither knows how the terms combine: that is what kinds of indexing differ in (`selection`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from xgpuzarr.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import EllipsisType

__all__ = ["Dropped", "IndexArray", "Item", "Kept", "NewAxis", "Separator", "Term", "complete", "terms"]

Int64Array = npt.NDArray[np.int64]
INT64_MAX = int(np.iinfo(np.int64).max)

type Item = int | slice | EllipsisType | npt.NDArray[Any] | None


class Kept(NamedTuple):
    """A slice: its axis stays."""

    axis: int
    positions: range


class Dropped(NamedTuple):
    """An integer: its axis goes."""

    axis: int
    position: int


class NewAxis(NamedTuple):
    """``None``: a new axis of length 1."""


class Separator(NamedTuple):
    """An ellipsis that stands for no axis; it still parts the arrays on its two sides."""


class IndexArray(NamedTuple):
    """An array of checked positions; without an axis for the boolean scalars, which only scale the broadcast."""

    axis: int | None
    positions: Int64Array


type Term = Kept | Dropped | NewAxis | Separator | IndexArray


def complete(key: object, shape: tuple[int, ...]) -> list[Item]:
    """Complete the items of `key` with full slices; an ellipsis stays where it stands for no axis.

    Raises
    ------
    IndexError
        Too many indices, more than one ellipsis, or an index that is no integer, slice, or such array.
    UnsupportedError
        An axis is longer than int64 can count.
    """
    if max(shape, default=0) > INT64_MAX:
        raise UnsupportedError(f"shape {shape} has an axis of more than 2**63 - 1 elements")
    items = [_item(item) for item in (key if isinstance(key, tuple) else (key,))]
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    n_indexed = sum(_n_axes(item) for item in items)
    if n_indexed > len(shape):
        raise IndexError(f"too many indices for array: array is {len(shape)}-dimensional, but {n_indexed} were indexed")
    full: list[Item] = [slice(None)] * (len(shape) - n_indexed)
    if not ellipses:
        return items + full
    at = ellipses[0]
    return items[:at] + (full or [Ellipsis]) + items[at + 1 :]


def _item(item: object) -> Item:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    # Arrays of other libraries may have __index__ too; only NumPy knows whether theirs hold one integer.
    if isinstance(item, SupportsIndex) and not isinstance(item, bool) and not hasattr(item, "shape"):
        return item.__index__()
    array = np.asarray(item)
    if array.size == 0 and not hasattr(item, "dtype"):
        array = array.astype(np.int64)  # an empty list has no type to object to
    if array.dtype.kind not in "iub":
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), newaxis (`None`) and integer or boolean arrays are valid"
            f" indices, got {type(item).__name__} of dtype {array.dtype}"
        )
    return int(array) if array.ndim == 0 and array.dtype.kind != "b" else array


def _n_axes(item: Item) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, np.ndarray) and item.dtype.kind == "b":
        return item.ndim
    return 1


def terms(items: Sequence[Item], shape: tuple[int, ...]) -> list[Term]:
    """Check `items` against `shape` and make every position non-negative.

    Raises
    ------
    IndexError
        A position out of bounds, or a mask of another shape.
    """
    found: list[Term] = []
    axis = 0
    for item in items:
        if item is None:
            found.append(NewAxis())
        elif item is Ellipsis:
            found.append(Separator())
        elif isinstance(item, slice):
            found.append(Kept(axis, range(*item.indices(shape[axis]))))
        elif isinstance(item, int):
            _check_bounds(item, axis, shape[axis])
            found.append(Dropped(axis, item % shape[axis]))
        elif item.dtype.kind == "b":
            found += _mask_terms(item, axis, shape)
        else:
            found.append(IndexArray(axis, _wrapped(item, axis, shape[axis])))
        axis += _n_axes(item)
    return found


def _check_bounds(position: int, axis: int, size: int) -> None:
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for axis {axis} with size {size}")


def _wrapped(index: npt.NDArray[Any], axis: int, size: int) -> Int64Array:
    if index.size == 0:
        return index.astype(np.int64)
    # The limits are compared as Python integers: uint64 may hold more than int64 can.
    low, high = int(index.min()), int(index.max())
    _check_bounds(low, axis, size)
    _check_bounds(high, axis, size)
    positions = index.astype(np.int64)
    if low < 0:
        positions[positions < 0] += size
    return positions


def _mask_terms(mask: npt.NDArray[np.bool_], axis: int, shape: tuple[int, ...]) -> list[Term]:
    for offset, length in enumerate(mask.shape):
        if shape[axis + offset] != length:
            raise IndexError(
                f"boolean index did not match indexed array along axis {axis + offset};"
                f" size of axis is {shape[axis + offset]} but size of corresponding boolean axis is {length}"
            )
    if mask.ndim == 0:
        return [IndexArray(None, np.zeros(int(mask), np.int64))]
    return [IndexArray(axis + offset, index.astype(np.int64)) for offset, index in enumerate(np.nonzero(mask))]
