"""How does a Zarr array become a dask array whose blocks are on the device? The only file on dask's internals.

`from_zarr` opens an array and hands it to `to_dask`, as the xarray engine does with its variables: one code path.

* A block is one read: whole chunks or shards near `ReadOptions.target_block_bytes` (`xgpuzarr.plan.blocks`).
* The task function is dask's own `getter`, because dask fuses only its own functions with the slices that follow:
  ``x[0, ::2]`` then reads what it touches, not whole blocks. It is told not to call `numpy.asarray`.
* The graph is one lazy Blockwise layer; it takes the same time for one block as for a million.
* Tasks hold a `BlockSource`, or the key of one that is more than a path: a store in memory, a table of references or
  index arrays stand in the graph once. It opens nothing until its first read, because the scheduler unpickles graphs,
  and that may see neither the store nor a device.
"""

from __future__ import annotations

import math
import numbers
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xgpuzarr.array import open_array
from xgpuzarr.errors import ChunkReadError, MissingDependencyError, UnsupportedError, XGpuZarrError
from xgpuzarr.freed_memory import keep_freed_memory
from xgpuzarr.options import ReadOptions, checked_options
from xgpuzarr.plan.blocks import aligned_length, block_shape, first_cut, lengths_along
from xgpuzarr.system import block_bytes
from xgpuzarr.transfer import device_meta
from xgpuzarr.warning import warn

try:
    import dask.array
    from dask.array.core import normalize_chunks
    from dask.base import tokenize
    from dask.utils import parse_bytes
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"{error.name} is not installed: pip install 'xgpuzarr[dask]'") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgpuzarr.lazy_array import LazyArray
    from xgpuzarr.opening import StoreLike
    from xgpuzarr.options import Device
    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["BlockSource", "Lengths", "block_lengths", "from_zarr", "stored_block_lengths", "to_dask"]


Chunks = str | int | tuple[Any, ...] | list[Any] | np.ndarray[Any, Any] | Mapping[int, Any]
Lengths = tuple[tuple[int, ...], ...]
"""Lengths of the blocks along each axis, as dask has them."""


