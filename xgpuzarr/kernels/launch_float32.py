"""How is float32 computed and converted with its subnormal numbers? The launchers of ``float32.cu``.

CuPy's own kernels take subnormal float32 for zero. The rules of `xgpuzarr.kernels.launch` hold, but no status is
needed: element i of the result comes from element i of the values, and nothing else is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import launch, tiles_of
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    import cupy

__all__ = ["OPERATIONS", "arithmetic", "to_float32", "to_float64"]

_SOURCE = "float32.cu"
_N_THREADS = 256

OPERATIONS: dict[np.ufunc, np.int32] = {np.add: np.int32(0), np.multiply: np.int32(1), np.divide: np.int32(2)}
"""What `arithmetic` does, and how the source calls it."""


def arithmetic(
    operation: np.ufunc, values: cupy.ndarray, operand: np.float32, out: cupy.ndarray | None = None
) -> cupy.ndarray:
    """One operation on each value, rounded to nearest even.

    Parameters
    ----------
    operation
        One of `OPERATIONS`.
    values
        float32 of any shape, on the device; the first operand.
    operand
        The second one.
    out
        float32 of the same shape in C order, which may be `values`; None for a new array.

    Returns
    -------
    cupy.ndarray
        `out`.
    """
    import cupy

    values = _contiguous(values, np.float32)
    if out is None:
        out = cupy.empty(values.shape, np.float32)
    elif out.dtype != np.float32 or out.shape != values.shape or not out.flags.c_contiguous:
        msg = f"out is {out.dtype} {out.shape}, needs float32 {values.shape} in C order"
        raise ValueError(msg)
    _launch("float32_arithmetic", values, OPERATIONS[operation], np.float32(operand), out)
    return out


def to_float64(values: cupy.ndarray) -> cupy.ndarray:
    """Convert float32 on the device, exactly: a new array of the same shape in C order."""
    import cupy

    values = _contiguous(values, np.float32)
    out = cupy.empty(values.shape, np.float64)
    _launch("float32_to_float64", values, out)
    return out


def to_float32(values: cupy.ndarray) -> cupy.ndarray:
    """Convert float64 on the device, to nearest even: a new array of the same shape in C order."""
    import cupy

    values = _contiguous(values, np.float64)
    out = cupy.empty(values.shape, np.float32)
    _launch("float64_to_float32", values, out)
    return out


def _contiguous(values: cupy.ndarray, dtype: type[np.generic]) -> cupy.ndarray:
    import cupy

    if values.dtype != dtype:
        msg = f"values are {values.dtype}, need {dtype.__name__}"
        raise ValueError(msg)
    return cupy.ascontiguousarray(values) if values.ndim else values  # which would make one axis of none


def _launch(name: str, values: cupy.ndarray, *args: cupy.ndarray | np.generic) -> None:
    if values.size:
        launch(
            kernel_function(_SOURCE, name), tiles_of(values.nbytes), _N_THREADS, values, np.int64(values.size), *args
        )
