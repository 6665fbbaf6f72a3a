"""A variable on the device, in the places where xarray would bring it back to the host or fail.

* xarray caches what it reads of a lazy variable, which would hold device memory for as long as the dataset lives.
* Assignment to a lazy variable copies it with NumPy first, and CuPy refuses assigned values from the host.
* Positions that are not there are an error for NumPy; CuPy takes them modulo the length.
* Comparison (`equals`, `identical`, `xarray.merge`) takes CuPy's refusal to compare with host data for a difference.
* `ds.t * np.cos(ds.lat)` mixes it with a coordinate, which is on the host; CuPy refuses that. The host operand, mostly
  small, is copied to the device instead. The result is a `DeviceVariable` again, so whole expressions work.
* `ds.lat * ds.t` asks the index first, for `DeviceVariable` is no subclass of `IndexVariable`. xarray makes indexes
  itself, at every selection anew, so their class gets a method that does the same where the other is on the device.
* xarray asks whether a right operand has `data`, which reads lazy data, and then for the data, which reads it again.
* Broadcasting and reindexing take lazy data for NumPy's.
* `float(ds.t.mean())` asks for one number in so many words, and gets it.

What comes out of `xarray.apply_ufunc` (`where`, `np.sqrt`, `weighted`) is a plain variable, and CuPy refuses to mix it
with host data, as it does within such functions: ``.gpuzarr.beside(ds.t)`` on the other operand is the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from xarray.core import indexing
from xarray.core.variable import as_compatible_data

from xgpuzarr.backend_array import GpuZarrBackendArray
from xgpuzarr.chunk_manager import BlockVariable
from xgpuzarr.device_array import DEVICE_KINDS, is_on_device
from xgpuzarr.system import device_problem
from xgpuzarr.transfer import to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceVariable", "beside", "lazy_selection", "on_host", "stored_array"]


class DeviceVariable(BlockVariable):
    """A variable whose values are on the device, read or not."""

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

    @property
    def values(self) -> Any:
        """The values as a NumPy array, if it has one element and no dimension; else a `TypeError`."""
        return super().values if self.ndim else self.to_numpy()

    @values.setter
    def values(self, values: Any) -> None:
        self.data = values

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assign to a selection, values from the host too."""
        if not on_host(self):  # CuPy takes no NumPy arrays, and xarray makes them of scalars too
            is_variable = isinstance(value, xr.Variable)
            value = beside(value, self) if is_variable else to_device(as_compatible_data(value))
        super().__setitem__(key, value)  # type: ignore[no-untyped-call]

    def _broadcast_indexes(self, key: Any) -> Any:
        """As xarray does; and positions that are not there are an error, which CuPy would take modulo the length."""
        dims, indexer, order = super()._broadcast_indexes(key)  # type: ignore[no-untyped-call]
        for axis, (positions, length) in enumerate(zip(indexer.tuple, self.shape, strict=True)):
            if isinstance(positions, np.ndarray) and positions.size:
                for position in (positions.min(), positions.max()):
                    if not -length <= position < length:
                        raise IndexError(f"index {position} is out of bounds for axis {axis} with size {length}")
        return dims, indexer, order

    def equals(self, other: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare as `xarray.Variable.equals` does, with what is on the host too."""
        return super().equals(self._beside(getattr(other, "variable", other)), *args, **kwargs)  # type: ignore[no-untyped-call]

    def broadcast_equals(self, other: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare as `xarray.Variable.broadcast_equals` does, with what is on the host too."""
        return super().broadcast_equals(self._beside(getattr(other, "variable", other)), *args, **kwargs)  # type: ignore[no-untyped-call]

    def to_numpy(self) -> Any:
        """The values as a NumPy array; workers copy those of dask blocks to the host, wherever this is called."""
        return np.asarray(to_host(self.data))

    def set_dims(self, *args: Any, **kwargs: Any) -> Any:
        """Insert dimensions as `xarray.Variable.set_dims` does."""
        return xr.Variable.set_dims(self._read(), *args, **kwargs)  # type: ignore[no-untyped-call]

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce as `xarray.Variable.reduce` does."""
        return self._kept(super().reduce(*args, **kwargs))

    def _getitem_with_mask(self, *args: Any, **kwargs: Any) -> Any:
        return xr.Variable._getitem_with_mask(self._read(), *args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def _read(self) -> DeviceVariable:
        """The variable with its values in memory; itself if they are, or are in dask blocks."""
        return self._replace(data=self.data) if isinstance(self._data, indexing.ExplicitlyIndexed) else self

    def _binary_op(self, other: Any, f: Any, reflexive: bool = False) -> Any:
        return self._kept(xr.Variable._binary_op(self._read(), self._beside(other), f, reflexive))  # type: ignore[no-untyped-call]  # noqa: SLF001

    def _inplace_binary_op(self, other: Any, f: Any) -> Any:
        return super()._inplace_binary_op(self._beside(other), f)  # type: ignore[no-untyped-call]

    def __array_wrap__(self, obj: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return self._kept(super().__array_wrap__(obj, context, return_scalar))  # type: ignore[no-untyped-call]

    def _kept(self, result: Any) -> Any:
        """Make a result of arithmetic a variable of this class."""
        if not isinstance(result, xr.Variable):
            return result
        data: Any = result._data  # noqa: SLF001
        return type(self)(result.dims, data, result.attrs, result.encoding, fastpath=True)

    def _beside(self, other: Any) -> Any:
        """Read an operand on the device; copy one on the host there, if it has numbers and the variable is there."""
        if isinstance(other, DeviceVariable):
            return other._read()  # noqa: SLF001
        if not isinstance(other, (xr.Variable, np.ndarray)) or other.dtype.kind not in DEVICE_KINDS or on_host(self):
            return other
        return beside(other, self) if isinstance(other, xr.Variable) else to_device(other)


def beside(variable: xr.Variable, other: xr.Variable) -> xr.Variable:
    """Copy a variable to the device, to take part in one operation with another that is there.

    Where the other one is in dask blocks, the copy is made by the workers.

    Parameters
    ----------
    variable
        On the host; one on the device is returned as it is.
    other
        On the device.

    Raises
    ------
    TypeError
        CuPy has no such dtype.
    """
    if not on_host(variable):
        return variable
    data = variable.data
    if hasattr(other._data, "__dask_graph__") and not hasattr(data, "__dask_graph__"):  # noqa: SLF001
        data = variable.to_base_variable().chunk().data
    return DeviceVariable(variable.dims, to_device(data), variable.attrs)


def _reflected(name: str) -> Any:
    inherited = getattr(BlockVariable, name)

    def operator(self: DeviceVariable, other: Any) -> Any:
        return inherited(self, other)

    return operator


# Python asks the right operand first only if its class defines the operator itself.
for _name in ["radd", "rsub", "rmul", "rpow", "rtruediv", "rfloordiv", "rmod", "rand", "rxor", "ror"]:
    setattr(DeviceVariable, f"__{_name}__", _reflected(f"__{_name}__"))


def _index_binary_op(self: xr.IndexVariable, other: Any, f: Any, reflexive: bool = False) -> Any:
    """`xarray.IndexVariable._binary_op`, where the right operand may be a `DeviceVariable`."""
    if not isinstance(other, DeviceVariable):
        return xr.Variable._binary_op(self, other, f, reflexive)  # type: ignore[no-untyped-call]  # noqa: SLF001
    operand = other._beside(self)  # noqa: SLF001
    return other._kept(xr.Variable._binary_op(operand, other._read(), f, reflexive))  # type: ignore[no-untyped-call]  # noqa: SLF001


xr.IndexVariable._binary_op = _index_binary_op  # type: ignore[assignment,method-assign]  # noqa: SLF001


class _CopyOnWriteDeviceArray(indexing.CopyOnWriteArray):
    """Assignment to a lazy variable reads it to the device first; xarray's own class would go through NumPy."""

    __slots__ = ()

    def _ensure_copied(self) -> None:
        if not self._copied:
            self.array = indexing.as_indexable(self.get_duck_array())  # type: ignore[no-untyped-call]
            self._copied = True

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Any:
        problem = device_problem()
        raise TypeError(
            "the variable is on the device and NumPy was asked for; read it with .compute() first for what CuPy can "
            "do, copy it to the host with .as_numpy(), or open the store with device='cpu'"
            + (f", for this process has no usable device: {problem}" if problem else "")
        )


def stored_array(data: Any) -> GpuZarrBackendArray | None:
    """Find the stored array below the lazy data of a variable, or below its dask blocks where xarray reads those.

    None for data that is in memory or computed.
    """
    if hasattr(data, "__dask_graph__"):
        # dask keeps what blocks are cut from under their array's name; calculated and assigned blocks have other names
        original = f"original-{data.name}"
        data = getattr(data.dask.layers.get(original, {}).get(original), "array", None)
    while isinstance(data, indexing.ExplicitlyIndexed) and not isinstance(data, GpuZarrBackendArray):
        data = getattr(data, "array", None)
    return data if isinstance(data, GpuZarrBackendArray) else None


def lazy_selection(data: Any) -> tuple[GpuZarrBackendArray, Callable[[GpuZarrBackendArray], Any]] | None:
    """Part lazy data into its stored array and what xarray has selected of it.

    Parameters
    ----------
    data
        Data of a variable.

    Returns
    -------
    tuple or None
        The array, and a function that makes the same selection of another. None if the data is not lazy, or if xarray
        does more to it than select.
    """
    while isinstance(data, (indexing.CopyOnWriteArray, indexing.MemoryCachedArray)):
        data = data.array
    if not isinstance(data, (indexing.LazilyIndexedArray, indexing.LazilyVectorizedIndexedArray)):
        return None
    if not isinstance(data.array, GpuZarrBackendArray):
        return None
    kind, key = type(data), data.key
    return data.array, lambda array: kind(array, key)


def on_host(variable: xr.Variable) -> bool:
    """Whether the values of a variable are on the host, or will be when they are read."""
    data = variable._data  # noqa: SLF001
    stored = stored_array(data)
    if stored is not None:
        return stored.device == "cpu"
    while isinstance(data, indexing.ExplicitlyIndexed) and hasattr(data, "array"):
        data = data.array  # lazy data that was assigned to is in memory, under xarray's wrappers
    return not is_on_device(data)
