"""Reads out of stores that are no folder, where only a device shows that somebody waits: streams run on their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

import xgpuzarr

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.gpu


def _spin() -> None:
    """Keep the current stream busy for some tenths of a second."""
    import cupy

    source = """
    extern "C" __global__ void spin(long long ticks) {
        long long start = clock64();
        while (clock64() - start < ticks);
    }
    """
    cupy.RawKernel(source, "spin")((1,), (1,), (500_000_000,))


def test_fill_values_are_waited_for_though_a_wave_has_no_chunks() -> None:
    """With streams that are busy for a while, so that whoever does not wait sees what was there before."""
    import cupy

    from xgpuzarr.execute_device import _streams

    zarr_array = zarr.create_array(
        MemoryStore(), shape=(64, 64), chunks=(8, 8), dtype="f4", compressors=ZstdCodec(), fill_value=7
    )
    opened = xgpuzarr.open_array(zarr_array.store, device="cuda")
    opened[:]  # compiled
    for stream in _streams(cupy.cuda.Device().id):
        with stream:
            _spin()
    assert (opened[:].get() == 7).all()


def test_index_tables_are_waited_for_on_every_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fill values on the caller's stream, which is busy, and waves on others: both use the tables."""
    from xgpuzarr.device_output import DeviceOutput

    fill = DeviceOutput.fill

    def fill_late(output: DeviceOutput, rows: NDArray[np.int64]) -> None:
        _spin()
        fill(output, rows)

    monkeypatch.setattr(DeviceOutput, "fill", fill_late)
    values = np.arange(64 * 64, dtype="i4").reshape(64, 64)
    zarr_array = zarr.create_array(
        tmp_path / "a", shape=(64, 64), chunks=(8, 8), dtype="i4", compressors=ZstdCodec(), fill_value=-1
    )
    zarr_array[8:] = values[8:]
    values[:8] = -1
    opened = xgpuzarr.open_array(tmp_path / "a", device="cuda")
    rng = np.random.default_rng(0)
    for _ in range(4):  # each finds the tables of the last in the memory of its own
        rows, columns = rng.permutation(64), rng.permutation(64)
        np.testing.assert_array_equal(opened.oindex[rows, columns].get(), values[np.ix_(rows, columns)])
