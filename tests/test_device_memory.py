"""What a dataset held on the device is free again once it is dropped."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from numcodecs import Blosc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.gpu

SHAPE = (64, 128, 256)
NBYTES = int(np.prod(SHAPE)) * 4


@pytest.fixture
def store(tmp_path: Path) -> str:
    values = np.random.default_rng(0).random(SHAPE).astype("f4")
    variables = dict.fromkeys(("plain", "blosc", "packed"), (("time", "y", "x"), values))
    encoding: dict[str, dict[str, Any]] = {
        "plain": {"chunks": (4, 128, 256), "compressors": None},
        "blosc": {"chunks": (4, 128, 256), "compressors": Blosc("lz4")},
        "packed": {"chunks": (4, 64, 64), "dtype": "i2", "scale_factor": 0.001, "_FillValue": -9},
    }
    xr.Dataset(variables).to_zarr(tmp_path / "s.zarr", zarr_format=2, encoding=encoding)
    return str(tmp_path / "s.zarr")


def load(ds: xr.Dataset) -> Any:
    return ds.load()


def prefetch(ds: xr.Dataset) -> Any:
    return ds.gpuzarr.prefetch()


def reduced(ds: xr.Dataset) -> Any:
    return [(ds[name] * 2).mean().compute() for name in ds.data_vars]


def persisted(ds: xr.Dataset) -> Any:
    return ds.chunk(time=16).persist()


@pytest.mark.parametrize("use", [load, prefetch, reduced, persisted])
def test_device_memory_returns_to_where_it_was(store: str, use: Callable[[xr.Dataset], Any]) -> None:
    import cupy

    def held() -> tuple[int, int]:
        gc.collect()
        used = pool.used_bytes()
        pool.free_all_blocks()
        return used, pool.total_bytes()

    def open_and_use() -> tuple[xr.Dataset, Any]:
        ds = xr.open_dataset(store, engine="gpuzarr", device="cuda")
        return ds, use(ds)

    pool = cupy.get_default_memory_pool()
    open_and_use()  # kernels, streams and constants stay
    before = held()
    ds, result = open_and_use()
    if use is not reduced:
        assert pool.used_bytes() >= before[0] + 3 * NBYTES
    del ds, result
    assert held() == before


def test_a_lazy_dataset_holds_nothing(store: str) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    ds = xr.open_dataset(store, engine="gpuzarr", device="cuda")
    float(ds.plain.mean())
    gc.collect()
    before = pool.used_bytes()
    for name in ds.data_vars:
        assert ds[name].data.shape == SHAPE
        float(ds[name].max())
    gc.collect()
    assert pool.used_bytes() == before
