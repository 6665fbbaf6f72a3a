"""Which chunks does one group of a selection touch, and which of its positions fall in each?

A group becomes one table with a row per touched chunk: `SliceChunks` for an `AxisSlice`, `PointChunks` for `Points`.
A slice costs what the chunks cost, however long its axis; points cost what the points cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xgpuzarr.plan.selection import AxisSlice, Points

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupChunks", "PointChunks", "SliceChunks", "group_chunks", "linear_ids", "n_touched"]

Int64Array = npt.NDArray[np.int64]
INT64_MAX = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, eq=False)
class SliceChunks:
    """Chunks touched by an `AxisSlice`; all columns int64, one row per chunk, chunks ascending.

    Element ``i < count[row]`` of a row's region is at ``out_start[row] + i`` in the group's output dimension and at
    ``inner_start[row] + step * i`` in the chunk.

    Attributes
    ----------
    group
        The slice.
    chunk_shape
        Length of a chunk along the axis, as a tuple of one.
    chunk_coords
        (n_rows, 1) chunk coordinate along the axis.
    out_start, count, inner_start
        (n_rows,) region, in elements.
    """

    group: AxisSlice
    chunk_shape: tuple[int, ...]
    chunk_coords: Int64Array
    out_start: Int64Array
    count: Int64Array
    inner_start: Int64Array

    @property
    def step(self) -> int:
        """Distance in the chunk between neighbours in the output; negative runs backwards."""
        return self.group.step

    def region(self, row: int) -> tuple[slice, tuple[slice]]:
        """Positions in the output dimension, and along the axis in the chunk."""
        start, count, inner = int(self.out_start[row]), int(self.count[row]), int(self.inner_start[row])
        stop = inner + self.step * (count - 1) + (1 if self.step > 0 else -1)
        return slice(start, start + count), (slice(inner, stop if stop >= 0 else None, self.step),)

    def whole(self) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """For each row: is the chunk wanted whole and in order, and where does it start in the output dimension."""
        (length,) = self.chunk_shape
        return (self.count == length) & (self.step == 1 or length == 1), self.out_start

    def output_rows(self) -> npt.NDArray[np.int32]:
        """For each position in the output dimension the row of its chunk."""
        forward = 1 if self.step > 0 else -1
        rows = np.arange(len(self.count), dtype=np.int32)[::forward]
        return np.repeat(rows, self.count[::forward])

    def output_inner(self) -> tuple[Int64Array]:
        """For each position in the output dimension its coordinate in the chunk, along the axis."""
        (length,) = self.chunk_shape
        return ((self.group.start + self.step * np.arange(self.group.count, dtype=np.int64)) % length,)


@dataclass(frozen=True, slots=True, eq=False)
class PointChunks:
    """Chunks touched by `Points`, in lexicographic order of their coordinates.

    The points of a row are ``order[starts[row]:starts[row + 1]]``, in ascending order; without `order` they are
    ``starts[row]:starts[row + 1]``. A point's number is also its position in the group's output dimension.

    Attributes
    ----------
    group
        The points.
    chunk_shape
        Lengths of a chunk along the group's axes.
    chunk_coords
        int64, (n_rows, n_axes), chunk coordinates along the group's axes.
    order
        int64, (n_points,); None if the points already come chunk by chunk.
    starts
        int64, (n_rows + 1,).
    """

    group: Points
    chunk_shape: tuple[int, ...]
    chunk_coords: Int64Array
    order: Int64Array | None
    starts: Int64Array

    def region(self, row: int) -> tuple[slice | Int64Array, tuple[Int64Array, ...]]:
        """Positions in the output dimension, and along each of the group's axes in the chunk."""
        start, stop = int(self.starts[row]), int(self.starts[row + 1])
        out: slice | Int64Array = slice(start, stop)
        if self.order is not None:
            out = self.order[start:stop]
            if out[-1] - out[0] == stop - start - 1:
                out = slice(int(out[0]), int(out[-1]) + 1)
        corner = self.chunk_coords[row] * self.chunk_shape
        return out, tuple(coords[out] - first for coords, first in zip(self.group.coords, corner, strict=True))

    def whole(self) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """For each row: is the chunk wanted whole and in order, and where does it start in the output dimension.

        Points along several axes count only where a chunk is one element.
        """
        firsts, counts = self.starts[:-1], np.diff(self.starts)
        out_start = firsts if self.order is None else self.order[firsts]
        whole = counts == math.prod(self.chunk_shape)
        if len(self.chunk_shape) == 1 and self.chunk_shape[0] > 1:
            (coords,) = self.group.coords
            if self.order is not None:
                coords = coords[self.order]
            jumps = np.diff(coords) != 1
            if self.order is not None:
                jumps |= np.diff(self.order) != 1
            n_jumps = np.concatenate(([0], np.cumsum(jumps)))
            whole &= n_jumps[self.starts[1:] - 1] == n_jumps[firsts]
        elif len(self.chunk_shape) > 1 and math.prod(self.chunk_shape) > 1:
            whole[:] = False
        return whole, out_start

    def output_rows(self) -> npt.NDArray[np.int32]:
        """For each position in the output dimension the row of its chunk."""
        in_order = np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))
        if self.order is None:
            return in_order
        rows = np.empty_like(in_order)
        rows[self.order] = in_order
        return rows

    def output_inner(self) -> tuple[Int64Array, ...]:
        """For each position in the output dimension its coordinate in the chunk, along each of the group's axes."""
        return tuple(coords % n for coords, n in zip(self.group.coords, self.chunk_shape, strict=True))


