"""Handles in other processes, and what an array says of its device."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
import zarr

import xgpuzarr
from xgpuzarr import MissingDependencyError, ReadOptions, XGpuZarrError, open_array

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(240, dtype="f4").reshape(20, 12)
DATASET = xr.Dataset({"t": (("time", "x"), VALUES)}, coords={"time": np.arange(20)})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    DATASET.to_zarr(tmp_path / "s.zarr", consolidated=False, encoding={"t": {"chunks": (5, 12)}})
    return tmp_path / "s.zarr"


def append(store: Path) -> None:
    later = (DATASET + 1000).assign_coords(time=DATASET.time + 20)
    later.to_zarr(store, append_dim="time", consolidated=False)


def reopened(array: Any) -> Any:
    """The array as another process has it."""
    xgpuzarr.opened_array._of_folders.clear()
    xgpuzarr.opened_array._of_servers.clear()
    return pickle.loads(pickle.dumps(array))


def test_a_handle_in_a_fresh_process(store: Path, tmp_path: Path) -> None:
    opened = xr.open_dataset(store, engine="gpuzarr", device="cpu", chunks={}, consolidated=False)
    append(store)
    (tmp_path / "handle").write_bytes(pickle.dumps(opened))
    script = "import pickle, sys; ds = pickle.load(open(sys.argv[1], 'rb')); print(ds.t.shape, float(ds.t.max()))"
    run = [sys.executable, "-c", script, str(tmp_path / "handle")]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "(20, 12) 239.0\n"


def test_a_handle_reads_an_array_that_has_grown_as_it_was(store: Path) -> None:
    array = open_array(store, path="t", device="cpu")
    append(store)
    again = reopened(array)
    np.testing.assert_array_equal(again[...], VALUES)
    np.testing.assert_array_equal(again[-1], VALUES[-1])
    assert again.attrs == array.attrs


def test_a_handle_with_consolidated_metadata_older_than_the_array(tmp_path: Path) -> None:
    DATASET.to_zarr(tmp_path / "s.zarr", zarr_format=2, consolidated=True)
    append(tmp_path / "s.zarr")
    opened = xr.open_dataset(tmp_path / "s.zarr", engine="gpuzarr", device="cpu", chunks={})
    assert opened.t.shape == (20, 12)
    np.testing.assert_array_equal(reopened(opened).t, VALUES)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_handle_of_an_array_whose_metadata_is_in_its_group_alone(tmp_path: Path, group: str | None) -> None:
    path = tmp_path / "s.zarr"
    dataset = DATASET.assign(t=DATASET.t.where(DATASET.time >= 5))
    encoding = {"t": {"chunks": (5, 12), "write_empty_chunks": False}}
    dataset.to_zarr(path, group=group, zarr_format=2, consolidated=True, encoding=encoding)
    folder = path / (group or "") / "t"
    (folder / ".zarray").unlink()
    assert not (folder / "0.0").exists()
    opened = xr.open_dataset(path, engine="gpuzarr", device="cpu", chunks={}, group=group)
    xr.testing.assert_equal(opened.compute(), dataset)
    xr.testing.assert_equal(reopened(opened).compute(), dataset)
    shutil.rmtree(folder)
    with pytest.raises(xgpuzarr.ChunkReadError, match=r"t' of store .* is gone"):
        reopened(opened).t.compute()


def change_metadata(path: Path, zarr_format: int, fill_value: float, *, own: bool = False) -> None:
    """Give the array another fill value, in its group's consolidated metadata or in its own."""
    if own:
        file = path / ("t/zarr.json" if zarr_format == 3 else "t/.zarray")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"fill_value": fill_value}))
        return
    file = path / ("zarr.json" if zarr_format == 3 else ".zmetadata")
    document = json.loads(file.read_text())
    members = document["consolidated_metadata"]["metadata"] if zarr_format == 3 else document["metadata"]
    members["t" if zarr_format == 3 else "t/.zarray"]["fill_value"] = fill_value
    file.write_text(json.dumps(document))


