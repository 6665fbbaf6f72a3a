"""Is an array on the device, and how does it get to the other side? NumPy, CuPy, and dask arrays of either."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["DEVICE_KINDS", "is_on_device", "to_device", "to_host"]

DEVICE_KINDS = "biufc"
"""Kinds of dtype that CuPy has: bool, int, unsigned, float, complex."""


def is_on_device(data: Any) -> bool:
    """Whether `data` is a CuPy array, or a dask array of CuPy blocks."""
    cupy = sys.modules.get("cupy")  # who has not imported it has none of its arrays
    return cupy is not None and isinstance(getattr(data, "_meta", data), cupy.ndarray)


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
    import cupy

    if _is_dask(data):
        return data.map_blocks(cupy.asarray, dtype=data.dtype, meta=cupy.empty((0,) * data.ndim, data.dtype))
    return cupy.asarray(data)


def to_host(data: Any) -> Any:
    """Copy device values to the host, waiting for them; those of a dask array block by block, when computed.

    Parameters
    ----------
    data
        A CuPy or dask array; host data is returned as it is.
    """
    if not is_on_device(data):
        return data
    import cupy
    import numpy as np

    if _is_dask(data):
        return data.map_blocks(cupy.asnumpy, dtype=data.dtype, meta=np.empty((0,) * data.ndim, data.dtype))
    return cupy.asnumpy(data)


def _is_dask(data: Any) -> bool:
    return hasattr(data, "__dask_graph__")
