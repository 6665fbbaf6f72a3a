"""`ds.gpuzarr`: where the variables of a dataset are and why, and the ways to the device and back."""

from __future__ import annotations

import html
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import xarray as xr

from xgpuzarr.chunk_manager import read_by
from xgpuzarr.device_array import is_dask
from xgpuzarr.device_variable import DeviceVariable, beside, lazy_selection, on_host, stored_array
from xgpuzarr.plan.layout import DEVICE_KINDS
from xgpuzarr.transfer import require_cupy, to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from xgpuzarr.array import ZarrArray
    from xgpuzarr.backend_array import GpuZarrBackendArray

__all__ = ["GpuZarrDataArrayAccessor", "GpuZarrDatasetAccessor", "Route", "Routes"]

Xarray = TypeVar("Xarray", xr.Dataset, xr.DataArray)

PREFETCH_THREADS = 8
"""Variables read at once. Each read overlaps its own stages; a few of them hide each other's ends."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one variable gets to where its values are used.

    Attributes
    ----------
    variable
        Name in the dataset.
    shape, dtype
        Of the variable, decoded.
    codec_chain
        Decode steps of its chunks; "" if it is in memory or computed.
    device
        Where values live: "cuda" or "cpu".
    route
        Where chunks are decoded: "device" or "host"; "" if it is in memory or computed.
    reason
        Why values or chunks are on the host; "" if both are on the device.
    chunk_nbytes
        Decoded size of a stored chunk, in bytes; None if not known.
    block_nbytes
        Size of the largest dask block, or of the default one where it is not chunked, in bytes; None if not known.
    remote_reader
        Who reads chunks to the device out of a store that is no local folder: "kvikio", or "client" with the reason.
        Tables leave it out where it is "" for all variables.
    """

    variable: str
    shape: tuple[int, ...]
    dtype: str
    codec_chain: str
    device: str
    route: str
    reason: str
    chunk_nbytes: int | None
    block_nbytes: int | None
    remote_reader: str = ""


class Routes(tuple[Route, ...]):
    """One `Route` a variable; prints as a table, in notebooks too."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = self._table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        heads, *rows = self._table()
        body = "".join(row(cells, "td") for cells in rows)
        return f"<table><thead>{row(heads, 'th')}</thead><tbody>{body}</tbody></table>"

    def _table(self) -> list[list[str]]:
        """Heads, and the cells of each route."""
        names = [field.name for field in fields(Route)]
        if not any(route.remote_reader for route in self):
            names.remove("remote_reader")
        heads = [name.replace("_nbytes", " bytes").replace("_", " ") for name in names]
        values = ([getattr(route, name) for name in names] for route in self)
        return [heads, *(["" if value is None else str(value) for value in row] for row in values)]


@xr.register_dataset_accessor("gpuzarr")  # type: ignore[no-untyped-call]
class GpuZarrDatasetAccessor:
    """What `engine="gpuzarr"` adds to a dataset.

    Parameters
    ----------
    dataset
        Any dataset.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset

    @property
    def routes(self) -> Routes:
        """Where each variable is decoded and where its values are, with the reason when that is the host."""
        return Routes(_route(name, variable) for name, variable in self._dataset.variables.items())

    @property
    def nbytes_device(self) -> int:
        """Bytes of device memory that all variables on the device take, once they are read."""
        return sum(variable.nbytes for variable in self._dataset.variables.values() if not on_host(variable))

    def to_device(self, names: str | Iterable[Hashable] | None = None) -> xr.Dataset:
        """Copy variables to the current device: read ones at once, dask blocks when they are computed.

        Those that are there already are not copied, but can be mixed with host data again after an operation that
        made them plain variables (`xarray.concat`, `xarray.apply_ufunc`).

        Parameters
        ----------
        names
            Which; None for all data variables of a dtype that CuPy has.

        Raises
        ------
        KeyError
            No such variable.
        TypeError
            CuPy has no such dtype, or the variable is an index.
        """
        if names is None:
            names = [name for name, array in self._dataset.data_vars.items() if array.dtype.kind in DEVICE_KINDS]
        names = _names(names)
        for name in names:
            if name in self._dataset.xindexes:
                raise TypeError(
                    f"variable {name!r} is an index, which xarray keeps on the host; copy what is made of it"
                )
        return _replaced(self._dataset, names, _on_device)

    def to_host(self, names: str | Iterable[Hashable] | None = None) -> xr.Dataset:
        """Copy variables to the host, waiting for the device; dask blocks when they are computed.

        A lazy variable stays lazy, and is then read and decoded on the host.

        Parameters
        ----------
        names
            Which; None for all.

        Raises
        ------
        KeyError
            No such variable.
        """
        return _replaced(self._dataset, self._dataset.variables if names is None else _names(names), _on_host)

    def prefetch(self) -> xr.Dataset:
        """Read all lazy variables on the device at once, into a dataset that holds them; not those in dask arrays."""
        variables = self._dataset.variables
        lazy = [name for name, v in variables.items() if lazy_selection(v._data) is not None and not on_host(v)]  # noqa: SLF001
        if not lazy:
            return self._dataset.copy()
        require_cupy()
        import cupy

        device = cupy.cuda.Device()

        def read(name: Hashable) -> xr.Variable:
            variable = variables[name].copy(deep=False)
            with device:
                variable = variable.load()
                cupy.cuda.get_current_stream().synchronize()
            return variable

        with ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="xgpuzarr-prefetch") as pool:
            return self._dataset.assign(dict(zip(lazy, pool.map(read, lazy), strict=True)))


