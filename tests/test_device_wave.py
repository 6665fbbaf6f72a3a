"""What starting a wave costs the host: few copies to the device, and as few launches as there are things to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
import zarr

import xgpuzarr
from tests.host_device import DeviceArray, HostDevice, host_device, host_device_session  # noqa: F401  # fixtures
from tests.kernels.host_cuda import HostKernels
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = ["check_frames", "point_frames", "judge_frames"]
BLOSC = ["read_headers", "read_streams", "check_seams", "copy_streams"]


@pytest.fixture
def wave_work(host_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:  # noqa: F811
    """What each wave does: kernels that it launches, and shapes of the NumPy arrays that it copies to the device."""
    from xgpuzarr import device_wave

    work: dict[str, list[Any]] = {"launches": [], "uploads": []}
    is_starting = False
    start, asarray, call = device_wave.Wave.start, HostDevice.asarray, HostKernels.call

    def counted_start(wave: Any) -> None:
        nonlocal is_starting
        is_starting = True
        start(wave)
        is_starting = False

    def counted_asarray(device: HostDevice, values: Any, **kwargs: Any) -> DeviceArray:
        if is_starting and not isinstance(values, DeviceArray):
            work["uploads"].append(np.shape(values))
        return asarray(device, values, **kwargs)

    def counted_call(kernels: HostKernels, name: str, *args: Any) -> None:
        if is_starting:
            work["launches"].append(name)
        call(kernels, name, *args)

    monkeypatch.setattr(device_wave.Wave, "start", counted_start)
    monkeypatch.setattr(type(host_device), "asarray", counted_asarray)
    monkeypatch.setattr(HostKernels, "call", counted_call)
    return work


@pytest.mark.parametrize(
    ("compressor", "chunks", "launches"),
    [
        (numcodecs.Zstd(1, checksum=True), (10, 40), [*FRAMES, "check_zstd_contents"]),
        (numcodecs.Zstd(1, checksum=True), (10, 8), [*FRAMES, "check_zstd_contents", "scatter_slices"]),
        (numcodecs.GZip(1), (10, 8), [*FRAMES, "crc_remainders", "compare_checksums", "scatter_slices"]),
        (
            numcodecs.Zlib(1),
            (10, 8),
            ["copy_bytes", *FRAMES, "weighted_sums", "join_sums", "compare_checksums", "scatter_slices"],
        ),
        (numcodecs.LZ4(), (10, 8), ["copy_bytes", *FRAMES, "scatter_slices"]),
        (numcodecs.Blosc("lz4", 5, 1), (10, 8), [*BLOSC, "decode_lz4", "unshuffle_chunks", "scatter_slices"]),
    ],
)
def test_columns_go_to_the_device_together(
    tmp_path: Path, wave_work: dict[str, list[Any]], compressor: Any, chunks: tuple[int, int], launches: list[str]
) -> None:
    values = np.arange(1600, dtype="i4").reshape(40, 40)
    zarr.create_array(tmp_path / "a", data=values, chunks=chunks, compressors=compressor, zarr_format=2)
    array = xgpuzarr.open_array(tmp_path / "a", device="cuda", options=ReadOptions(route="device"))
    array[:20]  # constants stay on the device from here on
    wave_work["launches"].clear(), wave_work["uploads"].clear()
    np.testing.assert_array_equal(array[...].get(), values)
    assert wave_work["launches"] == launches
    # one for the decoder, and one each where frames are aligned and where chunks are placed
    assert len(wave_work["uploads"]) == 1 + ("copy_bytes" in launches) + ("scatter_slices" in launches)


def test_chunks_of_a_wave_may_go_to_the_result_and_to_scratch(tmp_path: Path, wave_work: dict[str, list[Any]]) -> None:
    values = np.random.default_rng(0).integers(0, 9, (45, 40)).astype("i4")
    zarr.create_array(tmp_path / "a", data=values, chunks=(10, 40), compressors=numcodecs.Zstd(1), zarr_format=2)
    array = xgpuzarr.open_array(tmp_path / "a", device="cuda", options=ReadOptions(route="device"))
    for key in (np.s_[:], np.s_[5:], np.s_[15:35]):  # the last, the first, or both are wanted in part
        wave_work["launches"].clear()
        np.testing.assert_array_equal(array[key].get(), values[key])
        assert [wave_work["launches"].count(name) for name in (*FRAMES, "scatter_slices")] == [1, 2, 2, 1]