def from_zarr(
    store: StoreLike,
    path: str = "",
    *,
    chunks: Chunks = "auto",
    device: Device = "auto",
    options: ReadOptions | None = None,
    zarr_format: Literal[2, 3] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dask.array.Array:
    """Make a dask array of one array of a Zarr store; only metadata is read.

    Parameters
    ----------
    store
        A folder, a `.zip` file, a URL, or a zarr-python store. Workers must reach it under the same name.
    path
        Path of the array inside the store; "" when the store is the array.
    chunks
        Shape of the blocks. "auto": whole chunks or shards near `ReadOptions.target_block_bytes`. A size as "100 MiB":
        whole chunks or shards near that. Else as in `dask.array.from_array`: an int, or a tuple, list, array or dict
        of the axes' lengths, each a length, the lengths of all blocks, -1 or None for the whole axis, or "auto". Axes
        that are "auto", or that a dict leaves out, get what makes blocks of about the default's size beside the
        lengths that are named. Blocks that cut chunks or shards give a warning that names a better length.
    device
        "cuda": blocks are CuPy arrays, each on the device of the worker that reads it. "cpu": NumPy arrays. "auto":
        what this process has. A process without a device can build the graph for workers that have one with "cuda".
    options, zarr_format, storage_options
        As in `xgpuzarr.open_array`.

    Returns
    -------
    dask.array.Array
        Lazy, of the array's dtype in native byte order.

    Raises
    ------
    FileNotFoundError, MetadataError, UnsupportedError
        As `xgpuzarr.open_array`; also if dask's `array.query-planning` is on.
    ValueError
        `chunks` does not fit the array, or makes more blocks than can be listed.

    Examples
    --------
    >>> import xgpuzarr
    >>> t2m = xgpuzarr.from_zarr("era5.zarr", "t2m")  # doctest: +SKIP
    >>> t2m[:, 100:200].mean(axis=0).compute()  # doctest: +SKIP
    """
    options = checked_options(options)
    array = open_array(
        store, path=path, device=device, options=options, zarr_format=zarr_format, storage_options=storage_options
    )
    layout = array.layout
    if layout is None:
        return to_dask(array, block_lengths(chunks, array.shape, array.dtype))
    default = block_shape(layout, block_bytes(options, array.device))
    return to_dask(array, stored_block_lengths(chunks, layout, array.dtype, default, range(array.ndim)))


def to_dask(array: LazyArray, chunks: Lengths) -> dask.array.Array:
    """Make a dask array that reads `array` block by block.

    Parameters
    ----------
    array
        What to read from.
    chunks
        Lengths of the blocks along each axis.

    Raises
    ------
    UnsupportedError
        dask's `array.query-planning` is on.
    """
    if dask.array.array_expr_enabled():
        raise UnsupportedError(
            "dask's array.query-planning is on, and it does not push selections down to reads; "
            "set it to False before dask.array is imported"
        )
    source, ndim = BlockSource(array), len(array.shape)
    token = tokenize(source, str(chunks))  # a string is hashed faster than 10^5 numbers
    return dask.array.from_array(  # type: ignore[no-untyped-call, no-any-return]
        source,
        chunks=chunks,
        name=f"{array.name or 'zarr'}-{token}",
        lock=False,
        asarray=False,
        meta=device_meta(ndim, array.dtype) if array.device == "cuda" else np.empty((0,) * ndim, array.dtype),
        inline_array=array.has_small_handle,
    )


class BlockSource:
    """The array that every task of a dask array holds; made by `to_dask`.

    Parameters
    ----------
    array
        What to read from.
    """

    __slots__ = ("_array", "_token")

    def __init__(self, array: LazyArray) -> None:
        self._array = array
        self._token: str = tokenize(array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis, in elements."""
        return self._array.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the blocks."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Any:
        if self._array.device == "cuda":
            keep_freed_memory()
        try:
            return self._array[key]
        except XGpuZarrError as error:
            worker = _this_worker()
            if not worker:
                raise
            raise type(error)(f"{worker}: {error}") from error
        except OSError as error:  # of opening: unpickling opened nothing
            process = _this_worker() or f"process {os.getpid()} on host {socket.gethostname()}"
            raise ChunkReadError(f"{process} cannot open what the client opened: {error}") from error

    def __dask_tokenize__(self) -> str:
        return self._token


def stored_block_lengths(
    chunks: Chunks, layout: ArrayLayout, dtype: np.dtype[Any], default: tuple[int, ...], axes: Sequence[Any]
) -> Lengths:
    """Write out the lengths of the blocks of a stored array, and warn where they cut its chunks.

    Parameters
    ----------
    chunks
        As in `from_zarr`.
    layout
        The stored array.
    dtype
        dtype of the blocks.
    default
        Shape of the default block.
    axes
        What to call the axes in warnings: dimension names, or numbers.

    Raises
    ------
    ValueError
        As `block_lengths`.
    """
    size: Any = chunks
    if isinstance(chunks, tuple) and all(isinstance(want, str) and want == chunks[0] for want in chunks):
        size = chunks[0] if chunks else "auto"
    if isinstance(size, str) and size != "auto":
        try:
            default, chunks = block_shape(layout, parse_bytes(size), itemsize=dtype.itemsize), "auto"
        except ValueError as error:
            raise ValueError(f"chunks={size!r} is neither 'auto' nor a size as '100 MiB'") from error
    wanted = _along_axes(chunks, layout.shape)
    for axis, want in enumerate(wanted):
        if isinstance(want, str) and want != "auto":
            raise ValueError(
                f"chunks has {want!r} for axis {axis}: a size in bytes is that of whole blocks, as chunks='100 MiB'"
            )
    filled = tuple(d if want == "auto" else want for want, d in zip(wanted, default, strict=True))
    lengths = block_lengths(filled, layout.shape, dtype)
    named = {axis: max(lengths[axis]) for axis, want in enumerate(wanted) if want != "auto"}
    if 0 < len(named) < len(wanted):
        fitted = block_shape(layout, math.prod(default), itemsize=1, named=named)
        default = tuple(d if axis in named else fitted[axis] for axis, d in enumerate(default))
        lengths = tuple(
            along if axis in named else lengths_along(layout.shape[axis], default[axis]) or (0,)
            for axis, along in enumerate(lengths)
        )
    _warn_of_cuts(layout, lengths, axes, default)
    return lengths


def block_lengths(chunks: Chunks, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Lengths:
    """Write out the lengths of the blocks along each axis; where there is a choice, it is dask's.

    Parameters
    ----------
    chunks
        As in `from_zarr`; a size in bytes for some axes too.
    shape, dtype
        Of the array.

    Raises
    ------
    ValueError
        `chunks` does not fit the array, or asks for more blocks than can be listed.
    """
    wanted = _along_axes(chunks, shape)
    if dtype.hasobject:  # of which dask knows no size
        wanted = tuple(-1 if want == "auto" else want for want in wanted)
    try:
        return normalize_chunks(wanted, shape, dtype=dtype)  # type: ignore[no-untyped-call, no-any-return]
    except MemoryError as error:
        raise ValueError(f"chunks={chunks!r} makes more blocks of shape {shape} than can be listed") from error


def _along_axes(chunks: Chunks, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """What is wanted along each axis: a length, the lengths of all blocks, "auto", a size in bytes, or None for all."""
    if not isinstance(chunks, (Mapping, str, numbers.Number, tuple, list, np.ndarray)):
        raise TypeError(f"chunks must be 'auto', a size as '100 MiB', lengths or a dict of axes, got {chunks!r}")
    ndim = len(shape)
    if isinstance(chunks, Mapping):
        unknown = [axis for axis in chunks if axis not in range(ndim)]
        if unknown:
            raise ValueError(f"chunks names axes {unknown}, but the array has axes 0 to {ndim - 1}")
        chunks = tuple(chunks.get(axis, "auto") for axis in range(ndim))
    elif isinstance(chunks, (str, numbers.Number)):
        chunks = (chunks,) * ndim
    wanted = tuple(tuple(want) if isinstance(want, (list, np.ndarray)) else want for want in chunks)
    if ndim == 1 and len(wanted) > 1 and all(isinstance(want, numbers.Number) for want in wanted):
        wanted = (wanted,)
    if len(wanted) != ndim:
        raise ValueError(f"chunks has {len(wanted)} lengths, but the array has {ndim} axes")
    for axis, (want, n) in enumerate(zip(wanted, shape, strict=True)):
        is_empty = n == 0  # whose only length xarray passes on
        if isinstance(want, numbers.Integral) and (want < -1 or (want == 0 and not is_empty)):
            raise ValueError(f"chunks must be lengths above 0, or -1 for a whole axis, got {want} for axis {axis}")
    return wanted


def _warn_of_cuts(layout: ArrayLayout, chunks: Lengths, axes: Sequence[Any], default: tuple[int, ...]) -> None:
    """Warn where blocks cut chunks, or shards that the default blocks leave whole."""
    for axis, (lengths, chunk, shard, n) in enumerate(
        zip(chunks, layout.chunk_shape, layout.object_shape, layout.shape, strict=True)
    ):
        if n == 0:
            continue
        unit = shard if default[axis] == n or default[axis] % shard == 0 else chunk
        cut, what = first_cut(lengths, chunk), f"stored chunks of {chunk}"
        cost = "each one cut is read and decoded for every block that has part of it"
        if cut is None:
            cut, what = first_cut(lengths, unit), f"stored shards of {unit}"
            cost = "the index of each one cut is read for every block that has part of it"
        if cut is not None:
            better = aligned_length(max(lengths), unit, n)
            warn(
                f"blocks cut {what} along {axes[axis]!r}, first at index {cut}; {cost}. "
                f"Use a multiple of {unit}, such as chunks={{{axes[axis]!r}: {better}}}"
            )


def _this_worker() -> str:
    """Name the worker whose task this is for somebody who reads an error message on another machine; "" outside one."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return ""
    try:
        worker = distributed.get_worker()
    except ValueError:  # not in a task of a worker
        return ""
    return f"worker {worker.address} on host {socket.gethostname()}"
