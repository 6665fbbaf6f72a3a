"""Which variables of an opened dataset go to the device, and how does xarray's decoding go with them?

`place` takes a dataset that xarray has opened and decoded lazily on the host. Coordinates, indexes, cell bounds, grid
mappings and scalars stay there: xarray works with their values. So do times, strings and objects, which CuPy does not
have. Of each other variable, `_folded` takes the lazy functions that xarray has stacked on the stored array, and turns
them into `xgpuzarr.cf` steps inside the array: there, selections reach the reader, and decoding runs where the data
is. A function that is not known stays where it is, with xarray and the host.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from xarray.coding.common import _ElementwiseFunctionArray
from xarray.coding.variables import BoolTypeArray, NativeEndiannessArray, _apply_mask, _scale_offset_decoding
from xarray.core import indexing

from xgpuzarr import cf
from xgpuzarr.backend_array import GpuZarrBackendArray
from xgpuzarr.chunk_manager import BlockVariable, PreferredBlocks, preferred_blocks
from xgpuzarr.device_variable import DeviceVariable, stored_array
from xgpuzarr.errors import UnsupportedError
from xgpuzarr.system import block_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from xgpuzarr.options import Device, ReadOptions

__all__ = ["Placement", "place"]

COORDINATE_ATTRIBUTES = ("coordinates", "bounds", "climatology", "grid_mapping")
"""CF attributes that name the coordinates, cell bounds and projections of other variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the variables of a dataset go.

    Attributes
    ----------
    device
        Where data variables go.
    options
        How they are read.
    device_variables
        Names that go to the device although they are coordinates, bounds or scalars.
    host_variables
        Names that stay on the host.
    cf_float
        "float32": values that CF decoding would make float64, and whose stored values float32 holds exactly (8 and 16
        bit integers, float16, float32), are decoded in float32. None: xarray's own choice.
    """

    device: Device
    options: ReadOptions
    device_variables: frozenset[Hashable] = frozenset()
    host_variables: frozenset[Hashable] = frozenset()
    cf_float: Literal["float32"] | None = None

    def __post_init__(self) -> None:
        if self.cf_float not in (None, "float32"):
            raise ValueError(f"cf_float must be None or 'float32', got {self.cf_float!r}")
        both = self.device_variables & self.host_variables
        if both:
            raise ValueError(f"device_variables and host_variables both name {sorted(map(str, both))}")

    def check_names(self, known: Iterable[Hashable]) -> None:
        """Raise a `ValueError` for a name that no variable has, of all that were opened."""
        unknown = (self.device_variables | self.host_variables).difference(known)
        if unknown:
            raise ValueError(
                f"no variables {sorted(map(str, unknown))} were opened; there are {sorted(map(str, known))}"
            )


def place(dataset: xr.Dataset, placement: Placement) -> xr.Dataset:
    """Put the variables of a decoded dataset where they belong; nothing is read.

    Raises
    ------
    UnsupportedError
        A variable that was asked for by name cannot be on the device, or ``options.route`` is "device" and one
        needs the host.
    """
    from xgpuzarr.array import resolve_device

    device = resolve_device(placement.device)
    host_names = _names_of_coordinates(dataset.variables)
    variables = {
        name: _placed(name, variable, _rule(name, variable, dataset, host_names, placement), device, placement)
        for name, variable in dataset.variables.items()
    }
    _prefer_blocks([variable for name, variable in variables.items() if variable.dims != (name,)])
    data = {name: variables[name] for name in dataset.data_vars}
    coordinates = {name: variables[name] for name in dataset.coords}
    placed = xr.Dataset(data, coords=xr.Coordinates(coordinates, indexes={}), attrs=dataset.attrs)
    placed.encoding = dataset.encoding
    return placed


def _rule(
    name: Hashable, variable: xr.Variable, dataset: xr.Dataset, host_names: set[str], placement: Placement
) -> str:
    """Why a variable stays on the host by what it is, or by what was asked; "" if it need not."""
    if name in placement.host_variables:
        return "named in host_variables"
    if variable.dims == (name,):
        return "index"
    if name in placement.device_variables:
        return ""
    if name in dataset.coords:
        return "coordinate"
    if name in host_names:
        return "bounds or grid mapping of another variable"
    return "" if variable.ndim else "scalar"


def _placed(name: Hashable, variable: xr.Variable, rule: str, device: str, placement: Placement) -> xr.Variable:
    """Fold the CF steps of a variable into its array, if that can take them; else leave the variable as it is."""
    folded = _folded(variable._data)  # noqa: SLF001
    if not rule:
        rule = "xarray decodes it" if folded is None else cf.host_reason(folded[0].zarr_array.dtype, folded[1])
    if not rule and folded is not None:
        array, steps = folded
        if placement.cf_float == "float32":
            steps = cf.in_float32(array.zarr_array.dtype, steps)
        zarr_array = array.zarr_array.on(device, placement.options)
        if device == "cuda" and zarr_array.layout is not None:
            rule = zarr_array.layout.host_result_reason
        dtype = steps[-1].dtype if steps else variable.dtype
        target_bytes = block_bytes(placement.options, device)
        placed = GpuZarrBackendArray(
            zarr_array, dtype=dtype, steps=steps, target_block_bytes=target_bytes, host_reason=rule
        )
        kind = DeviceVariable if placed.device == "cuda" else xr.Variable if placed.layout is None else BlockVariable
        variable = kind(variable.dims, indexing.LazilyIndexedArray(placed), variable.attrs, variable.encoding)
    elif device == "cuda" and (stored := stored_array(variable._data)) is not None:  # noqa: SLF001
        stored.host_reason = rule
    if rule and device == "cuda" and name in placement.device_variables:
        raise UnsupportedError(f"variable {name!r} cannot be on the device: {rule}; take it out of device_variables")
    return variable


def _prefer_blocks(variables: list[xr.Variable]) -> None:
    """Give variables default dask blocks that line up along every dimension that they share.

    Those whose blocks this package reads get large ones. Along each dimension the shortest of these is then everybody's
    length, xarray's own variables included, unless it would cut somebody's stored chunks.
    """
    units: list[tuple[xr.Variable, Mapping[Any, Any]]] = []
    ours = [variable for variable in variables if isinstance(variable, BlockVariable)]
    itemsize = max((variable.dtype.itemsize for variable in ours), default=1)
    for variable in variables:
        stored = stored_array(variable._data)  # noqa: SLF001
        if isinstance(variable, BlockVariable) and stored is not None and stored.layout is not None:
            units.append((variable, dict(zip(variable.dims, stored.layout.object_shape, strict=True))))
            variable.encoding["preferred_chunks"] = preferred_blocks(variable.dims, stored, itemsize)
        elif variable.encoding.get("preferred_chunks"):
            units.append((variable, dict(variable.encoding["preferred_chunks"])))
    for dim in {dim for variable in ours for dim in variable.dims}:
        _level(dim, [(variable, unit[dim]) for variable, unit in units if dim in unit])


def _level(dim: Hashable, units: list[tuple[xr.Variable, Any]]) -> None:
    """Make the blocks of variables equally long along a dimension, where all their stored chunks allow it."""
    lengths = [v.encoding["preferred_chunks"][dim] for v, _ in units if isinstance(v, BlockVariable)]
    if not lengths or any(not isinstance(unit, int) for _, unit in units):  # stored chunks of unequal lengths
        return
    shortest = min(lengths)
    if any(shortest % unit and shortest < variable.sizes[dim] for variable, unit in units):
        return
    for variable, _ in units:
        preferred = variable.encoding["preferred_chunks"]
        if preferred[dim] != shortest:
            objects = getattr(preferred, "objects", preferred)
            variable.encoding["preferred_chunks"] = PreferredBlocks({**preferred, dim: shortest}, objects)


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
