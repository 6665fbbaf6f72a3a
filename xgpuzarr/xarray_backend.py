"""How does xarray open a store through this package? Everything but the values of variables stays xarray's own.

1. xarray's Zarr backend reads groups, attributes, dimensions and encoding; `_Store` only puts a `GpuZarrBackendArray`
   under each variable, made from the array that is already open.
2. xarray decodes CF lazily. Its own code settles dtypes, attributes and encoding, and reads what it must (the first
   time stamps) on the host.
3. `_place` then looks at each data variable: the lazy steps that xarray has stacked on it are folded into the array
   itself, as `xgpuzarr.cf` steps, and the array is told where its values go. Coordinates, bounds, scalars, times,
   strings, and variables with a step that cannot be folded stay as xarray made them.

This is the only module that knows xarray's internals.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from xarray.backends.common import BackendArray, BackendEntrypoint, _normalize_path
from xarray.backends.zarr import ZarrBackendEntrypoint, ZarrStore
from xarray.coding.common import _ElementwiseFunctionArray
from xarray.coding.variables import BoolTypeArray, NativeEndiannessArray, _apply_mask, _scale_offset_decoding
from xarray.core import indexing
from xarray.core.utils import close_on_error

from xgpuzarr import cf
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from xgpuzarr.array import ZarrArray
    from xgpuzarr.options import Device
    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["DeviceVariable", "GpuZarrBackendArray", "GpuZarrBackendEntrypoint"]

COORDINATE_ATTRIBUTES = ("coordinates", "bounds", "climatology", "grid_mapping")
"""CF attributes that name the coordinates, cell bounds and projections of other variables."""


class GpuZarrBackendEntrypoint(BackendEntrypoint):
    """``xarray.open_dataset(store, engine="gpuzarr")``: xarray's Zarr engine with data variables on the device."""

    description = "Open Zarr stores into GPU memory"
    url = "https://docs.xarray.dev/en/stable/user-guide/io.html#zarr"
    supports_groups = True

    def guess_can_open(self, filename_or_obj: Any) -> bool:  # noqa: ARG002
        """Never: a store is opened on the device only where the engine is named."""
        return False

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        mask_and_scale: bool | Mapping[str, bool] = True,
        decode_times: Any = True,
        concat_characters: bool | Mapping[str, bool] = True,
        decode_coords: Any = True,
        drop_variables: str | Iterable[str] | None = None,
        use_cftime: bool | Mapping[str, bool] | None = None,
        decode_timedelta: Any = None,
        group: str | None = None,
        mode: Any = "r",
        consolidated: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        zarr_format: int | None = None,
        use_zarr_fill_value_as_mask: bool | None = None,
        cache_members: bool = True,
        device: Device = "auto",
        options: ReadOptions | None = None,
    ) -> xr.Dataset:
        """Open one group lazily.

        Parameters
        ----------
        filename_or_obj
            A folder, a URL, or a zarr-python store.
        mask_and_scale, decode_times, concat_characters, decode_coords, drop_variables, use_cftime, decode_timedelta
            As for `xarray.open_dataset`.
        group, mode, consolidated, storage_options, zarr_format, use_zarr_fill_value_as_mask, cache_members
            As for xarray's own Zarr engine.
        device
            "cuda": numeric data variables give CuPy arrays on the current device. "cpu": NumPy arrays. "auto": "cuda"
            if a device is usable, else "cpu" with one warning for the process.
        options
            How to read; never changes a result.

        Raises
        ------
        FileNotFoundError
            No store there, or no such group.
        UnsupportedError
            ``options.route`` is "device" and a data variable needs the host.
        """
        store: _Store = _Store.open_group(
            _normalize_path(filename_or_obj),
            group=group,
            mode=mode,
            consolidated=consolidated,
            storage_options=storage_options,
            zarr_format=zarr_format,
            use_zarr_fill_value_as_mask=_fill_value_as_mask(use_zarr_fill_value_as_mask, mask_and_scale),
            cache_members=cache_members,
        )
        return store.open_dataset(
            device,
            options or ReadOptions(),
            mask_and_scale=mask_and_scale,
            decode_times=decode_times,
            concat_characters=concat_characters,
            decode_coords=decode_coords,
            drop_variables=drop_variables,
            use_cftime=use_cftime,
            decode_timedelta=decode_timedelta,
        )

    def open_groups_as_dict(
        self,
        filename_or_obj: Any,
        *,
        mask_and_scale: bool | Mapping[str, bool] = True,
        decode_times: Any = True,
        concat_characters: bool | Mapping[str, bool] = True,
        decode_coords: Any = True,
        drop_variables: str | Iterable[str] | None = None,
        use_cftime: bool | Mapping[str, bool] | None = None,
        decode_timedelta: Any = None,
        group: str | None = None,
        mode: Any = "r",
        consolidated: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        zarr_format: int | None = None,
        use_zarr_fill_value_as_mask: bool | None = None,
        device: Device = "auto",
        options: ReadOptions | None = None,
    ) -> dict[str, xr.Dataset]:
        """Open a group and all groups below it lazily, by their paths relative to it.

        Parameters and errors are those of `open_dataset`.
        """
        parent = "/" + group.strip("/") if group else "/"
        stores = _Store.open_store(
            _normalize_path(filename_or_obj),
            group=parent,
            mode=mode,
            consolidated=consolidated,
            storage_options=storage_options,
            zarr_format=zarr_format,
            use_zarr_fill_value_as_mask=_fill_value_as_mask(use_zarr_fill_value_as_mask, mask_and_scale),
        )
        return {
            _relative(path, parent) if group else path: store.open_dataset(
                device,
                options or ReadOptions(),
                mask_and_scale=mask_and_scale,
                decode_times=decode_times,
                concat_characters=concat_characters,
                decode_coords=decode_coords,
                drop_variables=drop_variables,
                use_cftime=use_cftime,
                decode_timedelta=decode_timedelta,
            )
            for path, store in stores.items()
        }

    def open_datatree(self, filename_or_obj: Any, **kwargs: Any) -> xr.DataTree:
        """Open a group and all groups below it lazily, as a tree; parameters are those of `open_groups_as_dict`."""
        groups = self.open_groups_as_dict(filename_or_obj, **kwargs)
        tree = xr.DataTree.from_dict(groups)
        for path, dataset in groups.items():
            tree[path].set_close(dataset.close)
        return tree


