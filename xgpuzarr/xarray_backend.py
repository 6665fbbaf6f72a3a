"""How does xarray open a store through this package? Everything but the values of variables stays xarray's own.

1. xarray's Zarr backend reads groups, attributes, dimensions and encoding; `_Store` only puts a `GpuZarrBackendArray`
   under each variable, made from the array that is already open.
2. xarray decodes CF lazily. Its own code settles dtypes, attributes and encoding, and reads what it must (the first
   time stamps) on the host.
3. `xgpuzarr.placement` moves the data variables to the device, and their decoding with them.

xarray imports this module in every process that lists its engines: zarr, dask and CUDA come in when a store is opened.
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from xarray.backends.common import BackendEntrypoint, _normalize_path, datatree_from_dict_with_io_cleanup
from xarray.backends.zarr import ZarrBackendEntrypoint, ZarrStore
from xarray.core import indexing
from xarray.core.utils import close_on_error

import xgpuzarr.accessor  # noqa: F401  # registers ds.gpuzarr
from xgpuzarr.backend_array import GpuZarrBackendArray
from xgpuzarr.options import checked_options
from xgpuzarr.placement import Placement, place
from xgpuzarr.system import block_bytes
from xgpuzarr.warning import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    import xarray as xr

    from xgpuzarr.options import Device, ReadOptions

__all__ = ["GpuZarrBackendEntrypoint"]


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
        device_variables: Iterable[Hashable] = (),
        host_variables: Iterable[Hashable] = (),
        cf_float: Literal["float32"] | None = None,
        options: ReadOptions | None = None,
    ) -> xr.Dataset:
        """Open one group lazily.

        Parameters
        ----------
        filename_or_obj
            A folder, a `.zip` file, a URL, or a zarr-python store.
        mask_and_scale, decode_times, concat_characters, decode_coords, drop_variables, use_cftime, decode_timedelta
            As for `xarray.open_dataset`.
        group, consolidated, storage_options, zarr_format, use_zarr_fill_value_as_mask, cache_members
            As for xarray's own Zarr engine.
        mode
            "r" and nothing else: others would write to the store, or empty it.
        device
            "cuda": numeric data variables give CuPy arrays on the current device. "cpu": NumPy arrays. "auto": "cuda"
            if a device is usable, else "cpu" with one warning for the process.
        device_variables
            Names of coordinates, bounds or scalars that go to the device too.
        host_variables
            Names of data variables that stay on the host.
        cf_float
            "float32": decode 8 and 16 bit integers, float16 and float32 with scale, offset or fill value in float32,
            where xarray's rule would give float64. Half the memory; the last digits differ. Variables that float32's
            range may be too small for stay float64.
        options
            How to read; never changes a result.

        Raises
        ------
        FileNotFoundError
            No store there.
        KeyError
            No such group.
        ValueError
            A parameter has no such value, or names a variable that is not there.
        UnsupportedError
            A variable in `device_variables` cannot be on the device, or ``options.route`` is "device" and a data
            variable needs the host.
        """
        store, placement, decoders = _opened(
            filename_or_obj,
            mask_and_scale=mask_and_scale,
            decode_times=decode_times,
            concat_characters=concat_characters,
            decode_coords=decode_coords,
            drop_variables=drop_variables,
            use_cftime=use_cftime,
            decode_timedelta=decode_timedelta,
            group=group,
            mode=mode,
            consolidated=consolidated,
            storage_options=storage_options,
            zarr_format=zarr_format,
            use_zarr_fill_value_as_mask=use_zarr_fill_value_as_mask,
            cache_members=cache_members,
            device=device,
            device_variables=device_variables,
            host_variables=host_variables,
            cf_float=cf_float,
            options=options,
        )
        return _placed({"/": store}, placement, **decoders)["/"]

    def open_groups_as_dict(self, filename_or_obj: Any, **kwargs: Any) -> dict[str, xr.Dataset]:
        """Open a group and all groups below it lazily, by their paths relative to it, or from "/" if it is the root.

        Parameters and errors are those of `open_dataset`.
        """
        top, placement, decoders = _opened(filename_or_obj, **kwargs)
        stores = {(path or ".") if kwargs.get("group") else f"/{path}": store for path, store in top.walk()}
        return _placed(stores, placement, **decoders)

    def open_datatree(self, filename_or_obj: Any, **kwargs: Any) -> xr.DataTree:
        """Open a group and all groups below it lazily, as a tree; parameters and errors are those of `open_dataset`."""
        return datatree_from_dict_with_io_cleanup(self.open_groups_as_dict(filename_or_obj, **kwargs))


class _Store(ZarrStore):
    """xarray's Zarr store with our arrays under its variables."""

    __slots__ = ("_dropped", "_options")

    def set_close(self, closes: bool) -> None:
        """Have `close` close zarr-python's store, or not."""
        self._close_store_on_close = closes

    def find_members(self, dropped: frozenset[Hashable], *, cache: bool) -> None:
        """List arrays and groups; those that are `dropped` may be such as cannot be opened."""
        self._dropped = dropped
        self._cache_members = cache
        if cache:
            self._members = self._fetch_members()

    def _fetch_members(self) -> dict[str, Any]:
        from xgpuzarr.members import METADATA_ERRORS, openable_members, without_endless

        try:
            members: dict[str, Any] = super()._fetch_members()
        except METADATA_ERRORS:
            members = openable_members(self.zarr_group, self._dropped)
        return without_endless(members, self._dropped)

    def walk(self, path: str = "") -> Iterator[tuple[str, _Store]]:
        """Yield the group of this store, whose path is given, and all groups below it, parents first."""
        yield path, self
        arrays = set(self.array_keys())
        for name, member in self.members.items():
            if name not in arrays:
                below = copy(self)
                below.zarr_group = member
                below.find_members(self._dropped, cache=True)
                yield from below.walk(f"{path}/{name}".strip("/"))

    def open_dataset(self, placement: Placement, **decoders: Any) -> xr.Dataset:
        """Decode the group of this store and put its data variables where their values should go."""
        self._options = replace(placement.options, route="auto")
        with close_on_error(self):
            dataset = place(ZarrBackendEntrypoint().open_dataset("", store=self, **decoders), placement)
        dataset.set_close(self.close)
        return dataset

    def open_store_variable(self, name: str) -> xr.Variable:
        from xgpuzarr.array import ZarrArray

        variable: xr.Variable = super().open_store_variable(name)  # type: ignore[no-untyped-call]
        lazy: Any = variable._data  # noqa: SLF001
        is_consolidated = self.zarr_group.metadata.consolidated_metadata is not None
        zarr_array = ZarrArray(
            lazy.array.get_array(), device="cpu", options=self._options, is_consolidated=is_consolidated
        )
        # Values come in native byte order. xarray notes the stored one of numbers, and leaves that of times as it is.
        dtype = variable.dtype.newbyteorder("=") if variable.dtype.kind in "mM" else variable.dtype
        array = GpuZarrBackendArray(zarr_array, dtype=dtype, target_block_bytes=block_bytes(self._options, "cpu"))
        variable.data = indexing.LazilyIndexedArray(array)
        return variable


