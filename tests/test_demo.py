"""Does the demo compute, from what the engine reads, what the source file gives?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from xgpuzarr import demo, diagnostics

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def sample_data() -> ModuleType:
    return pytest.importorskip("iris_sample_data")


@pytest.mark.parametrize("run", ["A1B", "E1"])
def test_results_equal_those_of_the_source_file(
    run: str, device: str, tmp_path: Path, sample_data: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = demo.run_demo(tmp_path, device=device)[run]

    # The file holds one mean a year, 1860 to 2099, on rows of equal latitude.
    with xr.open_dataset(Path(sample_data.path, f"{run}_north_america.nc"), decode_cf=False) as source:
        temperature = source["air_temperature"].values.astype("f8")
        weights = np.cos(np.deg2rad(source["latitude"].values.astype("f8")))
    warming = temperature[-30:].mean(axis=0) - temperature[:30].mean(axis=0)
    series = np.average(temperature.mean(axis=2), axis=1, weights=weights)
    np.testing.assert_allclose(found["warming"], warming, atol=1e-3)
    np.testing.assert_allclose(found["series"], series, atol=1e-3)

    printed = capsys.readouterr().out
    assert f"{demo.STORES['E1']}/air_temperature\n    zstd | bytes[<f4]\n    device" in printed
    assert f"{demo.STORES['A1B']}/air_temperature\n    blosc" in printed
    assert (tmp_path / "warming.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, sample_data: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample_data
    monkeypatch.setattr(demo, "device_problem", lambda: "no driver")
    demo.run_demo(tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == "No GPU is used: no driver."


def test_a_read_is_counted_in_its_stage() -> None:
    stages = demo._Stages()
    with stages.timed("read"):
        diagnostics.emit(diagnostics.ReadReport(array="v", route="host", encoded_nbytes=1500, decoded_nbytes=6000))
    with stages.timed("draw"):
        pass
    header, read, draw = stages.table()
    assert header.split() == ["stage", "seconds", "read", "decoded"]
    assert read.split()[0] == "read"
    assert read.split()[2:] == ["1.5", "kB", "6", "kB"]
    assert len(draw.split()) == 2
