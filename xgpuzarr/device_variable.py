"""A variable on the device, in the places where xarray would bring it back to the host or fail.

* xarray caches what it reads of a lazy variable, which would hold device memory for as long as the dataset lives.
* Assignment to a lazy variable copies it with NumPy first, and CuPy refuses assigned values from the host.
* Positions that are not there are an error for NumPy; CuPy takes them modulo the length.
* Comparison (`equals`, `identical`, `xarray.merge`) takes CuPy's refusal to compare with host data for a difference.
* xarray asks whether a right operand has `data`, which reads lazy data, and then for the data, which reads it again.
* Broadcasting and reindexing take lazy data for NumPy's.
* `float(ds.t.mean())` asks for one number in so many words, and gets it.

`ds.t * np.cos(ds.lat)` mixes such a variable with a coordinate, which is on the host; CuPy refuses that. The host
operand, mostly small, is copied to the device instead. Methods of `DeviceVariable` would not do: `ds.lat * ds.t` asks
the index first, and what xarray's functions make (`fillna`, `where`, `concat`, `np.sqrt`) are plain variables. xarray
makes all of those itself, so importing this module extends the two methods of `xarray.Variable` that operators call.
Operands of which none is on the device go on to xarray's own methods, untouched.

Functions of several operands (`where`, `clip`, `np.maximum`) come together in xarray's `apply_variable_ufunc`, which is
extended in the same way: for NumPy's functions and xarray's own. Those of users get what they were given, for they may
want NumPy arrays; ``.gpuzarr.beside(ds.t)`` copies for them.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from xarray.core import indexing
from xarray.core.variable import as_compatible_data

from xgpuzarr.backend_array import GpuZarrBackendArray
from xgpuzarr.chunk_manager import BlockVariable
from xgpuzarr.device_array import is_dask, is_on_device
from xgpuzarr.plan.layout import DEVICE_KINDS
from xgpuzarr.system import device_problem
from xgpuzarr.transfer import device_meta, to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

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
        return super().equals(self._comparable(other), *args, **kwargs)  # type: ignore[no-untyped-call]

    def broadcast_equals(self, other: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare as `xarray.Variable.broadcast_equals` does, with what is on the host too."""
        return super().broadcast_equals(self._comparable(other), *args, **kwargs)  # type: ignore[no-untyped-call]

    def _comparable(self, other: Any) -> Any:
        other = getattr(other, "variable", other)
        return _beside(other, self) if isinstance(other, xr.Variable) and not on_host(self) else other

    def to_numpy(self) -> Any:
        """The values as a NumPy array; workers copy those of dask blocks to the host, wherever this is called."""
        return np.asarray(to_host(self.data))

    def set_dims(self, *args: Any, **kwargs: Any) -> Any:
        """Insert dimensions as `xarray.Variable.set_dims` does."""
        return xr.Variable.set_dims(_read(self), *args, **kwargs)  # type: ignore[no-untyped-call]

    def reduce(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce as `xarray.Variable.reduce` does."""
        result = super().reduce(func, *args, **kwargs)
        data: Any = result._data  # noqa: SLF001
        if _module(func).startswith("xarray.") and is_dask(data) and not (is_on_device(data) or on_host(self)):
            # dask could not try the function beforehand (`median`), and took its blocks for NumPy's
            meta = device_meta(data.ndim, data.dtype)
            result = result._replace(data=type(data)(data.dask, data.name, data.chunks, meta=meta))
        return _kept(result)

    def _getitem_with_mask(self, *args: Any, **kwargs: Any) -> Any:
        return xr.Variable._getitem_with_mask(_read(self), *args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def __array_wrap__(self, obj: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return _kept(super().__array_wrap__(obj, context, return_scalar))  # type: ignore[no-untyped-call]


def _kept(result: Any) -> Any:
    """Make a result of arithmetic a `DeviceVariable`."""
    if not isinstance(result, xr.Variable):
        return result
    data: Any = result._data  # noqa: SLF001
    return DeviceVariable(result.dims, data, result.attrs, result.encoding, fastpath=True)


def _read(variable: xr.Variable) -> xr.Variable:
    """The variable with its values in memory; itself if they are, or are in dask blocks."""
    lazy = isinstance(variable._data, indexing.ExplicitlyIndexed)  # noqa: SLF001
    return variable._replace(data=variable.data) if lazy else variable


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
    if is_dask(other._data) and not is_dask(data):  # noqa: SLF001
        data = variable.to_base_variable().chunk().data
    return DeviceVariable(variable.dims, to_device(data), variable.attrs)


def _without_ours(function: Any) -> Any:
    """A function of xarray's without what this module has put around it, if it is imported once more."""
    return getattr(function, "__wrapped__", function)


_binary_op_of_xarray = _without_ours(xr.Variable._binary_op)  # noqa: SLF001
_inplace_binary_op_of_xarray = _without_ours(xr.Variable._inplace_binary_op)  # noqa: SLF001


@functools.wraps(_binary_op_of_xarray)
def _binary_op(self: xr.Variable, other: Any, f: Any, reflexive: bool = False) -> Any:
    """`xarray.Variable._binary_op`, where one operand may be on the device and the other on the host."""
    one, two = _beside_each_other(self, other)
    result = _binary_op_of_xarray(one, two, f, reflexive)
    return _kept(result) if isinstance(one, DeviceVariable) or isinstance(two, DeviceVariable) else result


@functools.wraps(_inplace_binary_op_of_xarray)
def _inplace_binary_op(self: xr.Variable, other: Any, f: Any) -> Any:
    """`xarray.Variable._inplace_binary_op`, where one operand may be on the device and the other on the host."""
    if not isinstance(other, (xr.Variable, np.ndarray)):
        return _inplace_binary_op_of_xarray(self, other, f)
    if not on_host(self):
        return _inplace_binary_op_of_xarray(self, _beside(other, self), f)
    if not isinstance(other, xr.Variable) or on_host(other) or not _has_numbers(self._data, self.dtype):
        return _inplace_binary_op_of_xarray(self, other, f)
    if not is_dask(self._data):  # other variables may be views of the array, which has to stay
        raise TypeError(
            "NumPy's array in a variable cannot be changed in place by values on the device: write `a = a * b` for "
            "`a *= b`, which gives a variable on the device, or copy the values to the host first, with .as_numpy()"
        )
    self.data = _inplace_binary_op_of_xarray(beside(self, other), _read(other), f).data
    return self


xr.Variable._binary_op = _binary_op  # type: ignore[method-assign]  # noqa: SLF001
xr.Variable._inplace_binary_op = _inplace_binary_op  # type: ignore[method-assign]  # noqa: SLF001


_module_of_apply_ufunc: Any = importlib.import_module("xarray.computation.apply_ufunc")
_apply_of_xarray = _without_ours(_module_of_apply_ufunc.apply_variable_ufunc)


@functools.wraps(_apply_of_xarray)
def _apply_variable_ufunc(func: Any, *args: Any, **kwargs: Any) -> Any:
    """`apply_variable_ufunc` of xarray, where operands may be on the device and on the host."""
    on_the_device = [arg for arg in args if isinstance(arg, xr.Variable) and not on_host(arg)]
    if on_the_device and _is_elementwise(func):
        is_array = [isinstance(arg, (xr.Variable, np.ndarray)) for arg in args]
        args = tuple(_beside(a, on_the_device[0]) if is_a else a for a, is_a in zip(args, is_array, strict=True))
    return _apply_of_xarray(func, *args, **kwargs)


_module_of_apply_ufunc.apply_variable_ufunc = _apply_variable_ufunc


def _is_elementwise(func: Any) -> bool:
    """Whether a function is one of NumPy's or of xarray's, which take their operands' elements as they come."""
    while isinstance(func, functools.partial):
        func = func.func
    return isinstance(func, np.ufunc) or _module(func).startswith(("xarray.core.duck_array_ops", "numpy", "cupy"))


def _module(func: Any) -> str:
    """Name of the module that a function is from; "" where it tells none."""
    return getattr(func, "__module__", None) or ""


def _beside_each_other(one: xr.Variable, other: Any) -> tuple[Any, Any]:
    """Two operands as they can meet: both as they are, unless one is on the device and the other one is an array.

    All arithmetic of all variables in the process comes through here.
    """
    if not isinstance(other, (xr.Variable, np.ndarray)):
        return one, other
    if not on_host(one):
        return one, _beside(other, one)
    if isinstance(other, xr.Variable) and not on_host(other):
        return _beside(one, other), _read(other)
    return one, other


def _beside(operand: xr.Variable | NDArray[Any], other: xr.Variable) -> Any:
    """Read an operand on the device, so that it is read once; copy one on the host beside the other, if of numbers."""
    if not isinstance(operand, xr.Variable):
        return to_device(operand) if _has_numbers(operand, operand.dtype) else operand
    if not on_host(operand):
        return _read(operand)
    return beside(operand, other) if _has_numbers(operand._data, operand.dtype) else operand  # noqa: SLF001


def _has_numbers(data: Any, dtype: Any) -> bool:
    """Whether data on the host is a NumPy array of numbers, or gives one when it is read or computed.

    Others' arrays have their own ways to mix with CuPy's, or a mask or a unit that would be lost.
    """
    meta = getattr(data, "_meta", data)
    is_numpy = isinstance(meta, (np.ndarray, indexing.ExplicitlyIndexed)) and not isinstance(meta, np.ma.MaskedArray)
    return is_numpy and isinstance(dtype, np.dtype) and dtype.kind in DEVICE_KINDS


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
    if is_dask(data):
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
