"""Which elements does an index ask for, and how do they become the array that NumPy would return?

1. `index_terms` says what the key asks of each axis, checked and with non-negative positions.
2. These terms become *groups*: every source axis belongs to exactly one, and the elements asked for are the product of
   the groups. A reader fills one array with one dimension per group, the grouped output.
3. `Selection.finish` turns that into the result by a reshape and a transpose, so nothing is copied.

Index arrays that vary along different dimensions (``numpy.ix_``) stay separate groups, and evenly spaced ones become
slices; so planning costs what the arrays hold, not what they broadcast to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from xgpuzarr.plan.index_terms import Dropped, IndexArray, Kept, NewAxis, Term, complete, terms

__all__ = ["AxisSlice", "Points", "Selection", "parse_numpy", "parse_outer", "parse_vectorized"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """Evenly spaced positions along one axis: ``start + step * i`` for ``i < count``.

    Attributes
    ----------
    axis
        Source axis.
    start
        First position; within the axis unless `count` is 0.
    step
        Distance between positions, never 0; negative runs backwards.
    count
        Number of positions.
    """

    axis: int
    start: int
    step: int
    count: int

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis, as a tuple of one."""
        return (self.axis,)

    @property
    def size(self) -> int:
        """Length of this group's dimension in the grouped output."""
        return self.count


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Any positions along one or more axes, taken together: point ``i`` is ``(coords[0][i], coords[1][i], ...)``.

    Attributes
    ----------
    axes
        Source axes, ascending. Empty only for NumPy's index ``False``, which selects nothing.
    coords
        For each axis the positions, int64, 1-D, all of one length, within the axis.
    """

    axes: tuple[int, ...]
    coords: tuple[Int64Array, ...]

    @property
    def size(self) -> int:
        """Length of this group's dimension in the grouped output."""
        return len(self.coords[0]) if self.coords else 0