class GpuZarrBackendArray(BackendArray):
    """A stored array as xarray's lazy variables hold it; indexing reads, and decodes CF where it was folded in.

    Parameters
    ----------
    zarr_array
        Reads stored values.
    dtype
        dtype of the result: after `steps`, or what xarray takes the stored values for where it decodes itself.
    steps
        CF decoding of the stored values.
    target_block_bytes
        See `ReadOptions`.
    """

    def __init__(
        self,
        zarr_array: ZarrArray,
        *,
        dtype: np.dtype[Any],
        steps: tuple[cf.Step, ...] = (),
        target_block_bytes: int,
    ) -> None:
        self.zarr_array = zarr_array
        self.shape = zarr_array.shape
        self.dtype = dtype
        self.steps = steps
        self.target_block_bytes = target_block_bytes

    @property
    def name(self) -> str:
        """Path of the array in its store."""
        return self.zarr_array.name

    @property
    def layout(self) -> ArrayLayout | None:
        """The stored array; None where zarr-python reads it."""
        return self.zarr_array.layout

    @property
    def device(self) -> str:
        """Where results live: "cuda" or "cpu"."""
        return self.zarr_array.device

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        if isinstance(key, indexing.VectorizedIndexer):
            stored = self.zarr_array.vindex[key.tuple]
        elif isinstance(key, indexing.OuterIndexer):
            stored = self.zarr_array.oindex[key.tuple]
        else:
            stored = self.zarr_array[key.tuple]
        return cf.decode(stored, self.steps)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read in a thread of its own; a device result is complete when this returns."""
        if self.device == "cpu":
            return await asyncio.to_thread(self.__getitem__, key)
        import cupy

        device = cupy.cuda.Device()

        def read() -> Any:
            with device:
                result = self[key]
                cupy.cuda.get_current_stream().synchronize()
            return result

        return await asyncio.to_thread(read)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (self.zarr_array.__dask_tokenize__(), str(self.dtype), repr(self.steps))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.zarr_array!r}, dtype={self.dtype}, steps={self.steps})"


class DeviceVariable(xr.Variable):
    """A lazy variable whose values go to the device; xarray does not keep what it reads of it.

    `xarray.open_dataset` wraps the data of every variable in a cache (``cache=True``), which would hold device memory
    for as long as the dataset lives. It does so by setting `data`, which here leaves the cache out.
    """

    __slots__ = ()

    @property
    def data(self) -> Any:
        """The values: on the device, and read at each call while the variable is lazy."""
        return super().data

    @data.setter
    def data(self, data: Any) -> None:
        if isinstance(data, indexing.MemoryCachedArray):
            data = data.array
        if isinstance(data, indexing.CopyOnWriteArray):
            data = _CopyOnWriteDeviceArray(data.array)
        xr.Variable.data.fset(self, data)  # type: ignore[attr-defined]


class _CopyOnWriteDeviceArray(indexing.CopyOnWriteArray):
    """Assignment to a lazy variable reads it to the device first; xarray's own class would go through NumPy."""

    __slots__ = ()

    def _ensure_copied(self) -> None:
        if not self._copied:
            self.array = indexing.as_indexable(self.get_duck_array())  # type: ignore[no-untyped-call]
            self._copied = True

    def __setitem__(self, indexer: Any, value: Any) -> None:
        super().__setitem__(indexer, _on_device(value))

    def _oindex_set(self, indexer: Any, value: Any) -> None:
        super()._oindex_set(indexer, _on_device(value))

    def _vindex_set(self, indexer: Any, value: Any) -> None:
        super()._vindex_set(indexer, _on_device(value))

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Any:
        raise TypeError(
            "the variable is on the device and NumPy was asked for; copy it to the host with .as_numpy(), or open "
            "the store with device='cpu'"
        )


