"""How does `chunks=` of `xarray.open_dataset` reach the device?

xarray gives `chunks=` to no backend. It calls `Variable.chunk` with a chunk manager, for dask xarray's `DaskManager`,
and that marks every block as a NumPy array and ends every task in `numpy.asarray`: data decoded on the device would
silently come back to the host. So the engine makes its data variables `BlockVariable`, a `Variable` whose `chunk`
puts `BlockManager` in the place of `DaskManager`.

Why not by xarray's own switches? A chunk manager registered as an entry point is not reached without an argument, and
its registration alone changes how xarray picks managers for everybody; `xarray.set_options(chunk_manager=...)`, or
replacing "dask" among the registered managers, reach every other engine's arrays and depend on what was imported or
opened before. A variable's own method concerns that variable alone, wherever it goes (`isel`, `rename`, `merge`,
pickles, worker processes), and also `Dataset.chunk` on lazily opened data.

The variable remains a `BlockVariable` when it is chunked, so that selections still reach the read: dask pushes down
only the first of several, and none past a concatenation, while its blocks are far larger than stored chunks.

dask is imported when it is needed: xarray loads every engine's module, and dask is optional.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from xarray import Variable
from xarray.core.indexing import (
    BasicIndexer,
    CopyOnWriteArray,
    LazilyIndexedArray,
    LazilyVectorizedIndexedArray,
    MemoryCachedArray,
    OuterIndexer,
    VectorizedIndexer,
    apply_indexer,
    expanded_indexer,
)
from xarray.namedarray.daskmanager import DaskManager
from xarray.namedarray.parallelcompat import guess_chunkmanager

from xgpuzarr.device_array import is_on_device
from xgpuzarr.plan.blocks import block_shape, lengths_along, listable, select_blocks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import dask.array

    from xgpuzarr.lazy_array import StoredArray

__all__ = ["BlockVariable", "PreferredBlocks", "Unread", "preferred_blocks", "read_by"]


class BlockVariable(Variable):
    """A variable over a `StoredArray`. Chunked, its blocks are read by this package, to the array's device."""

    __slots__ = ()

    def chunk(  # type: ignore[override]
        self,
        chunks: Any = {},  # noqa: B006  # as in xarray
        name: str | None = None,
        lock: bool | None = None,
        inline_array: bool | None = None,
        chunked_array_type: Any = None,
        from_array_kwargs: Any = None,
        **chunks_kwargs: Any,
    ) -> Any:
        """Make the data a dask array of blocks; parameters and result are those of `xarray.Variable.chunk`."""
        variable, manager = self, guess_chunkmanager(chunked_array_type)
        if _unread(self._data) is None:  # in memory: xarray's wrappers go, or chunking would end in numpy.asarray
            variable = self._replace(data=self.data)
        if isinstance(manager, DaskManager):
            manager = BlockManager(self.dims, dict(self.encoding.get("preferred_chunks", {})))
        return super(BlockVariable, variable).chunk(
            chunks, name, lock, inline_array, manager, from_array_kwargs, **chunks_kwargs
        )

    def __getitem__(self, key: Any) -> Any:
        """Select from the blocks, or from what they are read from."""
        data: Any = self._data
        unread = read_by(data)
        if unread is None:
            return super().__getitem__(key)
        dims, indexer, _ = self._broadcast_indexes(key)  # type: ignore[no-untyped-call]
        if not isinstance(indexer, BasicIndexer):
            return super().__getitem__(key)
        return self._finalize_indexing_result(dims, _select(data, unread, indexer))

    def to_base_variable(self) -> Variable:
        """Return a copy, which is of this class: xarray calls this where it takes an index away, on lazy data too."""
        return self._replace()

    to_variable = to_base_variable


def _mark(blocks: dask.array.Array, unread: Unread) -> dask.array.Array:
    """Note on a dask array that its blocks are those of `unread`; no operation of dask's hands the note on.

    Assignment to a dask array changes it in place, and gives it another name: hence the name in the note.
    """
    blocks.__dict__["_xgpuzarr_unread"] = blocks.name, unread
    return blocks


def read_by(data: Any) -> Unread | None:
    """Find what the blocks of a dask array are read from; None for any other data."""
    name, unread = getattr(data, "_xgpuzarr_unread", (None, None))
    return unread if unread is not None and data.name == name else None


