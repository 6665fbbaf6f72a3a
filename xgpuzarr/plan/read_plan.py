"""What does a read touch, and where does each chunk land? One table of chunks answers, as NumPy columns.

1. Each group of the selection lists the chunks it touches (`group_chunks`).
2. The chunks of the read are the product of those lists, in C order; so are the objects that hold them.
3. Columns that follow from one group are small tables looked up by `ReadPlan.group_row`, never stored per chunk.

Nothing here is one Python object per chunk: 10**6 chunks plan in well under a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xgpuzarr.errors import UnsupportedError, chunk_label
from xgpuzarr.plan.cost import Decision
from xgpuzarr.plan.group_chunks import INT64_MAX, GroupChunks, SliceChunks, group_chunks, linear_ids, n_touched
from xgpuzarr.plan.group_products import along, c_strides, product_rows, product_sum
from xgpuzarr.plan.selection import AxisSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgpuzarr.plan.layout import ArrayLayout
    from xgpuzarr.plan.selection import Selection

__all__ = ["GatherTables", "ReadPlan", "SliceColumns", "format_nbytes", "plan_read"]

Int64Array = npt.NDArray[np.int64]
type Rows = slice | npt.NDArray[np.integer]

MAX_CHUNKS = 100_000_000
"""Most chunks of one plan; its columns would take some 10 GB. Metadata alone could otherwise exhaust the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceColumns:
    """Regions of chunks when every group is a slice: element ``i`` along an axis, ``i < count``, goes from
    ``inner_start + step * i`` in the chunk to ``out_start + i`` in the grouped output.

    Attributes
    ----------
    out_start, count, inner_start
        int64, C-contiguous, (n_rows, ndim), in elements along each axis.
    step
        One per axis, the same for all chunks; negative runs backwards in the chunk.
    """

    out_start: Int64Array
    count: Int64Array
    inner_start: Int64Array
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GatherTables:
    """Where any element of the grouped output comes from, for every kind of group.

    The element at ``(p_0, p_1, ...)``, one position per group, is in the chunk of plan row
    ``sum(row_stride[g] * chunk_row[g][p_g])``, at coordinate ``inner[d][p_g]`` along each axis ``d``, where
    ``g = axis_group[d]``. So with ``s_d`` the C-order strides of a chunk in elements, its offset in the decoded
    chunk is ``sum(s_d * inner[d][p_g])``. The tables are as long as the grouped output is wide, not as large.

    Attributes
    ----------
    chunk_row
        For each group, int32, (group size,): row of the group's chunk table.
    row_stride
        For each group, the plan rows between neighbouring rows of its chunk table.
    inner
        For each axis, int64, (size of the axis's group,): coordinate in the chunk.
    axis_group
        For each axis, its group.
    """

    chunk_row: tuple[npt.NDArray[np.int32], ...]
    row_stride: tuple[int, ...]
    inner: tuple[Int64Array, ...]
    axis_group: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The chunks of one read; all arrays in host memory, one row per chunk unless said otherwise.

    Attributes
    ----------
    layout
        The array read.
    selection
        What is asked of it.
    group_chunks
        For each group of the selection, the chunks it touches.
    chunk_coords
        int64, (n_chunks, ndim): chunk coordinates in the array's chunk grid.
    group_row
        int32, (n_chunks, n_groups): the chunk's row in each table of `group_chunks`. Rows are in C order, the last
        group varying fastest.
    object_row
        int64, (n_chunks,): row of `object_coords` that holds the chunk.
    object_coords
        int64, (n_objects, ndim): coordinates of each stored object in the object grid, once, in order of first use.
    level_index
        int64, (n_chunks, n_levels): for each shard level, outermost first, the C-order number of the entry in the
        shard's index that leads to the chunk.
    decision
        Where a read to the device decodes the chunks; None where only the codec chain has been looked at.
    """

    layout: ArrayLayout
    selection: Selection
    group_chunks: tuple[GroupChunks, ...]
    chunk_coords: Int64Array
    group_row: npt.NDArray[np.int32]
    object_row: Int64Array
    object_coords: Int64Array
    level_index: Int64Array
    decision: Decision | None = None

    @property
    def n_chunks(self) -> int:
        """Chunks touched."""
        return len(self.chunk_coords)

    @property
    def n_objects(self) -> int:
        """Stored objects that hold them."""
        return len(self.object_coords)

    @property
    def decoded_nbytes(self) -> int:
        """Decoded size of all chunks touched, in bytes."""
        return self.n_chunks * self.layout.chunk_nbytes

    @property
    def out_nbytes(self) -> int:
        """Size of the result, in bytes."""
        return self.selection.size * self.layout.dtype.itemsize

    def keys(self, object_rows: Rows | None = None) -> list[str]:
        """Keys of stored objects, relative to the store; of all if no rows of `object_coords` are given."""
        coords = self.object_coords if object_rows is None else self.object_coords[object_rows]
        return [self.layout.key(row) for row in coords.tolist()]

    def label(self, row: int, offset: int = 0, nbytes: int | None = None) -> str:
        """Name the chunk of a row for a message; `offset` and `nbytes` are its byte range in its object."""
        key = self.layout.key(self.object_coords[self.object_row[row]].tolist())
        coords = tuple(self.chunk_coords[row].tolist())
        return chunk_label(self.layout.path, coords, key, self.layout.store_name, offset, nbytes)

    def region(self, row: int) -> tuple[tuple[slice | Int64Array, ...], tuple[slice | Int64Array, ...]]:
        """Region of one chunk: positions per group of the grouped output, and per axis of the chunk.

        Arrays are 1-D int64. Those of the axes of one `Points` group go together pointwise; groups combine as a
        product. Where all are slices, ``out[region[0]] = chunk[region[1]]`` copies the region.
        """
        out: list[slice | Int64Array] = []
        inner: list[slice | Int64Array] = [slice(None)] * self.layout.ndim
        for table, group_row in zip(self.group_chunks, self.group_row[row].tolist(), strict=True):
            positions, along_axes = table.region(group_row)
            out.append(positions)
            for number, axis in enumerate(table.group.axes):
                inner[axis] = along_axes[number]
        return tuple(out), tuple(inner)

    @property
    def is_of_slices(self) -> bool:
        """Whether every group is a slice."""
        return all(isinstance(table, SliceChunks) for table in self.group_chunks)

    def slice_columns(self, rows: Rows) -> SliceColumns | None:
        """Regions of `rows` as columns, for one launch over many chunks; None if a group is not a slice."""
        if not self.is_of_slices:
            return None
        tables = [table for table in self.group_chunks if isinstance(table, SliceChunks)]
        picks = self.group_row[rows]
        columns = np.empty((3, len(picks), len(tables)), np.int64)
        for axis, table in enumerate(tables):
            of_chunks = np.stack([table.out_start, table.count, table.inner_start])
            columns[:, :, axis] = of_chunks.take(picks[:, axis], axis=1)
        out_start, count, inner_start = columns
        return SliceColumns(out_start, count, inner_start, tuple(table.step for table in tables))

    def gather_tables(self) -> GatherTables:
        """Tables that lead from any element of the grouped output to its chunk and its place there."""
        inner: list[Int64Array] = [np.empty(0, np.int64)] * self.layout.ndim
        axis_group = [0] * self.layout.ndim
        for number, table in enumerate(self.group_chunks):
            for axis, positions in zip(table.group.axes, table.output_inner(), strict=True):
                inner[axis] = positions
                axis_group[axis] = number
        return GatherTables(
            chunk_row=tuple(table.output_rows() for table in self.group_chunks),
            row_stride=c_strides([len(table.chunk_coords) for table in self.group_chunks]),
            inner=tuple(inner),
            axis_group=tuple(axis_group),
        )

    def straight_offset(self, rows: Rows) -> Int64Array:
        """Where each chunk lies whole, in order and contiguously in the grouped output.

        Returns
        -------
        offset
            int64, (n_rows,): elements from the start of the grouped output (C order) to the chunk's first; -1 for
            chunks that are wanted in part, in another order, or not in one piece.
        """
        picks = self.group_row[rows]
        offset = np.zeros(len(picks), np.int64)
        sizes = self.selection.grouped_shape
        lengths = [math.prod(table.chunk_shape) for table in self.group_chunks]
        # One piece: from the first group along which a chunk has more than one element, all later ones are covered.
        spread = next((number for number, length in enumerate(lengths) if length != 1), len(lengths))
        if lengths[spread + 1 :] != list(sizes[spread + 1 :]):
            offset[:] = -1
            return offset
        is_whole = np.ones(len(picks), np.bool_)
        for number, (table, stride) in enumerate(zip(self.group_chunks, c_strides(sizes), strict=True)):
            whole, out_start = table.whole()
            is_whole &= whole[picks[:, number]]
            offset += out_start[picks[:, number]] * stride
        offset[~is_whole] = -1
        return offset

    def explain(self) -> str:
        """Say in plain text what the read touches, how its chunks are decoded, and why so."""
        layout, chain = self.layout, self.layout.codec_chain
        shards = f", shards {layout.object_shape}" if layout.shard_levels else ""
        decision = self.decision or Decision(chain.route, "; ".join(chain.reasons))
        n_straight = int((self.straight_offset(slice(None)) >= 0).sum())
        decoded, wanted = format_nbytes(self.decoded_nbytes), format_nbytes(self.out_nbytes)
        lines = [
            f"array {layout.path!r}: Zarr v{layout.zarr_format}, {layout.dtype}, shape {layout.shape}",
            f"chunks {layout.chunk_shape}{shards}",
            f"selection: shape {self.selection.shape}, {wanted}",
            f"chunks: {self.n_chunks} of {math.prod(layout.grid_shape)}, {decoded} decoded",
            f"straight into the result: {n_straight} chunks",
            f"objects: {self.n_objects} of {math.prod(layout.object_grid_shape)}",
            f"codec chain: {chain}",
            f"route: {decision.route}",
            *([f"  because {decision.reason}"] if decision.reason else []),
        ]
        return "\n".join(lines)


def plan_read(layout: ArrayLayout, selection: Selection) -> ReadPlan:
    """Plan the read of `selection` from the array `layout`.

    Parameters
    ----------
    layout
        The array.
    selection
        Made for ``layout.shape``.

    Raises
    ------
    UnsupportedError
        A size passes what 64 bits hold, or the selection touches more than `MAX_CHUNKS` chunks.
    """
    _check_sizes(layout, selection)
    tables = tuple(
        group_chunks(group, _pick(layout.grid_shape, group.axes), _pick(layout.chunk_shape, group.axes))
        for group in selection.groups
    )
    n_rows = [len(table.chunk_coords) for table in tables]
    _check_n_chunks(layout, math.prod(n_rows))
    chunk_coords = product_rows([table.chunk_coords for table in tables], [group.axes for group in selection.groups])
    group_row = np.empty((*n_rows, len(tables)), np.int32)
    for number, length in enumerate(n_rows):
        group_row[..., number] = along(np.arange(length, dtype=np.int32), number, len(n_rows))
    object_row, object_coords = _objects(layout, tables, chunk_coords)
    return ReadPlan(
        layout=layout,
        selection=selection,
        group_chunks=tables,
        chunk_coords=chunk_coords,
        group_row=group_row.reshape(math.prod(n_rows), len(tables)),
        object_row=object_row,
        object_coords=object_coords,
        level_index=_level_index(layout, tables),
    )


def _check_sizes(layout: ArrayLayout, selection: Selection) -> None:
    """Refuse what would overflow an int64 column, before anything is built."""
    subject = f"array {layout.path!r}"
    for axis, (size, length) in enumerate(zip(layout.shape, layout.object_shape, strict=True)):
        if size + length > INT64_MAX:
            raise UnsupportedError(f"{subject}: axis {axis} of {size} elements in objects of {length} passes 2**63 - 1")
    for level in layout.shard_levels:
        if math.prod(level.grid_shape) > INT64_MAX:
            raise UnsupportedError(f"{subject}: {level.grid_shape} chunks in a shard pass 2**63 - 1")
    if layout.chunk_nbytes > INT64_MAX:
        raise UnsupportedError(f"{subject}: a chunk of shape {layout.chunk_shape} passes 2**63 - 1 bytes")
    if selection.size * layout.dtype.itemsize > INT64_MAX:
        raise UnsupportedError(f"{subject}: a selection of shape {selection.shape} passes 2**63 - 1 bytes; select less")
    for group in selection.groups:
        if isinstance(group, AxisSlice):
            _check_n_chunks(layout, n_touched(group, layout.chunk_shape[group.axis]))


def _check_n_chunks(layout: ArrayLayout, n_chunks: int) -> None:
    if n_chunks > MAX_CHUNKS:
        raise UnsupportedError(
            f"array {layout.path!r}: one read of {n_chunks} chunks; the most is {MAX_CHUNKS}, select less at a time"
        )


def _objects(
    layout: ArrayLayout, tables: tuple[GroupChunks, ...], chunk_coords: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Objects touched, in order of first use, and for each chunk its object.

    Both are products over the groups: numbering each group's objects by first use numbers the products so as well.
    """
    if layout.object_shape == layout.chunk_shape or len(chunk_coords) == 0:
        return np.arange(len(chunk_coords), dtype=np.int64), chunk_coords
    chunks_per_object = [o // c for o, c in zip(layout.object_shape, layout.chunk_shape, strict=True)]
    numbers, coords = [], []
    for table in tables:
        axes = table.group.axes
        in_grid = table.chunk_coords // np.array(_pick(chunks_per_object, axes), np.int64)
        number, firsts = _number_by_first_use(linear_ids(list(in_grid.T), _pick(layout.object_grid_shape, axes)))
        numbers.append(number)
        coords.append(in_grid[firsts])
    strides = c_strides([len(rows) for rows in coords])
    object_row = product_sum([number * stride for number, stride in zip(numbers, strides, strict=True)])
    return object_row, product_rows(coords, [table.group.axes for table in tables])


def _number_by_first_use(ids: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Give equal `ids` one number, the first met 0, and find where each number is met first."""
    _, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
    by_first_use = np.argsort(firsts)
    number = np.empty_like(by_first_use)
    number[by_first_use] = np.arange(len(firsts))
    return number[inverse], firsts[by_first_use]


def _level_index(layout: ArrayLayout, tables: tuple[GroupChunks, ...]) -> Int64Array:
    """For each chunk and shard level the entry in the shard's index (Zarr sharding codec: entries in C order)."""
    n_chunks = math.prod(len(table.chunk_coords) for table in tables)
    index = np.empty((n_chunks, len(layout.shard_levels)), np.int64)
    for number, level in enumerate(layout.shard_levels):
        chunks_per_entry = [e // c for e, c in zip(level.chunk_shape, layout.chunk_shape, strict=True)]
        strides = c_strides(level.grid_shape)
        parts = []
        for table in tables:
            part = np.zeros(len(table.chunk_coords), np.int64)
            for axis, coords in zip(table.group.axes, table.chunk_coords.T, strict=True):
                part += coords // chunks_per_entry[axis] % level.grid_shape[axis] * strides[axis]
            parts.append(part)
        index[:, number] = product_sum(parts)
    return index


def _pick(values: Sequence[int], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(values[axis] for axis in axes)


def format_nbytes(nbytes: int) -> str:
    """Bytes in decimal units, three digits.

    Examples
    --------
    >>> format_nbytes(4152960)
    '4.15 MB'
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} EB"