def _opened(
    filename_or_obj: Any,
    *,
    mask_and_scale: bool | Mapping[str, bool] = True,
    drop_variables: str | Iterable[str] | None = None,
    group: str | None = None,
    mode: Any = "r",
    consolidated: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    zarr_format: int | None = None,
    use_zarr_fill_value_as_mask: bool | None = None,
    cache_members: bool = True,
    device: Device = "auto",
    device_variables: Iterable[Hashable] = (),
    host_variables: Iterable[Hashable] = (),
    cf_float: Literal["float32"] | None = None,
    options: ReadOptions | None = None,
    **decoders: Any,
) -> tuple[_Store, Placement, dict[str, Any]]:
    """Open the store of one group; say where its variables go, and how xarray is to decode them."""
    from xgpuzarr.members import naming_bad_arrays
    from xgpuzarr.opening import as_store

    placement = Placement(
        device=device,
        options=checked_options(options),
        device_variables=_names(device_variables),
        host_variables=_names(host_variables),
        cf_float=cf_float,
    )
    if mode != "r":
        raise ValueError(f"engine 'gpuzarr' only reads: mode must be 'r', got {mode!r}; write with Dataset.to_zarr")
    dropped = _names(drop_variables)
    zarr_store = as_store(_normalize_path(filename_or_obj))
    with naming_bad_arrays(zarr_store, group, storage_options):
        store = _open_group(
            zarr_store,
            group,
            mode=mode,
            consolidated=consolidated,
            storage_options=storage_options,
            zarr_format=zarr_format,
            use_zarr_fill_value_as_mask=_fill_value_as_mask(use_zarr_fill_value_as_mask, mask_and_scale),
        )
    if not hasattr(store.zarr_group, "members"):
        raise ValueError(f"group {group!r} is an array; name the group that it is in, or use xgpuzarr.open_array")
    store.set_close(zarr_store is not filename_or_obj)
    store.find_members(dropped, cache=cache_members)
    return store, placement, {"mask_and_scale": mask_and_scale, "drop_variables": dropped, **decoders}


def _open_group(zarr_store: Any, group: str | None, *, consolidated: bool | None, **kwargs: Any) -> _Store:
    """Open a group as `ZarrStore.open_group` does, whose warning would not point to the user's line but to this one."""
    open_group: Callable[..., _Store] = partial(_Store.open_group, zarr_store, cache_members=False, **kwargs)
    if consolidated is not None or not getattr(zarr_store, "supports_consolidated_metadata", True):
        return open_group(group=group, consolidated=consolidated)
    with suppress(ValueError):
        return open_group(group=group, consolidated=True)
    store = open_group(consolidated=False)
    warn(
        "Failed to open Zarr store with consolidated metadata, but its groups and arrays have their own, of which "
        "each takes a request. Run zarr.consolidate_metadata() on the store, or pass consolidated=False if it is to "
        "stay as it is, or consolidated=True to get an error",
        RuntimeWarning,
    )
    if names := (group or "").strip("/"):
        store.zarr_group = store.zarr_group[names]
    return store


def _placed(stores: Mapping[str, _Store], placement: Placement, **decoders: Any) -> dict[str, xr.Dataset]:
    """Open the groups of one store as datasets."""
    datasets = {path: store.open_dataset(placement, **decoders) for path, store in stores.items()}
    try:
        placement.check_names({name for dataset in datasets.values() for name in dataset.variables})
    except ValueError:
        for dataset in datasets.values():
            dataset.close()
        raise
    return datasets


def _names(names: Iterable[Hashable] | None) -> frozenset[Hashable]:
    return frozenset([names] if isinstance(names, str) else () if names is None else names)


def _fill_value_as_mask(asked: bool | None, mask_and_scale: bool | Mapping[str, bool]) -> bool | None:
    """xarray's Zarr engine does not pass its parameter on; without masking that only decides how attributes look."""
    return asked if mask_and_scale or mask_and_scale == {} else None
