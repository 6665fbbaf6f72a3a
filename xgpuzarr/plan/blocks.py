"""How large should a dask block be, and does a block grid fit the stored one?

A block is whole chunks, or whole shards, near a target of decoded bytes:

1. `block_unit` picks what blocks are made of: the stored object, or a part of a shard far above the target.
2. `block_shape` doubles the unit along one axis after the other. Axes along which a unit has some extent grow alike, so
   that a block keeps the proportions the store's author chose: image tiles become squares, tiles of a map become maps.
   Axes that are stored one by one (time steps, levels) grow after those, the first of them first. Doubling makes
   blocks of different variables nest, so that arithmetic between them cuts no block.
3. `first_cut` finds where a block grid cuts the unit; `aligned_length` says what would not.
4. `select_blocks` gives the blocks of a selection.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["aligned_length", "block_shape", "block_unit", "first_cut", "lengths_along", "listable", "select_blocks"]

MAX_FACTOR = 1000
"""Largest factor looked for, of a number that an array's metadata may make as large as it likes."""

MAX_OVERSIZE = 4
"""A shard more than so many times the target is divided, if need be into its chunks, of which blocks then cut it."""

MAX_BLOCKS = 1_000_000
"""Most default blocks along an axis: dask lists them all, before anything is selected."""


def block_shape(
    layout: ArrayLayout, target_bytes: int, *, itemsize: int | None = None, named: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Shape of the default dask block of an array.

    Parameters
    ----------
    layout
        The array.
    target_bytes
        Decoded bytes that a block aims at. The block comes nearest to it in ratio; it is larger only if one unit is, or
        if there were more than `MAX_BLOCKS` along an axis.
    itemsize
        Bytes of one element of the block, where that is not the stored element: scaled integers become floats.
    named
        Lengths along axes that the user has named.

    Returns
    -------
    tuple of int
        Elements along each axis; where none are named at least 1, and a multiple of `block_unit` or the whole axis.
    """
    itemsize, named = itemsize or layout.dtype.itemsize, named or {}
    unit = block_unit(layout, target_bytes, itemsize=itemsize)
    block = [max(1, min(u, s)) for u, s in zip(unit, layout.shape, strict=True)]
    block = [named.get(axis, b) for axis, b in enumerate(block)]
    while (axis := _axis_to_grow(block, unit, layout, named)) is not None:
        grown = min(2 * block[axis], layout.shape[axis])
        nbytes = _nbytes(block, itemsize)
        if nbytes * (nbytes // block[axis] * grown) >= target_bytes**2:  # no nearer to the target, in ratio
            break
        block[axis] = grown
    for axis, (b, s) in enumerate(zip(block, layout.shape, strict=True)):
        if axis not in named:
            block[axis] = listable(b, s)
    return tuple(block)


def block_unit(layout: ArrayLayout, target_bytes: int, *, itemsize: int | None = None) -> tuple[int, ...]:
    """Shape of what blocks are whole multiples of.

    It is the stored object: reading part of a shard costs another read of its index, and part of a chunk costs decoding
    all of it. A shard far above the target is divided evenly, between its chunks, as long as that comes nearer. Where a
    prime number of chunks leaves it more than `MAX_OVERSIZE` times the target, it is one chunk along that axis: blocks
    near the target, of which some lie in two shards, are better than one that fits no memory.
    """
    itemsize = itemsize or layout.dtype.itemsize
    unit = list(layout.object_shape)
    while True:
        counts = [u // c for u, c in zip(unit, layout.chunk_shape, strict=True)]
        axis = counts.index(max(counts)) if counts else 0
        n_parts = _smallest_factor(counts[axis]) if counts else 1
        if n_parts == 1 or _nbytes(unit, itemsize) <= min(math.sqrt(n_parts), MAX_OVERSIZE) * target_bytes:
            return tuple(unit)
        unit[axis] //= n_parts


def first_cut(lengths: Sequence[int], unit: int) -> int | None:
    """Index at which blocks of `lengths` along an axis first cut a unit; None if every block ends with one."""
    if not any(length % unit for length in set(lengths[:-1])):  # of very many blocks, few have lengths of their own
        return None
    return next((stop for stop in accumulate(lengths[:-1]) if stop % unit), None)


def listable(length: int, axis_length: int) -> int:
    """Least multiple of `length`, or else the whole axis, of which there are no more than `MAX_BLOCKS` along it."""
    return min(length * max(1, -(-axis_length // (length * MAX_BLOCKS))), max(1, axis_length))


def lengths_along(axis_length: int, length: int) -> tuple[int, ...]:
    """Lengths of all blocks along an axis that has any: `length` each, and what remains."""
    n_whole, rest = divmod(axis_length, length)
    return (length,) * n_whole + (rest,) * (rest > 0)


def aligned_length(length: int, unit: int, axis_length: int) -> int:
    """Multiple of `unit` nearest to a block length, and no longer than the axis."""
    return min(max(1, round(length / unit)) * unit, axis_length)


def select_blocks(lengths: Sequence[int], selected: range) -> tuple[tuple[int, ...], int]:
    """Cut the blocks along an axis down to a selection of indices.

    Parameters
    ----------
    lengths
        Lengths of the blocks.
    selected
        Indices along the axis, in any direction.

    Returns
    -------
    selected_lengths
        Lengths of the parts, in the order of `selected`; (0,) if nothing is selected.
    n_touched
        Elements along the axis of the blocks that hold any of it.
    """
    if not selected:
        return (0,), 0
    forward = selected if selected.step > 0 else selected[::-1]
    of_blocks = np.asarray(lengths)  # of 10^5 blocks, this takes longer than all the rest
    stops = np.cumsum(of_blocks)
    n_before_stop = np.clip(-((forward.start - stops) // forward.step), 0, len(forward))
    counts = np.diff(n_before_stop, prepend=0)
    touched = counts > 0
    parts = counts[touched] if selected.step > 0 else counts[touched][::-1]
    return tuple(parts.tolist()), int(of_blocks[touched].sum())


def _axis_to_grow(
    block: Sequence[int], unit: Sequence[int], layout: ArrayLayout, named: Mapping[int, int]
) -> int | None:
    """Axis along which the next doubling keeps the block's proportions; None if none is left to grow along.

    A block that is part of a shard grows inside that before it reaches into others.
    """
    shape = layout.shape
    open_axes = [axis for axis, (b, s) in enumerate(zip(block, shape, strict=True)) if b < s and axis not in named]
    in_shard = [axis for axis in open_axes if block[axis] < layout.object_shape[axis]]
    extended = in_shard or [axis for axis in open_axes if unit[axis] > 1]
    if extended:
        return min(extended, key=lambda axis: block[axis] / unit[axis])
    return min(open_axes, default=None)


def _nbytes(shape: Sequence[int], itemsize: int) -> int:
    return math.prod(shape) * itemsize


def _smallest_factor(n: int) -> int:
    """Smallest factor above 1 of a number of chunks; the number itself where none is small."""
    return next((f for f in range(2, min(math.isqrt(n), MAX_FACTOR) + 1) if n % f == 0), n)
