"""Shapes, keys and layouts to plan reads of."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xgpuzarr.plan.codec_chain import CodecChain
from xgpuzarr.plan.layout import ArrayLayout, KeyRule, ShardLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    Draw = st.DrawFn


def mostly_full(max_dims: int, max_side: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dimensions, one in four of which may be empty."""
    full = hnp.array_shapes(min_dims=0, max_dims=max_dims, min_side=1, max_side=max_side)
    return st.integers(0, 3).flatmap(
        lambda n: full if n else hnp.array_shapes(min_dims=0, max_dims=max_dims, min_side=0, max_side=max_side)
    )


shapes = mostly_full(max_dims=4, max_side=9)


def layout(
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    level_shapes: Sequence[tuple[int, ...]] = (),
    path: str = "a",
    dtype: Any = "i8",
) -> ArrayLayout:
    """Layout with shards of `level_shapes`, outermost first, around `chunk_shape`."""
    units = [*level_shapes, chunk_shape]
    levels = tuple(
        ShardLevel(outer, inner, index_location="end", index_byteorder="<", index_checksum=True)
        for outer, inner in itertools.pairwise(units)
    )
    return ArrayLayout(
        path=path,
        zarr_format=3,
        shape=shape,
        dtype=np.dtype(dtype),
        chunk_shape=chunk_shape,
        object_shape=units[0],
        shard_levels=levels,
        codec_chain=CodecChain(steps=()),
        fill_value=0,
        key_rule=KeyRule("c", "/"),
    )


@st.composite
def layouts(draw: Draw, shape: tuple[int, ...]) -> ArrayLayout:
    """Any chunks, in shards of none, one or two levels."""
    chunk_shape = tuple(draw(st.integers(1, 4)) for _ in shape)
    level_shapes: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 2))):
        inner = level_shapes[0] if level_shapes else chunk_shape
        level_shapes.insert(0, tuple(n * draw(st.integers(1, 3)) for n in inner))
    return layout(shape, chunk_shape, level_shapes)


def axis_slices(size: int) -> st.SearchStrategy[slice]:
    """Slices along an axis of `size`: many of them long and backwards, a few out of range."""
    steps = st.none() | st.sampled_from([-1, -2, -3, -5, 1, 2, 3, 5])
    bounds = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, st.none(), st.none(), steps) | st.slices(size) | st.builds(slice, bounds, bounds, steps)


def index_arrays(size: int, shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Positions along an axis of `size`, in several dtypes, and as lists."""
    if size == 0:
        shape = (*shape[:-1], 0) if shape else (0,)
    dtypes = st.sampled_from(["i8", "i4", "i1", ">i2", "u8", "u1"])

    def of_dtype(dtype: str) -> st.SearchStrategy[Any]:
        low = 0 if dtype.startswith("u") else -size
        return hnp.arrays(dtype, shape, elements=st.integers(min(low, max(size - 1, 0)), max(size - 1, 0)))

    arrays = dtypes.flatmap(of_dtype)
    return arrays | arrays.map(np.ndarray.tolist) | arrays.map(lambda a: np.sort(a, axis=None).reshape(a.shape))


@st.composite
def broadcastable(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    start = draw(st.integers(0, len(shape)))
    return tuple(draw(st.sampled_from([1, n])) for n in shape[start:])


@st.composite
def keys(draw: Draw, shape: tuple[int, ...], *, newaxis: bool) -> Any:
    """Keys as NumPy takes them. A few do not broadcast; then NumPy raises IndexError."""
    together = draw(mostly_full(max_dims=3, max_side=4))
    items: list[Any] = []
    axis = 0
    while axis < len(shape):
        kind = draw(st.sampled_from(["int", "slice", "slice", "array", "array", "mask", "scalar mask", "newaxis"]))
        if kind == "newaxis":
            items += [None] * newaxis
            continue
        if kind == "scalar mask":
            items.append(draw(st.booleans() | st.booleans().map(np.bool_)))
            continue
        size, n_axes = shape[axis], 1
        if kind == "slice" or (kind == "int" and size == 0):
            items.append(draw(axis_slices(size)))
        elif kind == "int":
            position = draw(st.integers(-size, size - 1))
            items.append(draw(st.sampled_from([position, np.int32(position), np.array(position)])))
        elif kind == "array":
            items.append(draw(index_arrays(size, draw(broadcastable(together)))))
        else:
            n_axes = draw(st.integers(1, len(shape) - axis))
            items.append(draw(hnp.arrays(np.bool_, shape[axis : axis + n_axes])))
        axis += n_axes
    n_kept = draw(st.integers(0, len(items)))
    ellipsis_at = draw(st.integers(0, len(items)))
    if draw(st.booleans()):
        items[ellipsis_at : max(ellipsis_at, n_kept)] = [...]
    else:
        items = items[:n_kept]
    return items[0] if len(items) == 1 and not isinstance(items[0], list) and draw(st.booleans()) else tuple(items)


@st.composite
def outer_keys(draw: Draw, shape: tuple[int, ...]) -> Any:
    """Keys for outer indexing: each axis an integer, a slice, or a 1-D array."""
    items: list[Any] = []
    for size in shape:
        length = draw(st.integers(0, 6))
        options: list[st.SearchStrategy[Any]] = [
            axis_slices(size),
            index_arrays(size, (length,)),
            hnp.arrays(np.bool_, size),
        ]
        items.append(draw(st.one_of(*options, st.integers(-size, size - 1)) if size else st.one_of(*options)))
    n_kept = draw(st.integers(0, len(items)))
    return (*items[:n_kept], ...) if draw(st.booleans()) else tuple(items[:n_kept])


@st.composite
def point_keys(draw: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Keys for vectorized indexing as Zarr takes them: one integer or array per axis, broadcasting together."""
    together = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=4))
    return tuple(
        draw(st.integers(-n, n - 1) | hnp.arrays("i8", draw(broadcastable(together)), elements=st.integers(-n, n - 1)))
        for n in shape
    )


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An array whose elements all differ."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
