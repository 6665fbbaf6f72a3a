from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xgpuzarr.plan.blocks import aligned_length, block_shape, block_unit, first_cut, select_blocks

MIB = 1 << 20


@dataclass(frozen=True)
class Grid:
    """The part of a layout that blocks depend on."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    object_shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, shape, chunks, shards=None, dtype="f4"):
        return cls(shape, chunks, shards or chunks, np.dtype(dtype))


@pytest.mark.parametrize(
    ("grid", "target", "expected"),
    [
        # whole maps, one time step a chunk: only time can grow. 64 maps are 254 MiB.
        (Grid.of((8760, 721, 1440), (1, 721, 1440)), 256 * MIB, (64, 721, 1440)),
        # an image in tiles grows to a square
        (Grid.of((65536, 65536), (512, 512), dtype="u1"), 256 * MIB, (16384, 16384)),
        # colours are covered at once and drop out
        (Grid.of((65536, 65536, 3), (512, 512, 3), dtype="u1"), 192 * MIB, (8192, 8192, 3)),
        # tiles of a map: the map is completed before time grows
        (Grid.of((100_000, 720, 1440), (1, 180, 360)), 256 * MIB, (64, 720, 1440)),
        # time and level are stored one by one: the first axis takes all, as in a variable without levels
        (Grid.of((8760, 37, 721, 1440), (1, 1, 721, 1440)), 256 * MIB, (64, 1, 721, 1440)),
        (Grid.of((16, 37, 721, 1440), (1, 1, 721, 1440)), 256 * MIB, (16, 4, 721, 1440)),
        # whole shards
        (Grid.of((8760, 721, 1440), (1, 91, 180), (8, 728, 1440)), 256 * MIB, (64, 721, 1440)),
        # a shard of 4 GiB is divided between its chunks, with nothing left over
        (Grid.of((4096, 1024, 1024), (16, 256, 256), (1024, 1024, 1024)), 256 * MIB, (64, 1024, 1024)),
        # one chunk above the target stays whole
        (Grid.of((10, 1 << 28), (1, 1 << 27)), 256 * MIB, (1, 1 << 27)),
        # an array below the target is one block, without the chunk's overhang
        (Grid.of((10, 7), (4, 4)), 256 * MIB, (10, 7)),
        # 8 bytes are nearer to 6 than 4 are, and 4 nearer to 5 than 8
        (Grid.of((10,), (1,), dtype="u1"), 6, (8,)),
        (Grid.of((10,), (1,), dtype="u1"), 5, (4,)),
        # the rest of an axis counts as it is: 10 bytes, not 16
        (Grid.of((10,), (1,), dtype="u1"), 9, (10,)),
        (Grid.of((), ()), 256 * MIB, ()),
        (Grid.of((0, 5), (2, 2)), 256 * MIB, (1, 5)),
    ],
)
def test_block_shape(grid, target, expected):
    assert block_shape(grid, target) == expected


def test_the_block_of_scaled_integers_is_measured_as_floats():
    grid = Grid.of((8760, 1024, 1024), (1, 1024, 1024), dtype="i2")
    assert block_shape(grid, 256 * MIB) == (128, 1024, 1024)
    assert block_shape(grid, 256 * MIB, itemsize=8) == (32, 1024, 1024)


@st.composite
def grids(draw):
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 1000)) for _ in range(ndim))
    chunks = tuple(draw(st.integers(1, 64)) for _ in range(ndim))
    per_shard = draw(st.one_of(st.just((1,) * ndim), st.tuples(*[st.integers(1, 12)] * ndim)))
    shards = tuple(c * n for c, n in zip(chunks, per_shard, strict=True))
    return Grid.of(shape, chunks, shards, draw(st.sampled_from(["u1", "f4", "c16"])))


@given(grids(), st.integers(1, 1 << 30))
def test_blocks_are_whole_units_near_the_target(grid, target):
    block = block_shape(grid, target)
    unit = block_unit(grid, target)
    nbytes = math.prod(block) * grid.dtype.itemsize
    inside = math.prod(map(min, unit, grid.shape)) * grid.dtype.itemsize
    for b, u, c, o, s in zip(block, unit, grid.chunk_shape, grid.object_shape, grid.shape, strict=True):
        assert b == s or b % u == 0
        assert u % c == 0
        assert o % u == 0
    # A step at most doubles a block, so the nearest is within the square root of 2.
    assert nbytes <= max(math.sqrt(2) * target, inside)
    assert math.prod(unit) <= math.prod(grid.object_shape)


@given(grids(), st.integers(1, 1 << 30))
def test_blocks_of_other_itemsizes_nest(grid, target):
    small, large = (block_shape(grid, target, itemsize=n) for n in (8, 4))
    if block_unit(grid, target, itemsize=8) == block_unit(grid, target, itemsize=4):
        for a, b, s in zip(small, large, grid.shape, strict=True):
            assert b == s or b % a == 0


@given(grids(), st.integers(1, 1 << 30), st.data())
def test_blocks_beside_named_lengths_are_whole_units_near_the_target(grid, target, data):
    axes = data.draw(st.sets(st.sampled_from(range(len(grid.shape)))))
    named = {axis: data.draw(st.integers(1, grid.shape[axis])) for axis in sorted(axes)}
    block, unit = block_shape(grid, target, named=named), block_unit(grid, target)
    for axis, (b, u, s) in enumerate(zip(block, unit, grid.shape, strict=True)):
        assert b == named[axis] if axis in named else b == s or b % u == 0
    least = [named.get(axis, min(u, s)) for axis, (u, s) in enumerate(zip(unit, grid.shape, strict=True))]
    assert math.prod(block) * grid.dtype.itemsize <= max(math.sqrt(2) * target, math.prod(least) * grid.dtype.itemsize)


@given(grids(), st.integers(1, 1 << 30), st.data())
def test_naming_the_default_lengths_changes_no_block(grid, target, data):
    default = block_shape(grid, target)
    assume(block_unit(grid, math.prod(default), itemsize=1) == block_unit(grid, target))  # parts of a large shard
    axes = data.draw(st.sets(st.sampled_from(range(len(grid.shape)))))
    assert block_shape(grid, math.prod(default), itemsize=1, named={axis: default[axis] for axis in axes}) == default


def test_a_huge_grid_of_tiny_chunks_is_no_loop():
    assert block_shape(Grid.of((10**12,), (8,), dtype="u1"), 256 * MIB) == (268435456,)


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("n_chunks", [1_000_003, 999_999_937, 2 * 999_999_937, 10**12 + 39, 2**61 - 1])
def test_a_shard_of_a_prime_number_of_chunks_gives_blocks_near_the_target(n_chunks, n_shards):
    n = n_chunks * n_shards
    (length,) = block_shape(Grid.of((n,), (1,), (n_chunks,), "u1"), 64 * MIB)
    assert length == min(n, max(64 * MIB, -(-n // (1_000_000 * 64 * MIB)) * 64 * MIB))
    assert -(-n // length) <= 1_000_000


def test_a_shard_of_a_prime_number_of_chunks_is_divided_only_far_above_the_target():
    grid = Grid.of((2, 1009, 64), (1, 1, 8), (1, 1009, 64), "u1")
    shard_nbytes = 1009 * 64
    assert block_shape(grid, shard_nbytes // 4 + 1) == (1, 1009, 64)
    assert block_shape(grid, shard_nbytes // 5) == (1, 256, 64)  # inside one shard, before it reaches into the next


@pytest.mark.parametrize(
    ("lengths", "unit", "cut"),
    [
        ((8, 8, 4), 4, None),
        ((8, 8, 3), 4, None),  # the axis ends there
        ((6, 6, 8), 4, 6),
        ((8, 6, 6), 4, 14),
        ((20,), 3, None),
        ((0,), 3, None),
    ],
)
def test_first_cut(lengths, unit, cut):
    assert first_cut(lengths, unit) == cut


@pytest.mark.parametrize(
    ("length", "unit", "axis_length", "expected"),
    [(30, 8, 100, 32), (3, 8, 100, 8), (27, 8, 100, 24), (90, 64, 70, 64)],
)
def test_aligned_length(length, unit, axis_length, expected):
    assert aligned_length(length, unit, axis_length) == expected


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.builds(
        slice, *[st.one_of(st.none(), st.integers(-30, 30))] * 2, st.sampled_from([None, 1, 2, 5, 40, -1, -3, -40])
    ),
)
def test_select_blocks(lengths, key):
    selected = range(sum(lengths))[key]
    block_of = np.repeat(np.arange(len(lengths)), lengths)
    blocks = list(dict.fromkeys(block_of[list(selected)].tolist()))
    parts, n_touched = select_blocks(lengths, selected)
    assert parts == (tuple(block_of[list(selected)].tolist().count(b) for b in blocks) or (0,))
    assert n_touched == sum(lengths[b] for b in blocks)


def test_select_blocks_goes_through_blocks_not_indices():
    assert select_blocks((10**12, 10**12), range(5, 2 * 10**12, 2)) == ((499_999_999_998, 500_000_000_000), 2 * 10**12)


@pytest.mark.parametrize("n_chunks", [2**61 - 1, (2**31 - 1) * (2**29 - 3)])
def test_a_shard_of_very_many_chunks_without_small_factors_is_one_chunk_or_all(n_chunks):
    assert block_unit(Grid.of((n_chunks,), (1,), (n_chunks,)), MIB) == (1,)
    assert block_unit(Grid.of((n_chunks,), (1,), (n_chunks,)), 1 << 62) == (n_chunks,)
