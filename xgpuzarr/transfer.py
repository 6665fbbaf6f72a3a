"""How does an array get to the device, or to the host? NumPy, CuPy, and dask arrays of either."""

from __future__ import annotations

import copyreg
from typing import Any

import numpy as np

from xgpuzarr.device_array import DeviceMeta, is_dask, is_on_device
from xgpuzarr.errors import MissingDependencyError
from xgpuzarr.plan.layout import DEVICE_KINDS
from xgpuzarr.system import device_problem

__all__ = ["device_meta", "require_cupy", "to_device", "to_host"]


def to_device(data: Any) -> Any:
    """Copy host values to the current device; those of a dask array block by block, where they are computed.

    Parameters
    ----------
    data
        A NumPy or dask array of numbers; device data is returned as it is.

    Raises
    ------
    TypeError
        CuPy has no such dtype, or the values are in another kind of array, as that of a package for units.
    MissingDependencyError
        CuPy is not installed, here or where a block is computed.
    """
    if is_on_device(data):
        return data
    if not isinstance(data, np.ndarray) and not is_dask(data):
        raise TypeError(f"only NumPy and dask arrays can be copied to the device, got {type(data).__name__}")
    if data.dtype.kind not in DEVICE_KINDS:
        raise TypeError(f"CuPy has no {data.dtype} dtype; leave such variables on the host")
    if is_dask(data):
        return data.map_blocks(_block_to_device, dtype=data.dtype, meta=device_meta(data.ndim, data.dtype))
    return _block_to_device(data)


def to_host(data: Any) -> Any:
    """Copy device values to the host, waiting for them; those of a dask array block by block, when computed.

    Parameters
    ----------
    data
        A CuPy or dask array; host data is returned as it is. dask takes the blocks of functions that it cannot try
        beforehand for NumPy's (`map_blocks`, `median`), so each block is looked at when it is computed.
    """
    if is_dask(data) and (is_on_device(data) or type(data._meta) is np.ndarray):  # noqa: SLF001
        return data.map_blocks(to_host, dtype=data.dtype, meta=np.empty((0,) * data.ndim, data.dtype))
    return data.get() if is_on_device(data) else data


def device_meta(ndim: int, dtype: np.dtype[Any]) -> Any:
    """Zero-size array of the kind that blocks on the device are, for the ``_meta`` of a dask array.

    Returns
    -------
    cupy.ndarray or DeviceMeta
        CuPy's, or its stand-in in a process without a device.
    """
    if device_problem():
        return np.empty((0,) * ndim, dtype).view(DeviceMeta)
    import cupy

    return cupy.empty((0,) * ndim, dtype)


def require_cupy() -> None:
    """Raise a `MissingDependencyError` that says what this process lacks unless it can import CuPy."""
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"nothing can be put on a device in this process: {device_problem()}") from error


# Workers import CuPy for their blocks; who makes the graph may have none.


def _block_to_device(block: Any) -> Any:
    require_cupy()
    import cupy

    return cupy.asarray(block)


def _reduce_meta(meta: DeviceMeta) -> tuple[Any, ...]:
    return device_meta, (meta.ndim, meta.dtype)


copyreg.pickle(DeviceMeta, _reduce_meta)  # tasks that make arrays like it make them on the device
