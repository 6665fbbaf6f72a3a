"""float32 on either side against plain NumPy; the stand-in for CuPy's arrays flushes subnormal numbers as CuPy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from tests.kernels.test_launch_float32 import VALUES, assert_bits
from xgpuzarr import float32

FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8")]


@pytest.fixture(params=["numpy", "host_device", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    if request.param == "host_device":
        return request.getfixturevalue("host_device")
    return pytest.importorskip(request.param)


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def values_of(dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return VALUES.astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("operation", [np.add, np.multiply, np.divide])
@pytest.mark.parametrize("operand", [0.1, 1e-5])
def test_arithmetic(xp: Any, dtype: np.dtype, operation: np.ufunc, operand: float) -> None:
    values, number = values_of(dtype), dtype.type(operand)
    with np.errstate(all="ignore"):
        expected = operation(values, number)
        assert_bits(on_host(float32.arithmetic(operation, xp.asarray(values), number)), expected)
        own = xp.asarray(values.copy())
        float32.arithmetic(operation, own, number, out=own)
    assert_bits(on_host(own), expected)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (source, dtype)
        for source in FLOATS
        for dtype in [np.dtype(bool), *FLOATS]
        if (source, dtype) != (np.float64, np.float16)  # which CuPy rounds twice, so the host does it
    ],
    ids=str,
)
def test_conversions(xp: Any, source: np.dtype, dtype: np.dtype) -> None:
    values = values_of(source)
    with np.errstate(all="ignore"):
        expected, found = values.astype(dtype), on_host(float32.convert(xp.asarray(values), dtype))
    if dtype.kind == "b":
        np.testing.assert_array_equal(found, expected)
    else:
        assert_bits(found, expected)


def test_a_conversion_to_the_same_dtype_copies_on_demand(xp: Any) -> None:
    values = xp.asarray(VALUES)
    assert float32.convert(values, values.dtype, copy=True) is not values
    assert_bits(on_host(float32.convert(values, values.dtype, copy=True)), VALUES)


NUMBERS = [0.0, -0.0, 1e-40, -1e-40, 1.5, 0, 7, np.nan, np.inf]
NUMBERS += [np.float32(1e-40), np.float64(np.float32(1e-40)), np.float64(1e-40), np.float64(1e300), np.int64(7)]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i4"])
@pytest.mark.parametrize("number", [*NUMBERS, 1j, 1e-40j], ids=repr)
def test_equal(xp: Any, dtype: str, number: Any) -> None:
    values = np.array([0, 1, 7, -7]).astype(dtype)
    if dtype != "i4":
        with np.errstate(all="ignore"):
            values = np.array([0.0, -0.0, 1e-40, -1e-40, 1.5, 7, np.nan, np.inf, 1e-45]).astype(dtype)
            if dtype[0] == "c":
                values = np.concatenate([values, values * 1j, values * (1 + 1j)])
    common = np.result_type(values.dtype, number)
    with np.errstate(all="ignore"):
        expected = values.astype(common) == common.type(number)
        found = on_host(float32.equal(xp.asarray(values), number))
    np.testing.assert_array_equal(found, expected)


def test_the_stand_in_flushes_as_cupy_does(xp: Any) -> None:
    """Without which the tests above would show nothing on the host."""
    tiny = xp.asarray(np.array([1e-40], np.float32))
    is_flushed = xp is not np
    assert on_host(tiny == 0).tolist() == [is_flushed]
    assert on_host(tiny * np.float32(1) == 0).tolist() == [is_flushed]
    assert on_host(tiny.astype(np.float64) == 0).tolist() == [is_flushed]