def _select(blocks: dask.array.Array, unread: Unread, indexer: BasicIndexer) -> dask.array.Array:
    """Select from a dask array that only reads, by ints and slices.

    What leaves out half of the blocks it touches is read by itself. Otherwise dask selects from the blocks, and then
    overlapping selections, as in ``x[1:] - x[:-1]``, share them.
    """
    from xgpuzarr.dask_arrays import to_dask

    lengths, n_touched = [], 1
    for axis, (k, along) in enumerate(zip(indexer.tuple, blocks.chunks, strict=True)):
        indices = range(sum(along))
        if not isinstance(k, slice) and not -len(indices) <= k < len(indices):
            raise IndexError(f"index {k} is out of bounds for axis {axis} with size {len(indices)}")
        selected = indices[k] if isinstance(k, slice) else range(indices[k], indices[k] + 1)
        selected_lengths, n_touched_along = select_blocks(along, selected)
        n_touched *= n_touched_along
        if isinstance(k, slice):
            lengths.append(selected_lengths)
    narrowed = Unread(unread.data[indexer])
    by_itself = 2 * math.prod(narrowed.shape) < n_touched
    return _mark(to_dask(narrowed, tuple(lengths)) if by_itself else blocks[indexer.tuple], narrowed)


class PreferredBlocks(dict[Any, int]):
    """Lengths of the default blocks by dimension, as ``encoding["preferred_chunks"]``.

    xarray asks such a mapping twice: with a default for the lengths to use where the user named none, and without one
    for the stored chunks whose cutting deserves a warning. A cut through a block is none: it may well lie between
    stored chunks. So the second question gets no answer, and `BlockManager` warns of the cuts that matter.

    Parameters
    ----------
    lengths
        Lengths of the default blocks by dimension.
    objects
        Lengths of the stored chunks or shards by the same dimensions.
    """

    def __init__(self, lengths: Mapping[Any, int], objects: Mapping[Any, int]) -> None:
        super().__init__(lengths)
        self.objects = objects

    def get(self, dim: Any, axis_length: Any = None) -> Any:
        """Lengths of all blocks along a dimension if the length of that is given, else None."""
        if axis_length is None:
            return None
        if axis_length == 0 or dim not in self:  # dask divides by the largest length
            return super().get(dim, axis_length)
        if _has_chunk_size():
            return list(lengths_along(axis_length, _UnnamedLength(listable(self.objects[dim], axis_length))))
        return _KeptLengths(lengths_along(axis_length, _UnnamedLength(self[dim])))


class _UnnamedLength(int):
    """Length of a block along a dimension for which the user named none, or "auto"."""


class _KeptLengths(list[int]):
    """Lengths of blocks, of which dask keeps all where the user wants "auto".

    xarray has dask work out "auto" before the engine hears of it, with these as the blocks that there were. dask would
    scale their median to its own `array.chunk-size`, across stored chunks if it comes to that. But NaN, here, is
    neither so large that a block is cut nor so small that blocks are joined.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Make what `numpy.median` takes."""
        return np.array([np.nan])


def _has_chunk_size() -> bool:
    """Whether dask's size of "auto" is one that the user has chosen: then dask joins stored chunks up to that."""
    from dask import config

    chosen = config.get("array.chunk-size")
    return all(default.get("array", {}).get("chunk-size") != chosen for default in config.defaults)


def _is_unnamed(want: Any) -> bool:
    """Whether an element of `chunks` is what `PreferredBlocks` gave: the first block that dask joins has a sum."""
    return isinstance(want, tuple) and len(want) > 0 and isinstance(want[0], _UnnamedLength)


def preferred_blocks(dims: Iterable[Hashable], array: StoredArray, itemsize: int) -> PreferredBlocks:
    """Default block of an array, by dimension.

    Parameters
    ----------
    dims
        Dimensions of the variable.
    array
        Its array.
    itemsize
        Bytes of an element that `ReadOptions.target_block_bytes` counts. Give the largest of all variables of a
        dataset, and their blocks line up.

    Returns
    -------
    PreferredBlocks
        Empty for an array without a layout: dask decides on those.
    """
    if array.layout is None:
        return PreferredBlocks({}, {})
    dims, block = tuple(dims), block_shape(array.layout, array.target_block_bytes, itemsize=itemsize)
    objects = zip(dims, array.layout.object_shape, strict=True)
    return PreferredBlocks(dict(zip(dims, block, strict=True)), dict(objects))


