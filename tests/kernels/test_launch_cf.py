"""One-pass CF decoding against NumPy's passes, bit for bit, over every stored dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.test_launch_float32 import VALUES, assert_bits
from xgpuzarr.kernels import launch_cf

if TYPE_CHECKING:
    from collections.abc import Callable

    ToNumpy = Callable[[Any], np.ndarray[Any, Any]]

F4, F8 = np.dtype("f4"), np.dtype("f8")


def stored_values(name: str) -> np.ndarray:
    """Every half, or small numbers, the ends of the dtype's range, and what lies between floats."""
    dtype = np.dtype(name)
    if dtype == np.float16:
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            wide = VALUES.astype(np.float64)
            return np.concatenate([wide, wide * (1 + 2.0**-24), [5e-324, 1e300, -1e300]]).astype(dtype)
    limits = np.iinfo(dtype)
    ends = [limits.min, limits.min + 1, limits.max // 3, limits.max - 1, limits.max]
    odd = [(1 << bits) + low for bits in range(2, 8 * dtype.itemsize - 1) for low in (-1, 1)]
    odd += [(1 << 53) + 3, (1 << 53) + (1 << 29) + 1] if dtype.itemsize == 8 else []
    return np.array([*range(8), *ends, *odd], dtype)


@pytest.mark.parametrize("stored", launch_cf.STORED)
@pytest.mark.parametrize("dtype", [F4, F8])
@pytest.mark.parametrize("fill_values", [(), (7.0,), (0.0, -1.0), (float("nan"), 0.1)])
@pytest.mark.parametrize(
    ("factor", "offset"), [(None, None), (0.1, None), (None, -273.15), (0.1, 273.15), (2e-38, 0.0)]
)
def test_equals_numpy_step_by_step(
    xp: Any,
    to_numpy: ToNumpy,
    stored: str,
    dtype: np.dtype[Any],
    fill_values: tuple[float, ...],
    factor: float | None,
    offset: float | None,
) -> None:
    values = stored_values(stored)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
        for fill_value in fill_values:
            expected[expected.astype(F8) == fill_value] = np.nan
        if factor is not None:
            expected = expected * dtype.type(factor)
        if offset is not None:
            expected = expected + dtype.type(offset)
    found = launch_cf.decode_cf(
        xp.asarray(values),
        dtype,
        fill_values=fill_values,
        factor=None if factor is None else dtype.type(factor),
        offset=None if offset is None else dtype.type(offset),
    )
    assert_bits(to_numpy(found), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (3, 5), (70_000,)])
def test_shapes(xp: Any, to_numpy: ToNumpy, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    found = launch_cf.decode_cf(xp.asarray(values), F8, fill_values=(3.0,))
    assert_bits(to_numpy(found), np.where(values == 3, np.nan, values.astype("f8")))


def test_other_dtypes_are_refused(xp: Any) -> None:
    with pytest.raises(ValueError, match="dtype is float16, needs float32 or float64"):
        launch_cf.decode_cf(xp.asarray(np.zeros(3)), np.dtype("f2"))
