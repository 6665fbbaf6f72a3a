"""A group with an array that cannot be opened: the array is named, and can be left out."""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr

from xgpuzarr import MetadataError, UnsupportedError
from xgpuzarr.members import openable_members

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Object at not a node:zarr.errors.ZarrUserWarning")

OPEN = {"engine": "gpuzarr", "device": "cpu", "consolidated": False}


@pytest.fixture(params=[2, 3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "store.zarr"
    dataset = xr.Dataset({"good": ("x", np.arange(4.0)), "bad": ("x", np.arange(4))})
    xr.DataTree.from_dict({"/": dataset[["good"]], "/a": dataset}).to_zarr(
        path, zarr_format=request.param, consolidated=False
    )
    (path / "a" / "not a node").mkdir()
    return path


def damage(store: Path, how: str) -> None:
    """Spoil the metadata of a/bad."""
    file = next(f for f in (store / "a/bad/zarr.json", store / "a/bad/.zarray") if f.exists())
    document: dict[str, Any] = json.loads(file.read_text())
    is_v3 = file.name == "zarr.json"
    if how == "codec":
        document |= {"codecs": [*document["codecs"], {"name": "noise"}]} if is_v3 else {"compressor": {"id": "noise"}}
    elif how == "dtype":
        document["data_type" if is_v3 else "dtype"] = "float7"
    elif how == "shape":
        document["shape"] = ["four"]
    file.write_text("{" if how == "json" else json.dumps(document))


BAD = [
    ("codec", UnsupportedError, "array 'a/bad': codec 'noise' has no decoder"),
    ("dtype", UnsupportedError, "array 'a/bad': zarr-python knows no such data type"),
    ("json", MetadataError, "array 'a/bad': metadata is not valid JSON"),
    ("shape", MetadataError, "array 'a/bad': invalid metadata"),
]


@pytest.mark.parametrize(("how", "error", "message"), BAD, ids=[how for how, *_ in BAD])
def test_a_bad_array_is_named_and_can_be_left_out(store: Path, how: str, error: type[Exception], message: str) -> None:
    damage(store, how)
    with pytest.raises(error, match=message) as caught:
        xr.open_dataset(store, group="a", **OPEN)
    way_out = "pass drop_variables=['bad'] and consolidated=False, or ask for another group"
    assert caught.value.__notes__[0] == f"to open the rest, {way_out}"
    with pytest.raises(error, match=message):
        xr.open_datatree(store, **OPEN)
    opened = xr.open_dataset(store, group="a", drop_variables="bad", **OPEN)
    np.testing.assert_array_equal(opened.good, np.arange(4.0))
    assert list(opened.variables) == ["good"]
    assert list(xr.open_dataset(store, **OPEN).variables) == ["good"]
    for group in (None, "a"):
        tree = xr.open_datatree(store, group=group, drop_variables=(name for name in ["bad"]), **OPEN)
        assert [list(node.variables) for node in tree.subtree] == [["good"]] * len(tree.groups)
    assert set(xr.open_groups(store, drop_variables="bad", **OPEN)) == {"/", "/a"}


def test_a_bad_array_in_consolidated_metadata_can_be_left_out_too(store: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        zarr.consolidate_metadata(store)
    damage(store, "dtype")
    file = next(f for f in (store / ".zmetadata", store / "zarr.json") if f.exists())
    file.write_text(re.sub(r'"(<i8|int64)"', '"float7"', file.read_text()))
    for kwargs in ({"consolidated": False}, {}):
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            tree = xr.open_datatree(store, drop_variables="bad", **{**OPEN, "consolidated": None, **kwargs})
        assert list(tree["a"].variables) == ["good"]
    with pytest.raises(UnsupportedError, match="array 'a/bad'") as caught:
        xr.open_datatree(store, drop_variables="bad", **{**OPEN, "consolidated": True})
    assert "consolidated=False" in caught.value.__notes__[0]


def test_an_array_longer_than_xarray_can_index_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path)
    group.create_array("good", shape=(2,), dtype="f4", dimension_names=["x"])
    group.create_array("a", shape=(2**63,), chunks=(8,), dtype="f4", dimension_names=["y"])
    with pytest.raises(UnsupportedError, match=r"array 'a' has shape \(9223372036854775808,\).*drop_variables=\['a'\]"):
        xr.open_dataset(tmp_path, **OPEN)
    assert list(xr.open_dataset(tmp_path, drop_variables="a", **OPEN)) == ["good"]


def test_members_are_what_zarr_python_lists(store: Path) -> None:
    group = zarr.open_group(store, mode="r", use_consolidated=False)
    for each in (group, group["a"]):
        assert openable_members(each, ()) == dict(each.members())


def test_errors_that_no_array_causes_stay_as_they_are(store: Path) -> None:
    with pytest.raises(ValueError, match=r"Consolidated metadata requested|\.zmetadata"):
        xr.open_dataset(store, engine="gpuzarr", device="cpu", consolidated=True)