class BlockManager(DaskManager):
    """xarray's dask manager for the data of one `BlockVariable`.

    Parameters
    ----------
    dims
        Dimensions of the variable.
    preferred
        Lengths of its default blocks.
    """

    def __init__(self, dims: tuple[Hashable, ...], preferred: Mapping[Any, int]) -> None:
        super().__init__()
        self._dims = dims
        self._preferred = preferred

    def rechunk(self, data: Any, chunks: Any, **kwargs: Any) -> Any:
        """Rechunk a dask array, blocks on the device by tasks: distributed's shuffle takes them to the host's disk."""
        if is_on_device(data):
            kwargs.setdefault("method", "tasks")
        return super().rechunk(data, chunks, **kwargs)

    def from_array(self, data: Any, chunks: Any, **kwargs: Any) -> dask.array.Array:
        """Make a dask array of data. The name, lock and so on that xarray chooses do not apply to what is unread."""
        from xgpuzarr.dask_arrays import block_lengths, stored_block_lengths, to_dask

        unread = _unread(getattr(data, "array", data))
        if unread is None:
            return super().from_array(data, chunks, **kwargs)
        layout = unread.stored.layout
        if layout is None or not unread.is_whole:
            return _mark(to_dask(unread, block_lengths(chunks, unread.shape, unread.dtype)), unread)
        default = tuple(self._preferred.get(dim, n) for dim, n in zip(self._dims, unread.shape, strict=True))
        is_stored = all(d == min(c, n) for d, c, n in zip(default, layout.chunk_shape, unread.shape, strict=True))
        if isinstance(chunks, tuple) and not is_stored:  # stored chunks as blocks are not fitted to what is named
            chunks = tuple("auto" if _is_unnamed(want) else want for want in chunks)
        lengths = stored_block_lengths(chunks, layout, unread.dtype, default, self._dims)
        return _mark(to_dask(unread, lengths), unread)


class Unread:
    """Lazy data of xarray's, read by ints, slices and index arrays that each select along their own axis.

    Parameters
    ----------
    data
        What xarray has selected of the stored array so far.
    """

    __slots__ = ("data",)

    def __init__(self, data: LazilyIndexedArray | LazilyVectorizedIndexedArray) -> None:
        self.data = data

    @property
    def stored(self) -> StoredArray:
        """The array below."""
        array: StoredArray = self.data.array
        return array

    @property
    def is_whole(self) -> bool:
        """Whether nothing has been selected yet."""
        selected = zip(self.data.key.tuple, self.stored.shape, strict=True)
        return all(isinstance(k, slice) and k.indices(n) == (0, n, 1) for k, n in selected)

    name = property(lambda self: self.stored.name)
    device = property(lambda self: self.stored.device)
    dtype = property(lambda self: self.stored.dtype)
    shape = property(lambda self: self.data.shape)

    @property
    def has_small_handle(self) -> bool:
        """See `LazyArray`."""
        return self.stored.has_small_handle and not any(isinstance(k, np.ndarray) for k in self.data.key.tuple)

    def __getitem__(self, key: Any) -> Any:
        indexer = OuterIndexer(expanded_indexer(key, len(self.shape)))  # type: ignore[no-untyped-call]
        return apply_indexer(self.data, indexer).get_duck_array()

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        # dask hashes the text of what it gets here, and that of a long array leaves elements out
        return normalize_token((self.stored, type(self.data.key).__name__, self.data.key.tuple))

    def __reduce__(self) -> tuple[Any, ...]:  # every task carries one, and xarray's classes would double it
        return _unpickle, (self.stored, None if self.is_whole else self.data.key)


def _unpickle(stored: Any, key: Any) -> Unread:
    lazy = LazilyVectorizedIndexedArray if isinstance(key, VectorizedIndexer) else LazilyIndexedArray
    return Unread(lazy(stored, key))


def _unread(data: Any) -> Unread | None:
    """Lazy data below what xarray wraps around it; None if it has been read or assigned to."""
    while isinstance(data, (CopyOnWriteArray, MemoryCachedArray)):
        data = data.array
    return Unread(data) if isinstance(data, (LazilyIndexedArray, LazilyVectorizedIndexedArray)) else None