@xr.register_dataarray_accessor("gpuzarr")  # type: ignore[no-untyped-call]
class GpuZarrDataArrayAccessor:
    """What `engine="gpuzarr"` adds to an array.

    Parameters
    ----------
    array
        Any data array.
    """

    def __init__(self, array: xr.DataArray) -> None:
        self._array = array

    def to_device(self) -> xr.DataArray:
        """Copy the values to the current device, not the coordinates; see `GpuZarrDatasetAccessor.to_device`.

        Examples
        --------
        >>> weights = np.cos(np.deg2rad(ds.lat)).gpuzarr.to_device()  # doctest: +SKIP
        >>> ds.t2m.weighted(weights).mean()  # doctest: +SKIP
        """
        return self._with(_on_device(self._array.variable))

    def beside(self, other: xr.DataArray) -> xr.DataArray:
        """Copy the values to where those of another array are, for your own functions of both; not the coordinates.

        Parameters
        ----------
        other
            Any data array. Where it is on the host, nothing is copied. Where it is in dask blocks on the device, the
            copy is made by the workers.

        Raises
        ------
        TypeError
            CuPy has no such dtype.

        Examples
        --------
        >>> xr.apply_ufunc(solar_angle, ds.t2m, ds.lat.gpuzarr.beside(ds.t2m))  # doctest: +SKIP
        """
        if on_host(other.variable):
            return self._array.copy(deep=False)
        return self._with(beside(self._array.variable, other.variable))

    def to_host(self) -> xr.DataArray:
        """Copy the values to the host; see `GpuZarrDatasetAccessor.to_host`."""
        return self._with(_on_host(self._array.variable))

    def _with(self, variable: xr.Variable) -> xr.DataArray:
        return self._array._replace(variable)  # the constructor makes any variable a plain one


def _on_device(variable: xr.Variable) -> xr.Variable:
    if not on_host(variable):
        data = variable._data  # noqa: SLF001
    elif (data := _relocated(variable, "cuda")) is None:
        data = to_device(variable.data)
    return DeviceVariable(variable.dims, data, variable.attrs, variable.encoding)


def _on_host(variable: xr.Variable) -> xr.Variable:
    data = variable._data  # noqa: SLF001
    if on_host(variable) and not (is_dask(data) and stored_array(data) is None):
        return variable
    relocated = _relocated(variable, "cpu")
    data = to_host(variable.data) if relocated is None else relocated
    return xr.Variable(variable.dims, data, variable.attrs, variable.encoding)


def _relocated(variable: xr.Variable, device: str) -> Any:
    """Lazy data of a variable, to be read to `device`; None if it is not lazy, or if xarray decodes it."""
    unread = lazy_selection(variable._data)  # noqa: SLF001
    if unread is None:
        return None
    array, rebuild = unread
    moved = array.on(device)
    return rebuild(moved) if moved.device == device else None


def _replaced(dataset: xr.Dataset, names: Iterable[Hashable], move: Callable[[xr.Variable], xr.Variable]) -> xr.Dataset:
    """Put what `move` makes of some variables in their places."""
    names = list(names)
    unknown = [name for name in names if name not in dataset.variables]
    if unknown:
        raise KeyError(f"no variables {sorted(map(str, unknown))}; there are {sorted(map(str, dataset.variables))}")
    moved = {name: (dataset.variables[name], move(dataset.variables[name])) for name in names}
    return dataset.assign({name: after for name, (before, after) in moved.items() if after is not before})


def _names(names: str | Iterable[Hashable]) -> list[Hashable]:
    return [names] if isinstance(names, str) else list(names)


def _route(name: Hashable, variable: xr.Variable) -> Route:
    data = variable._data  # noqa: SLF001
    blocks: Any = read_by(data)
    stored = stored_array(data if blocks is None else blocks.data)
    layout = None if stored is None else stored.layout
    return Route(
        variable=str(name),
        shape=variable.shape,
        dtype=str(variable.dtype),
        codec_chain="" if layout is None else str(layout.codec_chain),
        device="cpu" if on_host(variable) else "cuda",
        route="" if stored is None else stored.zarr_array.route,
        reason=_reason(variable, stored),
        chunk_nbytes=None if layout is None else layout.chunk_nbytes,
        block_nbytes=_block_nbytes(variable),
        remote_reader="" if stored is None else _remote_reader(stored.zarr_array),
    )


def _remote_reader(array: ZarrArray) -> str:
    return ": ".join(filter(None, [array.remote_reader, array.remote_reader_reason]))


def _reason(variable: xr.Variable, stored: GpuZarrBackendArray | None) -> str:
    if stored is not None:
        return stored.host_reason or stored.zarr_array.reason
    if isinstance(variable, xr.IndexVariable):
        return "index"
    return "in memory or computed" if on_host(variable) else ""


def _block_nbytes(variable: xr.Variable) -> int | None:
    itemsize: int = variable.dtype.itemsize
    if variable.chunks is not None:
        return prod(max(lengths) for lengths in variable.chunks) * itemsize
    preferred = variable.encoding.get("preferred_chunks")
    if not preferred or set(preferred) != set(variable.dims):
        return None
    return prod(min(preferred[dim], length) for dim, length in variable.sizes.items()) * itemsize
