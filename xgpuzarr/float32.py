"""How do float32 values get the same bits on the device as in NumPy? By keeping their subnormal numbers.

CuPy compiles all its kernels with -ftz=true: where they compute with float32, compare or convert it, numbers below
2**-126 become zero, and equal zero. So whatever does that to data goes through the functions here. Arrays on the host
take NumPy's own way, and so do other dtypes: float64 is never flushed, and float16 is computed in float32, where all
its values and all that one operation makes of them are normal. Copying, indexing and selecting move bits as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from xgpuzarr.device_array import is_on_device
from xgpuzarr.kernels import launch_float32

__all__ = ["arithmetic", "convert", "equal"]

type Array = Any
"""numpy.ndarray or cupy.ndarray."""

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def arithmetic(operation: np.ufunc, values: Array, operand: np.generic, out: Array | None = None) -> Array:
    """Compute ``operation(values, operand, out=out)``.

    Parameters
    ----------
    operation
        `numpy.add`, `numpy.multiply` or `numpy.divide`.
    values
        Floats, NumPy or CuPy array.
    operand
        NumPy scalar of the same dtype.
    out
        Array for the result, which may be `values`; in C order.

    Returns
    -------
    array
        `out`, or a new array; work on the device is queued on the current stream.
    """
    if is_on_device(values) and values.dtype == FLOAT32:
        return launch_float32.arithmetic(operation, values, np.float32(operand), out)
    return operation(values, operand, out=out)


def convert(values: Array, dtype: np.dtype[Any], *, copy: bool = False, order: Literal["C", "K"] = "K") -> Array:
    """Convert the values of a NumPy or CuPy array: ``values.astype(dtype, order=order, copy=copy)``.

    Complex values are left to CuPy: their precision should stay as it is.
    """
    if is_on_device(values):
        if values.dtype == FLOAT32 and dtype == FLOAT64:
            return launch_float32.to_float64(values)
        if values.dtype == FLOAT64 and dtype == FLOAT32:
            return launch_float32.to_float32(values)
        if values.dtype == FLOAT32 and dtype.kind == "b":
            return ~equal(values, np.float32(0))
    return values.astype(dtype, order=order, copy=copy)


def equal(values: Array, value: Any) -> Array:
    """Which values equal a number, compared in the dtype that NumPy takes for both.

    Parameters
    ----------
    values
        NumPy or CuPy array.
    value
        A Python scalar, which takes the dtype of the values, or a NumPy scalar, which keeps its own (NEP 50).

    Returns
    -------
    array
        bool, of the shape of `values`.
    """
    common = np.result_type(values.dtype, value)
    number = common.type(value)
    if not is_on_device(values):
        return values.astype(common, copy=False) == number
    if common.kind == "c":
        return equal(values.real, number.real) & equal(values.imag, number.imag)
    if values.dtype != FLOAT32:
        values = values.astype(common, copy=False)
    return _same_bits(values, number) if values.dtype == FLOAT32 else values == number


def _same_bits(values: Array, number: Any) -> Array:
    """Compare float32 as integers: equal numbers have equal bits, but for the sign of zero; no NaN equals anything."""
    bits = values.view(np.uint32)
    if number == 0:
        return bits << np.uint32(1) == 0
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(number)
    return (bits == single.view(np.uint32)) & np.bool_(single == number)