@pytest.fixture(params=[2, 3])
def consolidated(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A store whose last chunk reads as the fill value."""
    encoding = {"t": {"chunks": (5, 12)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
        DATASET.to_zarr(tmp_path / "s.zarr", zarr_format=request.param, consolidated=True, encoding=encoding)
    (tmp_path / "s.zarr" / ("t/c/3/0" if request.param == 3 else "t/3.0")).unlink()
    return tmp_path / "s.zarr", request.param


@pytest.mark.parametrize("how", ["other", "broken"])
def test_a_handle_of_an_array_whose_own_metadata_differs_from_its_group_s(
    consolidated: tuple[Path, int], how: str
) -> None:
    path, zarr_format = consolidated
    change_metadata(path, zarr_format, 7.0)
    if how == "broken":
        (path / ("t/zarr.json" if zarr_format == 3 else "t/.zarray")).write_text("{")
    opened = xr.open_dataset(path, engine="gpuzarr", device="cpu", chunks={}, mask_and_scale=False)
    expected = VALUES.copy()
    expected[15:] = 7
    np.testing.assert_array_equal(opened.t, expected)
    np.testing.assert_array_equal(reopened(opened).t, expected)
    change_metadata(path, zarr_format, 8.0)
    with pytest.raises(XGpuZarrError, match=r"its metadata changed after|is not valid JSON"):
        reopened(opened).t.compute()


def test_a_handle_that_was_not_opened_by_its_group_s_metadata_is_not_read_by_it(
    consolidated: tuple[Path, int],
) -> None:
    path, zarr_format = consolidated
    array = open_array(path, path="t", device="cpu")
    change_metadata(path, zarr_format, 7.0, own=True)  # the group's is as it was
    with pytest.raises(XGpuZarrError, match="its metadata changed after this handle was made"):
        reopened(array)[0]


def test_a_handle_keeps_to_its_format(store: Path) -> None:
    (DATASET + 1000).to_zarr(store.with_name("v2.zarr"), zarr_format=2, consolidated=False)
    shutil.copytree(store.with_name("v2.zarr"), store, dirs_exist_ok=True)
    for zarr_format, expected in ((2, VALUES + 1000), (3, VALUES)):
        array = open_array(store, path="t", device="cpu", zarr_format=zarr_format)
        np.testing.assert_array_equal(array[...], expected)
        np.testing.assert_array_equal(reopened(array)[...], expected)


@pytest.mark.parametrize("change", ["shape", "codecs", "dtype"])
def test_a_handle_of_an_array_that_was_replaced_is_an_error(store: Path, change: str) -> None:
    array = open_array(store, path="t", device="cpu")
    if change == "shape":
        zarr.open_array(store, path="t").resize((10, 12))
    else:
        other = {"codecs": {"compressors": None, "dtype": "f4"}, "dtype": {"dtype": "f8"}}[change]
        zarr.create_array(store, name="t", shape=(20, 12), chunks=(5, 12), overwrite=True, **other)
    with pytest.raises(XGpuZarrError, match="its metadata changed after this handle was made; open it again"):
        reopened(array)[0]


def test_a_plan_says_where_chunks_are_decoded(store: Path) -> None:
    array = open_array(store, path="t", device="cpu")
    lines = array.plan(...).explain().splitlines()
    assert lines[-2:] == ["route: host", "  because device='cpu'"]
    assert open_array(store, path="t", device="cuda").plan(...).explain().splitlines()[-1] == "route: device"


def test_options_must_be_read_options(store: Path) -> None:
    for options in ({}, {"n_threads": 2}):
        with pytest.raises(TypeError, match=r"options must be an xgpuzarr.ReadOptions, .* got \{"):
            open_array(store, path="t", options=options)
        with pytest.raises(TypeError, match=r"options must be an xgpuzarr.ReadOptions"):
            xr.open_dataset(store, engine="gpuzarr", options=options, consolidated=False)
        with pytest.raises(TypeError, match=r"options must be an xgpuzarr.ReadOptions"):
            xgpuzarr.from_zarr(store, "t", options=options)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'cupy'"), RuntimeError("cudaErrorNoDevice")])
def test_reading_to_a_device_that_is_not_there(store: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    array = open_array(store, path="t", device="cuda")

    monkeypatch.setattr(xgpuzarr.array, "read", Mock(side_effect=error))
    monkeypatch.setattr(xgpuzarr.array, "device_problem", lambda: "")
    with pytest.raises(type(error), match=str(error)):
        array[0]
    monkeypatch.setattr(xgpuzarr.array, "device_problem", lambda: "no driver")
    with pytest.raises(MissingDependencyError, match=r"array 't' is to be read on the device, and .*device='cpu'"):
        array[0]


OPENING = {
    "array": lambda store: open_array(store, path="t", options=ReadOptions()),
    "blocks": lambda store: xgpuzarr.from_zarr(store, "t"),
    "dataset": lambda store: xr.open_dataset(store, engine="gpuzarr", consolidated=False),
}


@pytest.mark.parametrize("opened_by", OPENING)
def test_the_warning_of_a_missing_device_points_to_the_line_that_opened(
    store: Path, monkeypatch: pytest.MonkeyPatch, opened_by: str
) -> None:
    monkeypatch.setattr(xgpuzarr.array, "device_problem", lambda: f"no driver for {opened_by}")
    with pytest.warns(UserWarning, match=rf"reading into host memory: no driver for {opened_by}; .*") as record:
        OPENING[opened_by](store)
    assert [warning.filename for warning in record] == [__file__]