class _Reshapable(Protocol):
    def reshape(self, shape: tuple[int, ...], /) -> Any: ...
    def transpose(self, axes: tuple[int, ...], /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The elements that an index asks for, as a product of groups.

    Attributes
    ----------
    groups
        Groups in order of their first axis.
    shape
        Shape of the result, as NumPy would return it.
    order
        ``finish`` reshapes the grouped output to ``u`` with ``u[order[i]] == shape[i]``, then transposes by `order`.
    """

    groups: tuple[AxisSlice | Points, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def grouped_shape(self) -> tuple[int, ...]:
        """Shape of the grouped output: one dimension per group."""
        return tuple(group.size for group in self.groups)

    @property
    def size(self) -> int:
        """Number of elements asked for."""
        return math.prod(self.shape)

    def finish[A: _Reshapable](self, grouped: A) -> A:
        """Turn the grouped output into the result.

        Parameters
        ----------
        grouped
            NumPy or CuPy array of shape `grouped_shape`, C-contiguous.

        Returns
        -------
        array
            A view of `grouped`, of shape `shape`; on a device ordered by no stream, for it moves nothing.
        """
        unordered = [0] * len(self.shape)
        for size, dim in zip(self.shape, self.order, strict=True):
            unordered[dim] = size
        finished: A = grouped.reshape(tuple(unordered)).transpose(self.order)
        return finished


def parse_numpy(key: object, shape: tuple[int, ...]) -> Selection:
    """Select ``array[key]`` by NumPy's rules (NumPy user guide, "Indexing on ndarrays").

    Parameters
    ----------
    key
        Integers, slices, ``...``, ``None``, integer and boolean arrays of any dimension, or a tuple of these.
    shape
        Shape of the array indexed.

    Raises
    ------
    IndexError
        A position out of bounds, a mask of another shape, too many indices, or an index of another type.
    """
    found = terms(complete(key, shape), shape)
    # Beside an array, integers broadcast with the arrays.
    together = [i for i, term in enumerate(found) if isinstance(term, IndexArray | Dropped)]
    is_adjacent = together == list(range(together[0], together[-1] + 1)) if together else False
    # Parted by a slice, ellipsis or newaxis, the broadcast dimensions come first; else they stay in place.
    return _combine(found, array_dims_at=together[0] if is_adjacent else 0)


def parse_outer(key: object, shape: tuple[int, ...]) -> Selection:
    """Select ``array.oindex[key]``: each axis is indexed on its own, as in Zarr's and xarray's outer indexing.

    Parameters
    ----------
    key
        Integers (the axis is dropped), slices, ``...``, 1-D integer and boolean arrays, or a tuple of these.
    shape
        Shape of the array indexed.

    Raises
    ------
    IndexError
        As `parse_numpy`; also ``None``, and arrays that are not 1-D.
    """
    items = complete(key, shape)
    for item in items:
        if item is None:
            raise IndexError("outer indexing takes no newaxis (None); insert the axis in the result")
        if isinstance(item, np.ndarray) and item.ndim != 1:
            raise IndexError(f"outer indexing takes 1-d arrays, got one of {item.ndim} dimensions; use vindex")
    parts: list[_Part] = []
    for term in terms(items, shape):
        match term:
            case IndexArray(axis=int(axis), positions=positions):
                parts.append(_Part(_group((axis,), (positions,)), (("axis", axis),)))
            case Kept(axis=axis, positions=along):
                parts.append(_Part(_axis_slice(axis, along), (("axis", axis),)))
            case Dropped(axis=axis, position=position):
                parts.append(_Part(AxisSlice(axis, position, 1, 1), ()))
    sizes = {dim: part.group.size for part in parts for dim in part.dims}
    return _select(parts, list(sizes), sizes)


def parse_vectorized(key: object, shape: tuple[int, ...]) -> Selection:
    """Select ``array.vindex[key]``: arrays broadcast together and come first, then the sliced axes.

    It is Zarr's rule, which has no slices, and that of xarray's ``VectorizedIndexer``, which has no integers. As
    in Zarr an integer counts as an array of one element, so integers alone give a result of shape ``(1,)``.

    Parameters
    ----------
    key
        Integers, slices, ``...``, integer and boolean arrays of any dimension, or a tuple of these.
    shape
        Shape of the array indexed.

    Raises
    ------
    IndexError
        As `parse_numpy`; also ``None``.
    """
    items = complete(key, shape)
    if any(item is None for item in items):
        raise IndexError("vectorized indexing takes no newaxis (None); insert the axis in the result")
    arrays = [np.array([item]) if isinstance(item, int) else item for item in items]
    return _combine(terms(arrays, shape), array_dims_at=0)


type _Dim = tuple[str, int]


class _Part(NamedTuple):
    """A group and the result dimensions, in order, that its positions unravel to."""

    group: AxisSlice | Points
    dims: tuple[_Dim, ...]


def _combine(found: list[Term], array_dims_at: int) -> Selection:
    """Make the selection, with the broadcast array dimensions before the term `array_dims_at`."""
    arrays = [term for term in found if isinstance(term, IndexArray)]
    try:
        broadcast = np.broadcast_shapes(*(array.positions.shape for array in arrays))
    except ValueError:
        shapes = " ".join(str(array.positions.shape) for array in arrays)
        raise IndexError(
            f"shape mismatch: indexing arrays could not be broadcast together with shapes {shapes}"
        ) from None
    parts = _array_parts(arrays, broadcast)
    sizes: dict[_Dim, int] = {("array", dim): size for dim, size in enumerate(broadcast)}
    result: list[_Dim] = []
    for i, term in enumerate(found):
        if i == array_dims_at:
            result += [("array", dim) for dim in range(len(broadcast))]
        match term:
            case Kept(axis=axis, positions=along):
                parts.append(_Part(_axis_slice(axis, along), (("axis", axis),)))
                result.append(("axis", axis))
                sizes["axis", axis] = len(along)
            case Dropped(axis=axis, position=position):
                parts.append(_Part(AxisSlice(axis, position, 1, 1), ()))
            case NewAxis():
                result.append(("new", i))
                sizes["new", i] = 1
    return _select(parts, result, sizes)


def _array_parts(arrays: list[IndexArray], broadcast: tuple[int, ...]) -> list[_Part]:
    """Split index arrays into groups; arrays that vary along a common dimension belong to one group."""
    clusters: list[tuple[set[int], list[IndexArray]]] = []
    for array in arrays:
        lead = len(broadcast) - array.positions.ndim
        dims = {lead + dim for dim, size in enumerate(array.positions.shape) if size != 1}
        members = [array]
        apart = []
        for other_dims, other_members in clusters:
            if dims.isdisjoint(other_dims):
                apart.append((other_dims, other_members))
            else:
                dims |= other_dims
                members = other_members + members
        clusters = [*apart, (dims, members)]
    parts = []
    for dims, members in clusters:
        along = sorted(dims)
        coords = {array.axis: _spread(array.positions, along, broadcast) for array in members if array.axis is not None}
        if not coords and not along:
            continue  # the index True: one more dimension of length 1, no axis
        axes = tuple(sorted(coords))
        group = _group(axes, tuple(coords[axis] for axis in axes))
        parts.append(_Part(group, tuple(("array", dim) for dim in along)))
    return parts


def _spread(index: Int64Array, along: list[int], broadcast: tuple[int, ...]) -> Int64Array:
    """Broadcast `index` over the dimensions `along` of the broadcast shape, and flatten in C order."""
    padded = (1,) * (len(broadcast) - index.ndim) + index.shape
    full = np.broadcast_to(index.reshape([padded[dim] for dim in along]), [broadcast[dim] for dim in along])
    return full.reshape(-1)


def _axis_slice(axis: int, positions: range) -> AxisSlice:
    count = len(positions)
    if count == 0:
        return AxisSlice(axis, 0, 1, 0)
    return AxisSlice(axis, positions.start, positions.step if count > 1 else 1, count)


def _group(axes: tuple[int, ...], coords: tuple[Int64Array, ...]) -> AxisSlice | Points:
    """`Points`, or an `AxisSlice` if that says the same: a slice plans and copies without index arrays."""
    if len(axes) != 1:
        return Points(axes, coords)
    (axis,), (index,) = axes, coords
    if len(index) < 2:
        return AxisSlice(axis, int(index.sum()), 1, len(index))
    start, last = int(index[0]), int(index[-1])
    step = int(index[1]) - start
    # The last position decides most arrays without a pass over them.
    is_even = step != 0 and last == start + step * (len(index) - 1) and bool((np.diff(index) == step).all())
    return AxisSlice(axis, start, step, len(index)) if is_even else Points(axes, coords)


def _select(parts: list[_Part], result: list[_Dim], sizes: dict[_Dim, int]) -> Selection:
    parts = sorted(parts, key=lambda part: part.group.axes)
    dims = [dim for part in parts for dim in part.dims]
    dims += [dim for dim in result if dim not in dims]  # of length 1 and in no group
    groups = [part.group for part in parts]
    if 0 in sizes.values():
        # Nothing is wanted, so nothing along the other axes either, however long they are.
        groups = [AxisSlice(g.axis, 0, 1, 0) if isinstance(g, AxisSlice) else g for g in groups]
    return Selection(
        groups=tuple(groups),
        shape=tuple(sizes[dim] for dim in result),
        order=tuple(dims.index(dim) for dim in result),
    )
