"""How are stored numbers decoded as CF attributes say, in one pass? The launcher of ``decode_cf.cu``.

The rules of `xgpuzarr.kernels.launch` hold, but no status is needed: element i of the result comes from element i of
the values, and nothing else is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import launch, tiles_of
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    import cupy

__all__ = ["STORED", "decode_cf"]

_SOURCE = "decode_cf.cu"
_N_THREADS = 256

STORED = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
"""Stored dtypes, by NumPy's names, in the order of the source's ``Stored``."""


def decode_cf(
    values: cupy.ndarray,
    dtype: np.dtype[np.floating],
    *,
    fill_values: tuple[float, ...] = (),
    factor: np.floating | None = None,
    offset: np.floating | None = None,
) -> cupy.ndarray:
    """Convert, replace fill values by NaN, multiply, add: each rounded to nearest even on its own.

    Parameters
    ----------
    values
        On the device, of a dtype in `STORED`, any shape.
    dtype
        float32 or float64: of all computation, and of the result.
    fill_values
        Compared with the converted values, as float64.
    factor, offset
        Scalars of `dtype`, or None.

    Returns
    -------
    cupy.ndarray
        A new array in C order; work is queued on the current stream.
    """
    import cupy

    if dtype not in (np.float32, np.float64):
        msg = f"dtype is {dtype}, needs float32 or float64"
        raise ValueError(msg)
    out = cupy.empty(values.shape, dtype)
    if values.size:
        launch(
            kernel_function(_SOURCE, f"decode_cf_{dtype.name}"),
            tiles_of(out.nbytes),
            _N_THREADS,
            cupy.ascontiguousarray(values) if values.ndim else values,
            np.int32(STORED.index(values.dtype.name)),
            np.int64(values.size),
            cupy.asarray(np.array(fill_values, np.float64)) if fill_values else None,
            np.int64(len(fill_values)),
            dtype.type(np.nan),
            np.int32(factor is not None),
            dtype.type(0) if factor is None else dtype.type(factor),
            np.int32(offset is not None),
            dtype.type(0) if offset is None else dtype.type(offset),
            out,
        )
    return out
