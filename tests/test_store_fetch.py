"""Reads out of stores that are no folder, where only a device shows that somebody waits: streams run on their own."""

from __future__ import annotations

import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

import xgpuzarr

pytestmark = pytest.mark.gpu


def test_fill_values_are_waited_for_though_a_wave_has_no_chunks() -> None:
    """With streams that are busy for a while, so that whoever does not wait sees what was there before."""
    import cupy

    from xgpuzarr.execute_device import _streams

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ticks)'
        "{ long long start = clock64(); while (clock64() - start < ticks); }",
        "spin",
    )
    zarr_array = zarr.create_array(
        MemoryStore(), shape=(64, 64), chunks=(8, 8), dtype="f4", compressors=ZstdCodec(), fill_value=7
    )
    opened = xgpuzarr.open_array(zarr_array.store, device="cuda")
    opened[:]  # compiled
    for stream in _streams(cupy.cuda.Device().id):
        with stream:
            spin((1,), (1,), (500_000_000,))
    assert (opened[:].get() == 7).all()
