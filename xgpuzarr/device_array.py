"""Is an array on the device? NumPy, CuPy, and dask arrays of either, in processes with and without a device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["DeviceMeta", "is_dask", "is_on_device"]


class DeviceMeta(np.ndarray):
    """The ``_meta`` of a dask array whose blocks workers make with CuPy, in a client that has no device.

    It has no elements, and what NumPy makes of it is of this class again, so that metas of results are; where CuPy can
    be used, it is unpickled as CuPy's (`xgpuzarr.transfer.device_meta`).
    """

    def __getitem__(self, key: Any) -> Any:
        return _marked(super().__getitem__(key))

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(DeviceMeta)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _marked(super().__array_function__(func, types, args, kwargs))


def _marked(result: Any) -> Any:
    """Make arrays and scalars of NumPy's metas of the device."""
    if type(result) in (list, tuple):
        return type(result)(_marked(item) for item in result)
    return np.asarray(result).view(DeviceMeta) if isinstance(result, (np.ndarray, np.generic)) else result


def is_on_device(data: Any) -> bool:
    """Whether `data` is a CuPy array, or a dask array of CuPy blocks."""
    meta = data._meta if is_dask(data) else data  # noqa: SLF001
    cupy = sys.modules.get("cupy")  # who has not imported it has none of its arrays
    return isinstance(meta, DeviceMeta) or (cupy is not None and isinstance(meta, cupy.ndarray))


def is_dask(data: Any) -> bool:
    """Whether `data` is a dask array itself: pint's, for one, pass dask's attributes on."""
    module = sys.modules.get("dask.array")  # who has not imported it has none of its arrays
    return module is not None and isinstance(data, module.Array)
