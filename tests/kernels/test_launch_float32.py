"""Kernels of float32 against NumPy, bit for bit, over every kind of float32: subnormal, infinite, NaN and zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xgpuzarr.kernels import launch_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

EXPONENTS = np.arange(256, dtype=np.uint32) << 23
MANTISSAS = np.array([0, 1, 0x200000, 0x400001, 0x7FFFFF], np.uint32)
BITS = (EXPONENTS[:, None] | MANTISSAS).reshape(-1)
VALUES = np.concatenate([BITS, BITS | np.uint32(1 << 31)]).view(np.float32)
"""Of every exponent and either sign, five float32."""


def assert_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, where NaN has but one."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = [np.where(np.isnan(a), a.dtype.type(np.nan), a).tobytes() for a in (actual, expected)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("operation", [np.add, np.multiply, np.divide])
@pytest.mark.parametrize("operand", [0.1, -3.0, 2e-38, 1e-45, -0.0, 3e38, np.inf, np.nan])
def test_arithmetic(xp: Any, to_numpy: ToNumpy, operation: np.ufunc, operand: float) -> None:
    number = np.float32(operand)
    with np.errstate(all="ignore"):
        expected = operation(VALUES, number)
    values = xp.asarray(VALUES)
    assert_bits(to_numpy(launch_float32.arithmetic(operation, values, number)), expected)
    assert_bits(to_numpy(values), VALUES)
    own = xp.asarray(VALUES.copy())
    assert launch_float32.arithmetic(operation, own, number, own) is own
    assert_bits(to_numpy(own), expected)


def test_widening(xp: Any, to_numpy: ToNumpy) -> None:
    with np.errstate(all="ignore"):
        expected = VALUES.astype(np.float64)
    assert_bits(to_numpy(launch_float32.to_float64(xp.asarray(VALUES))), expected)


def test_narrowing_rounds_once_to_nearest_even(xp: Any, to_numpy: ToNumpy) -> None:
    wide = VALUES[np.isfinite(VALUES)].astype(np.float64)
    with np.errstate(all="ignore"):
        halves = (wide + np.nextafter(wide.astype(np.float32), np.float32(np.inf))) / 2
    values = np.concatenate(
        [wide, halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf), [1e-46, 1e300, np.nan]]
    )
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32)
    assert_bits(to_numpy(launch_float32.to_float32(xp.asarray(values))), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (3, 5), (70_000,)])
def test_shapes(xp: Any, to_numpy: ToNumpy, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_bits(to_numpy(launch_float32.to_float64(xp.asarray(values))), values.astype(np.float64))


def test_values_in_another_order(xp: Any, to_numpy: ToNumpy) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = launch_float32.arithmetic(np.add, xp.asarray(values).T, np.float32(1))
    assert_bits(to_numpy(found), values.T + np.float32(1))


def test_other_arrays_are_refused(xp: Any) -> None:
    values, operand = xp.asarray(VALUES), np.float32(1)
    with pytest.raises(ValueError, match="values are float64, need float32"):
        launch_float32.to_float64(xp.asarray(np.zeros(3)))
    with pytest.raises(ValueError, match="values are float32, need float64"):
        launch_float32.to_float32(values)
    for out in (np.zeros(VALUES.shape), np.zeros(3, np.float32), np.zeros((2560, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match=r"needs float32 \(2560,\) in C order"):
            launch_float32.arithmetic(np.add, values, operand, xp.asarray(out) if out.flags.c_contiguous else out)
