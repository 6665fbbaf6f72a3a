"""How do stored values become the numbers that CF attributes describe, wherever they are?

xarray reads the attributes and decides what is to be done, in which dtype and order; `Cast`, `Mask` and `Scale` are
those steps, and `decode` carries them out on NumPy or CuPy arrays with the same operations, so with the same bits.
A step that could differ between the two says so in its `host_reason`, and its variable stays on the host.

Formula and attributes: CF conventions, sections 2.5.1 "Missing data" and 8.1 "Packed data".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr import float32
from xgpuzarr.device_array import is_on_device
from xgpuzarr.kernels import launch_cf
from xgpuzarr.plan.layout import DEVICE_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Cast", "Mask", "Scale", "Step", "decode", "host_reason", "in_float32"]


@dataclass(frozen=True, slots=True)
class Cast:
    """Reinterpret as unsigned, or turn 0 and 1 into booleans: a plain conversion.

    Attributes
    ----------
    dtype
        dtype of the result.
    """

    dtype: np.dtype[Any]

    def apply(self, data: Any) -> Any:
        """Convert `data`; without a copy if nothing changes."""
        return float32.convert(data, self.dtype)

    def host_reason(self, dtype: np.dtype[Any]) -> str:
        """Why values of `dtype` must take this step on the host; "" if they need not."""
        return _cast_reason(dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class Mask:
    """Convert, then replace every fill value.

    Attributes
    ----------
    dtype
        dtype of the result.
    fill_values
        Scalars to replace, compared after the conversion. A Python scalar takes the dtype of the data, a NumPy scalar
        keeps its own (NEP 50).
    replacement
        What takes their place: a NaN.
    """

    dtype: np.dtype[Any]
    fill_values: tuple[Any, ...]
    replacement: Any

    def apply(self, data: Any) -> Any:
        """Mask a converted copy of `data`."""
        data = float32.convert(data, self.dtype, copy=True)
        filled = False
        for fill_value in self.fill_values:
            filled = filled | float32.equal(data, fill_value)
        data[filled] = self.dtype.type(self.replacement)
        return data

    def host_reason(self, dtype: np.dtype[Any]) -> str:
        """Why values of `dtype` must take this step on the host; "" if they need not."""
        if any(np.asarray(value).dtype.kind not in DEVICE_KINDS for value in self.fill_values):
            return f"fill values {self.fill_values} are not all numbers"
        if self.dtype.kind not in "fc":
            return f"{self.dtype} has no NaN for masked values"
        return _cast_reason(dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class Scale:
    """Convert, multiply by a factor, then add an offset; each rounds on its own, as in NumPy.

    Attributes
    ----------
    dtype
        dtype of the result.
    factor, offset
        Scalars, or None where the attribute is absent.
    """

    dtype: np.dtype[Any]
    factor: Any
    offset: Any

    def apply(self, data: Any) -> Any:
        """Scale a converted copy of `data`."""
        data = float32.convert(data, self.dtype, copy=True, order="C")
        if self.factor is not None:
            data = float32.arithmetic(np.multiply, data, self.dtype.type(self.factor), out=data)
        if self.offset is not None:
            data = float32.arithmetic(np.add, data, self.dtype.type(self.offset), out=data)
        return data

    def host_reason(self, dtype: np.dtype[Any]) -> str:
        """Why values of `dtype` must take this step on the host; "" if they need not."""
        if reason := _cast_reason(dtype, self.dtype):  # of strings, NumPy cannot even say what they and a number give
            return reason
        for value in (self.factor, self.offset):
            if value is None:
                continue
            if np.asarray(value).dtype.kind not in "iuf" or np.result_type(self.dtype, value) != self.dtype:
                return f"{value!r} does not scale values of dtype {self.dtype}"
        return "complex values are scaled on the host" if self.dtype.kind == "c" else ""


Step = Cast | Mask | Scale


def decode(data: Any, steps: tuple[Step, ...]) -> Any:
    """Apply the steps in order.

    Parameters
    ----------
    data
        NumPy or CuPy array of stored values; not changed.
    steps
        What to do, first step first.

    Returns
    -------
    array
        Of the same kind as `data`, in the same memory, ordered on the current stream; `data` itself without steps.
    """
    while steps:
        if is_on_device(data) and (one_pass := _one_pass(data.dtype, steps)) is not None:
            return launch_cf.decode_cf(data, **one_pass)
        data, steps = steps[0].apply(data), steps[1:]
    return data


def _one_pass(stored: np.dtype[Any], steps: tuple[Step, ...]) -> dict[str, Any] | None:
    """Arguments with which one kernel does all steps; None where there is no kernel for them."""
    mask = steps[0] if isinstance(steps[0], Mask) else None
    scales = steps if mask is None else steps[1:]
    dtype = steps[0].dtype
    if dtype not in (np.float32, np.float64) or stored.name not in launch_cf.STORED or len(scales) > 1:
        return None
    arguments: dict[str, Any] = {"dtype": dtype}
    for scale in scales:
        if not isinstance(scale, Scale) or scale.dtype != dtype:
            return None
        arguments["factor"] = None if scale.factor is None else dtype.type(scale.factor)
        arguments["offset"] = None if scale.offset is None else dtype.type(scale.offset)
    if mask is not None:
        common = [np.result_type(dtype, value) for value in mask.fill_values]
        if not np.isnan(mask.replacement) or any(each not in (np.float32, np.float64) for each in common):
            return None
        numbers = zip(common, mask.fill_values, strict=True)
        arguments["fill_values"] = tuple(float(each.type(value)) for each, value in numbers)
    return arguments


def host_reason(dtype: np.dtype[Any], steps: Iterable[Step]) -> str:
    """Why values of `dtype` must be decoded by xarray on the host; "" if the device gives the same bits."""
    for step in steps:
        reason = step.host_reason(dtype)
        if reason:
            return reason
        dtype = step.dtype
    return ""


def in_float32(dtype: np.dtype[Any], steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Make steps that give float64 give float32, where float32 holds every stored value exactly.

    Parameters
    ----------
    dtype
        dtype of the stored values.
    steps
        First step first.

    Returns
    -------
    tuple of Step
        The steps as they are for other stored values, of which more would equal a rounded fill value (32 bit integers,
        for one), and where a factor, an offset or a result may lie outside the range in which float32 keeps 24 bits.
    """
    if dtype.kind in "iu" and dtype.itemsize <= 2:
        largest = 2.0 ** (8 * dtype.itemsize)
    elif dtype.kind == "f" and dtype.itemsize <= 4:
        largest = float(np.finfo(dtype).max)
    else:
        return steps
    limits = np.finfo(np.float32)
    for step in steps:
        if isinstance(step, Scale):
            factor, offset = (abs(float(value)) for value in (_or(step.factor, 1), _or(step.offset, 0)))
            largest = largest * factor + offset
            if largest > limits.max or 0 < factor < limits.tiny or 0 < offset < limits.tiny:
                return steps
    return tuple(replace(step, dtype=np.dtype(np.float32)) if step.dtype == np.float64 else step for step in steps)


def _or(value: Any, default: float) -> Any:
    return default if value is None else value


def _cast_reason(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """C leaves float to integer undefined for values out of range: host and device differ there."""
    for dtype in (source, target):
        if dtype.kind not in DEVICE_KINDS:
            return f"the device has no {dtype} dtype"
    if source != target and "c" in source.kind + target.kind:
        return f"converting {source} to {target} is left to the host"
    if target.kind == "b" or source.kind in "biu" or np.can_cast(source, target, "same_kind"):
        return ""
    return f"converting {source} to {target} is not the same on every machine"