type GroupChunks = SliceChunks | PointChunks


def n_touched(group: AxisSlice, length: int) -> int:
    """Count the chunks of `length` that `group` touches, without listing them."""
    if group.count == 0 or abs(group.step) >= length:
        return group.count
    last = group.start + group.step * (group.count - 1)
    return abs(last // length - group.start // length) + 1


def group_chunks(group: AxisSlice | Points, grid_shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> GroupChunks:
    """Find the chunks that `group` touches.

    Parameters
    ----------
    group
        A group of a selection.
    grid_shape
        Chunks of the array along each of the group's axes.
    chunk_shape
        Length of a chunk along each of the group's axes.
    """
    if isinstance(group, Points):
        return _point_chunks(group, grid_shape, chunk_shape)
    return _slice_chunks(group, chunk_shape)


def _slice_chunks(group: AxisSlice, chunk_shape: tuple[int, ...]) -> SliceChunks:
    if group.count == 0:
        none = np.empty(0, np.int64)
        return SliceChunks(group, chunk_shape, none.reshape(0, 1), none, none, none)
    (length,) = chunk_shape
    last = group.start + group.step * (group.count - 1)
    lowest, stride = min(group.start, last), abs(group.step)
    if stride >= length:
        chunks = (lowest + stride * np.arange(group.count, dtype=np.int64)) // length
        start = np.arange(group.count, dtype=np.int64)
        count = np.ones(group.count, np.int64)
    else:
        # No chunk between the first and the last is skipped. `start` is the first position in or after each chunk.
        chunks = np.arange(lowest // length, max(group.start, last) // length + 1, dtype=np.int64)
        start = -(-np.maximum(chunks * length - lowest, 0) // stride)
        count = np.diff(start, append=group.count)
    if group.step < 0:
        start = group.count - start - count
    inner = group.start + group.step * start - chunks * length
    return SliceChunks(group, chunk_shape, chunks.reshape(-1, 1), start, count, inner)


def _point_chunks(group: Points, grid_shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> PointChunks:
    if group.size == 0:
        return PointChunks(group, chunk_shape, np.empty((0, len(group.axes)), np.int64), None, np.zeros(1, np.int64))
    chunks = [coords // length for coords, length in zip(group.coords, chunk_shape, strict=True)]
    ids = linear_ids(chunks, grid_shape)
    order = None
    if bool((ids[1:] < ids[:-1]).any()):
        ids -= ids.min()
        # NumPy sorts 16-bit integers by radix, ten times faster than 64-bit ones.
        order = np.argsort(ids.astype(np.min_scalar_type(int(ids.max()))), kind="stable").astype(np.int64, copy=False)
        ids = ids[order]
    inside = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    starts = np.concatenate(([0], inside, [len(ids)]))
    firsts = starts[:-1] if order is None else order[starts[:-1]]
    return PointChunks(group, chunk_shape, np.stack([column[firsts] for column in chunks], axis=1), order, starts)


def linear_ids(columns: Sequence[Int64Array], grid_shape: tuple[int, ...]) -> Int64Array:
    """One number per row of grid coordinates, equal for equal rows and ascending in lexicographic order.

    Parameters
    ----------
    columns
        Grid coordinates, one array per axis, at least one; all of one length.
    grid_shape
        Exclusive bound of each column.
    """
    if math.prod(grid_shape) <= INT64_MAX:
        ids = columns[0].copy()
        for column, length in zip(columns[1:], grid_shape[1:], strict=True):
            ids *= length
            ids += column
        return ids
    # C-order numbers would overflow, so number the rows met.
    order = np.lexsort(columns[::-1])
    changes = np.zeros(len(order), np.int64)
    for column in columns:
        changes[1:] |= np.diff(column[order]) != 0
    ids = np.empty_like(changes)
    ids[order] = np.cumsum(changes)
    return ids