def _on_device(value: Any) -> Any:
    """xarray makes assigned values NumPy arrays, which CuPy takes only where they are scalars."""
    import cupy

    return cupy.asarray(value)


class _Store(ZarrStore):
    """xarray's Zarr store with our arrays under its variables."""

    __slots__ = ("_options",)

    def open_dataset(self, device: Device, options: ReadOptions, **decoders: Any) -> xr.Dataset:
        """Decode the group of this store and put its data variables where their values should go."""
        self._options = options
        with close_on_error(self):
            dataset = _place(ZarrBackendEntrypoint().open_dataset("", store=self, **decoders), device, options)
        dataset.set_close(self.close)
        return dataset

    def open_store_variable(self, name: str) -> xr.Variable:
        from xgpuzarr.array import ZarrArray

        variable: xr.Variable = super().open_store_variable(name)  # type: ignore[no-untyped-call]
        lazy: Any = variable._data  # noqa: SLF001
        options = replace(self._options, route="auto")
        zarr_array = ZarrArray(lazy.array.get_array(), device="cpu", options=options)
        array = GpuZarrBackendArray(zarr_array, dtype=variable.dtype, target_block_bytes=options.target_block_bytes)
        variable.data = indexing.LazilyIndexedArray(array)
        return variable


def _place(dataset: xr.Dataset, device: Device, options: ReadOptions) -> xr.Dataset:
    """Put each data variable where its values should go; coordinates stay on the host."""
    from xgpuzarr.array import resolve_device

    resolved = resolve_device(device)
    host_names = _names_of_coordinates(dataset.variables)
    data = {
        name: _placed(variable, resolved, options) if name not in host_names else variable
        for name, variable in ((name, dataset.variables[name]) for name in dataset.data_vars)
    }
    coordinates = {name: dataset.variables[name] for name in dataset.coords}
    placed = xr.Dataset(data, coords=xr.Coordinates(coordinates, indexes={}), attrs=dataset.attrs)
    placed.encoding = dataset.encoding
    return placed


def _placed(variable: xr.Variable, device: str, options: ReadOptions) -> xr.Variable:
    """Fold the CF steps of a variable into its array, if that can take them; else leave the variable as it is."""
    from xgpuzarr.array import ZarrArray

    folded = _folded(variable._data)  # noqa: SLF001
    if variable.ndim == 0 or folded is None:
        return variable
    array, steps = folded
    if cf.host_reason(array.zarr_array.dtype, steps):
        return variable
    zarr_array = ZarrArray(array.zarr_array._zarr, device=device, options=options)  # noqa: SLF001
    placed = GpuZarrBackendArray(
        zarr_array, dtype=variable.dtype, steps=steps, target_block_bytes=options.target_block_bytes
    )
    lazy = indexing.LazilyIndexedArray(placed)
    kind = DeviceVariable if zarr_array.device == "cuda" else xr.Variable
    return kind(variable.dims, lazy, variable.attrs, variable.encoding)


def _folded(data: Any) -> tuple[GpuZarrBackendArray, tuple[cf.Step, ...]] | None:
    """Find the array below xarray's lazy decoding and the steps on it, first step first; None if one is not ours."""
    steps: list[cf.Step] = []
    while not isinstance(data, indexing.LazilyIndexedArray):
        if isinstance(data, (BoolTypeArray, NativeEndiannessArray)):
            step: cf.Step | None = cf.Cast(data.dtype)
        elif isinstance(data, _ElementwiseFunctionArray):
            step = _step(data.func, data.dtype.newbyteorder("="))
        else:
            return None
        if step is None:
            return None
        steps.insert(0, step)
        data = data.array
    return (data.array, tuple(steps)) if isinstance(data.array, GpuZarrBackendArray) else None


def _step(function: Any, dtype: np.dtype[Any]) -> cf.Step | None:
    """Translate one of xarray's lazy functions; None for one that is not known."""
    if not isinstance(function, functools.partial) or function.args:
        return None
    bound = function.keywords
    if function.func is np.asarray:
        return cf.Cast(dtype)
    if function.func is _apply_mask:
        return cf.Mask(dtype, tuple(bound["encoded_fill_values"]), bound["decoded_fill_value"])
    if function.func is _scale_offset_decoding:
        return cf.Scale(dtype, bound["scale_factor"], bound["add_offset"])
    return None


def _names_of_coordinates(variables: Mapping[Hashable, xr.Variable]) -> set[str]:
    """Names that the CF attributes of any variable point to as coordinates, bounds and the like."""
    return {
        name.rstrip(":")
        for variable in variables.values()
        for where in (variable.attrs, variable.encoding)
        for attribute in COORDINATE_ATTRIBUTES
        for name in str(where.get(attribute, "")).split()
    }


def _fill_value_as_mask(asked: bool | None, mask_and_scale: bool | Mapping[str, bool]) -> bool | None:
    """xarray's Zarr engine does not pass its parameter on; without masking that only decides how attributes look."""
    return asked if mask_and_scale else None


def _relative(path: str, parent: str) -> str:
    """Path of a group relative to its parent; "." for the parent itself."""
    return path.removeprefix(parent).strip("/") or "."
