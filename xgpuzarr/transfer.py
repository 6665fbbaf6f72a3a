"""How does an array get to the device, or to the host? NumPy, CuPy, and dask arrays of either."""

from __future__ import annotations

import copyreg
from typing import Any

import numpy as np

from xgpuzarr.device_array import DeviceMeta, is_on_device
from xgpuzarr.plan.layout import DEVICE_KINDS
from xgpuzarr.system import device_problem

__all__ = ["device_meta", "to_device", "to_host"]


def to_device(data: Any) -> Any:
    """Copy host values to the current device; those of a dask array block by block, where they are computed.

    Parameters
    ----------
    data
        A NumPy or dask array of numbers; device data is returned as it is.

    Raises
    ------
    TypeError
        CuPy has no such dtype.
    """
    if is_on_device(data):
        return data
    if data.dtype.kind not in DEVICE_KINDS:
        raise TypeError(f"CuPy has no {data.dtype} dtype; leave such variables on the host")
    if _is_dask(data):
        return data.map_blocks(_block_to_device, dtype=data.dtype, meta=device_meta(data.ndim, data.dtype))
    return _block_to_device(data)


def to_host(data: Any) -> Any:
    """Copy device values to the host, waiting for them; those of a dask array block by block, when computed.

    Parameters
    ----------
    data
        A CuPy or dask array; host data is returned as it is.
    """
    if not is_on_device(data):
        return data
    if _is_dask(data):
        return data.map_blocks(_block_to_host, dtype=data.dtype, meta=np.empty((0,) * data.ndim, data.dtype))
    return _block_to_host(data)


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


# Workers import CuPy for their blocks; who makes the graph may have none.


def _block_to_device(block: Any) -> Any:
    import cupy

    return cupy.asarray(block)


def _block_to_host(block: Any) -> Any:
    import cupy

    return cupy.asnumpy(block)


def _is_dask(data: Any) -> bool:
    return hasattr(data, "__dask_graph__")


def _reduce_meta(meta: DeviceMeta) -> tuple[Any, ...]:
    return device_meta, (meta.ndim, meta.dtype)


copyreg.pickle(DeviceMeta, _reduce_meta)  # tasks that make arrays like it make them on the device
