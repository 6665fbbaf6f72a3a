"""A device that is not there: arrays that behave as CuPy's do where a mistake would cost a copy or give an error.

`FakeDeviceArray` keeps its values in NumPy, does what `cupy.ndarray` does through NumPy's protocols, and refuses what
`cupy.ndarray` refuses: conversion to NumPy without `get`, and arithmetic with NumPy arrays. `fake_device` makes every
read to the device give such arrays. Tests that take `device_array` run with them, and with CuPy's where -m gpu asks.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import dask.array
import numpy as np
import pytest
from xarray.namedarray import pycompat

import xgpuzarr.array
import xgpuzarr.cf
import xgpuzarr.device_variable
import xgpuzarr.float32
import xgpuzarr.transfer
from xgpuzarr.execute import read_host

WRAPPED_METHODS = (
    "all any argmax argmin astype copy cumsum max mean min prod ravel reshape round squeeze std sum take transpose var"
)

COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class FakeDeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands in for `cupy.ndarray`; as that of CuPy 14 it has no `__array_namespace__`."""

    def __init__(self, host: Any) -> None:
        self._host = np.asarray(host)

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    T = property(lambda self: FakeDeviceArray(self._host.T))
    real = property(lambda self: FakeDeviceArray(self._host.real))
    imag = property(lambda self: FakeDeviceArray(self._host.imag))

    def get(self) -> np.ndarray:
        return self._host.copy()

    def item(self) -> Any:
        return self._host.item()

    def __array__(self, *_args: Any, **_kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc in COMPARISONS:  # for which NumPy makes an array of its own scalars first
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs)
        if any(isinstance(x, np.ndarray) for x in inputs):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if any(hasattr(x, "__dask_graph__") for x in inputs):
            return NotImplemented
        return _on_host(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if np.ndarray in types and function is not np.einsum:  # cupy.einsum copies what is on the host
            return NotImplemented
        return _on_host(function, args, kwargs)

    def __getitem__(self, key: Any) -> FakeDeviceArray:
        return FakeDeviceArray(self._host[_unwrap(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self._host[_unwrap(key)] = _unwrap(value)

    def __len__(self) -> int:
        return len(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)

    def __repr__(self) -> str:
        return f"FakeDeviceArray({self._host!r})"

    def __reduce__(self) -> Any:
        return FakeDeviceArray, (self._host,)


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: _on_host(getattr(self._host, name), args, kwargs)


dask.array.register_chunk_type(FakeDeviceArray)  # as dask does with cupy.ndarray

for _name in WRAPPED_METHODS.split():
    setattr(FakeDeviceArray, _name, _method(_name))


def _maker(make: Any) -> Any:
    return lambda *args, **kwargs: FakeDeviceArray(make(*args, **kwargs))


def _unwrap(value: Any) -> Any:
    if isinstance(value, FakeDeviceArray):
        return value._host
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrap, value))
    return value


def _on_host(function: Any, args: Any, kwargs: Any) -> Any:
    result = function(*_unwrap(args), **{name: _unwrap(value) for name, value in kwargs.items()})
    return FakeDeviceArray(result) if isinstance(result, (np.ndarray, np.generic)) else result


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reads with ``device="cuda"`` give `FakeDeviceArray`, and let xarray take that for CuPy's array."""
    real_read = xgpuzarr.array.read

    def read(plan: Any, source: Any, *, on_device: bool) -> Any:
        if on_device and not plan.layout.host_result_reason:
            return FakeDeviceArray(read_host(plan, source))
        return real_read(plan, source, on_device=False)

    cupy = fake_cupy()
    known_to_xarray = SimpleNamespace(type=(FakeDeviceArray,), available=True)
    monkeypatch.setattr(xgpuzarr.array, "read", read)
    monkeypatch.setattr(xgpuzarr.device_variable, "device_problem", lambda: "")
    monkeypatch.setattr(xgpuzarr.transfer, "device_problem", lambda: "")
    for module in (xgpuzarr.cf, xgpuzarr.float32):  # no kernel takes such arrays; NumPy's functions do, by dispatch
        monkeypatch.setattr(module, "is_on_device", lambda _: False)
    monkeypatch.setitem(pycompat._cached_duck_array_modules, "cupy", known_to_xarray)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def fake_cupy() -> ModuleType:
    """Make a module that has CuPy's way to and from the device; NumPy's functions do the rest, by dispatch."""
    current = SimpleNamespace(synchronize=lambda: None)

    class Device:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    cupy = ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(np, name)
    cupy.ndarray = FakeDeviceArray
    for name in ("arange", "empty", "full", "ones", "zeros"):
        setattr(cupy, name, _maker(getattr(np, name)))
    cupy.asarray = lambda value: value if isinstance(value, FakeDeviceArray) else FakeDeviceArray(np.array(value))
    cupy.asnumpy = lambda value: value.get() if isinstance(value, FakeDeviceArray) else value
    cupy.cuda = SimpleNamespace(Device=Device, get_current_stream=lambda: current)
    return cupy


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_array(request: pytest.FixtureRequest) -> type:
    """The class of arrays that reads with ``device="cuda"`` give: a stand-in for CuPy's, or CuPy's own."""
    if request.param == "fake":
        request.getfixturevalue("fake_device")
        return FakeDeviceArray
    import cupy as real_cupy

    return real_cupy.ndarray
