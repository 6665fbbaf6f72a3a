"""The engine against `engine="zarr"`: everything identical, with the values where they were asked for."""

from __future__ import annotations

import asyncio
import gc
import pickle
import re
import subprocess
import sys
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from zarr.storage import MemoryStore, WrapperStore, ZipStore

import xgpuzarr.xarray_backend
from tests.fake_device import FakeDeviceArray, device_array, fake_device  # noqa: F401  # fixtures
from xgpuzarr import ReadOptions, UnsupportedError
from xgpuzarr.backend_array import GpuZarrBackendArray
from xgpuzarr.xarray_backend import GpuZarrBackendEntrypoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning"),
]

ENGINE = "gpuzarr"


def example() -> xr.Dataset:
    """Every kind of variable that is treated in its own way."""
    rng = np.random.default_rng(0)
    shape = (4, 3, 5)
    dims = ("time", "lat", "lon")
    times = pd.date_range("2001-02-03", periods=4)
    bounds = np.stack([times, times + pd.Timedelta("1D")], axis=1)
    return xr.Dataset(
        {
            "plain": (dims, rng.random(shape, np.float32), {"units": "K", "grid_mapping": "crs"}),
            "packed": (dims, rng.integers(-90, 90, shape) / 10),
            "flag": (("lat",), np.array([True, False, True])),
            "wait": (("lat",), np.array([1, 2, 3], "m8[h]")),
            "when": (("lon",), pd.date_range("2010", periods=5)),
            "label": (("lon",), np.array(["a", "b", "cc", "", "é"])),
            "scalar": ((), np.float64(3.5)),
            "time_bounds": (("time", "edge"), bounds),
            "lat_bounds": (("lat", "edge"), rng.random((3, 2))),
            "crs": ((), 0, {"grid_mapping_name": "latitude_longitude"}),
        },
        coords={
            "time": ("time", times, {"bounds": "time_bounds"}),
            "lat": ("lat", [10.0, 20.0, 30.0], {"bounds": "lat_bounds"}),
            "lon": np.arange(5),
            "height": (("lat", "lon"), rng.random((3, 5))),
            "station": ("lon", list("vwxyz")),
        },
        attrs={"title": "example"},
    )


ENCODING = {
    "packed": {"dtype": "i2", "scale_factor": 0.1, "add_offset": 2.5, "_FillValue": -999},
    "plain": {"chunks": (2, 3, 2)},
}
ON_DEVICE = {"plain", "packed", "flag"}


@pytest.fixture(scope="module", params=[2, 3])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("stores") / f"v{request.param}.zarr")
    example().to_zarr(path, zarr_format=request.param, encoding=ENCODING, consolidated=True)
    return path


def open_here(store: Any, **kwargs: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine=ENGINE, **{"device": "cpu", **kwargs})


def assert_same(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Identical, dtypes and encoding too, and the bits of every value."""
    assert set(actual.variables) == set(expected.variables)  # zarr-python lists members in no order
    assert actual.encoding == expected.encoding
    xr.testing.assert_identical(actual, expected)
    for name, wanted in expected.variables.items():
        got = actual.variables[name]
        assert got.dtype == wanted.dtype, name
        assert comparable(got.encoding) == comparable(wanted.encoding), name
        if wanted.dtype.kind not in "OT":
            assert got.to_numpy().tobytes() == wanted.to_numpy().tobytes(), name


def is_device_array(data: Any) -> bool:
    return not isinstance(data, np.ndarray)


def comparable(encoding: dict[Any, Any]) -> dict[Any, Any]:
    """Values with their types, and NaN as equal to itself. The default blocks are larger."""
    return {k: (type(v), str(v)) if k != "preferred_chunks" else set(v) for k, v in encoding.items()}


def test_identical_to_engine_zarr(store: str) -> None:
    assert_same(open_here(store), xr.open_dataset(store, engine="zarr"))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"decode_cf": False},
        {"mask_and_scale": False},
        {"mask_and_scale": {"packed": False}},
        {"decode_times": False},
        {"decode_times": xr.coders.CFDatetimeCoder(time_unit="s")},
        {"decode_timedelta": False},
        {"decode_coords": False},
        {"decode_coords": "all"},
        {"drop_variables": ["packed", "lat"]},
        {"consolidated": False},
        {"create_default_indexes": False},
        {"cache": False},
    ],
    ids="-".join,
)
def test_parameters_mean_what_they_mean_to_engine_zarr(store: str, kwargs: dict[str, Any]) -> None:
    assert_same(open_here(store, **kwargs), xr.open_dataset(store, engine="zarr", **kwargs))


@pytest.mark.parametrize("kwargs", [{}, {"chunks": {}}, {"decode_cf": False}], ids=str)
@pytest.mark.parametrize(
    ("zarr_format", "encoding"),
    [
        (2, {"compressors": numcodecs.Blosc("zstd"), "chunks": (2, 5)}),
        (2, {"filters": [numcodecs.Delta("<i4")], "dtype": "<i4", "_FillValue": -1, "chunks": (3, 5)}),
        (2, {"dtype": "u1", "scale_factor": 0.5, "_FillValue": 255, "missing_value": 255, "chunks": (2, 5)}),
        (2, {"dtype": ">f4", "compressors": None}),
        (3, {"chunks": (2, 5), "shards": (4, 10)}),
        (3, {"chunks": (2, 5), "serializer": zarr.codecs.BytesCodec(endian="big")}),
        (3, {"filters": [zarr.codecs.numcodecs.Delta(dtype="<i4")], "dtype": "i4", "_FillValue": -1}),
        (3, {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -9, "chunks": (8, 3)}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_encoding_is_that_of_engine_zarr_but_for_the_blocks(
    tmp_path: Path, zarr_format: Any, encoding: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    source = xr.Dataset(
        {"t": (("time", "y"), np.arange(80.0).reshape(8, 10)), "label": ("time", list("abcdefgh"))},
        {"area": ("y", np.ones(10)), "time": pd.date_range("2001", periods=8)},
    )
    source.to_zarr(tmp_path / "s", zarr_format=zarr_format, encoding={"t": encoding}, consolidated=False)
    ours, of_zarr = (
        xr.open_dataset(tmp_path / "s", consolidated=False, **engine, **kwargs)
        for engine in ({"engine": ENGINE, "device": "cpu"}, {"engine": "zarr"})
    )
    assert_same(ours, of_zarr)
    assert ours.t.encoding["preferred_chunks"] == {"time": 8, "y": 10}
    stored = dict(zip(("time", "y"), ours.t.encoding["chunks"], strict=True))
    assert of_zarr.t.encoding["preferred_chunks"] == stored


@pytest.mark.parametrize(
    "select",
    [
        lambda ds: ds.isel(time=0),
        lambda ds: ds.isel(time=slice(None, None, -2), lon=[3, 0, 0]),
        lambda ds: ds.isel(lat=[2, 0], lon=[3, 1]),
        lambda ds: ds.isel(lat=xr.DataArray([2, 0], dims="point"), lon=xr.DataArray([3, 1], dims="point")),
        lambda ds: ds.sel(lat=20.0, time=slice("2001-02-04", None)),
        lambda ds: ds.isel(time=[]),
        lambda ds: ds.isel(time=slice(1, 3)).isel(lat=xr.DataArray([[0, 1], [1, 2]], dims=("a", "b"))),
        lambda ds: ds.transpose(),
        lambda ds: ds.where(ds.lat > 15, drop=True),
    ],
)
def test_selections(store: str, select: Any) -> None:
    xr.testing.assert_identical(select(open_here(store)), select(xr.open_dataset(store, engine="zarr")))


def test_scalars_of_fill_value_are_masked_by_zarr_format(tmp_path: Path) -> None:
    for zarr_format in (2, 3):
        path = str(tmp_path / f"{zarr_format}.zarr")
        group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
        attributes = {"_ARRAY_DIMENSIONS": ["x"]} if zarr_format == 2 else {}
        names = {"dimension_names": ["x"]} if zarr_format == 3 else {}
        group.create_array("v", data=np.arange(3, dtype="i2"), fill_value=1, attributes=attributes, **names)
        for asked in (None, True, False):
            masked = zarr_format == 2 if asked is None else asked
            for mask_and_scale in (True, {}, {"v": True}, {"another": False}):
                kwargs = {"use_zarr_fill_value_as_mask": asked, "mask_and_scale": mask_and_scale}
                opened = open_here(path, consolidated=False, **kwargs)
                np.testing.assert_array_equal(opened.v, [0, np.nan if masked else 1, 2])
                assert opened.v.dtype == (np.float32 if masked else np.int16)


def test_groups_and_trees(tmp_path: Path) -> None:
    path = str(tmp_path / "tree.zarr")
    tree = xr.DataTree.from_dict(
        {"/": example(), "/a": example().isel(time=0), "/a/b": example().isel(time=0, lat=0, drop=True)}
    )
    tree.to_zarr(path)
    for group in (None, "/", "a", "/a", "a/b"):
        expected = xr.open_datatree(path, engine="zarr", group=group)
        xr.testing.assert_identical(xr.open_datatree(path, engine=ENGINE, device="cpu", group=group), expected)
        groups = xr.open_groups(path, engine=ENGINE, device="cpu", group=group)
        wanted = xr.open_groups(path, engine="zarr", group=group)
        assert set(groups) == set(wanted)
        for name in wanted:
            assert_same(groups[name], wanted[name])
        assert_same(open_here(path, group=group), xr.open_dataset(path, engine="zarr", group=group))


@pytest.mark.parametrize("chunks", [None, {}])
@pytest.mark.parametrize("stored", [">M8[s]", ">m8[ms]", "<M8[ns]"])
def test_times_are_in_native_byte_order_as_they_say(stored: str, chunks: Any) -> None:
    store = MemoryStore()
    array = zarr.create_group(store, zarr_format=2).create_array(
        "when", shape=(3,), dtype=stored, attributes={"_ARRAY_DIMENSIONS": ["x"]}
    )
    array[:] = np.array([1, 2, 3]).astype(stored)
    opened = open_here(store, consolidated=False, chunks=chunks)
    expected = xr.open_dataset(store, engine="zarr", consolidated=False, chunks=chunks)
    assert opened.when.dtype == opened.when.to_numpy().dtype == np.dtype(stored).newbyteorder("=")
    xr.testing.assert_identical(opened, expected)


@pytest.mark.usefixtures("device_array")
def test_names_of_variables_need_not_be_in_every_group(tmp_path: Path) -> None:
    path = str(tmp_path / "tree.zarr")
    top, below = example().drop_vars("packed"), example()[["packed", "height"]]
    xr.DataTree.from_dict({"/": top[["plain"]], "/a": below}).to_zarr(path, consolidated=False)
    kwargs = {"engine": ENGINE, "device": "cuda", "consolidated": False}
    kwargs |= {"host_variables": ["plain"], "device_variables": ["height"]}
    tree = xr.open_datatree(path, **kwargs)
    assert [is_device_array(v.data) for v in (tree["plain"], tree["a/packed"], tree["a/height"])] == [False, True, True]
    assert set(xr.open_groups(path, **kwargs)) == {"/", "/a"}
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgpuzarr.xarray_backend._Store, "close", lambda store: closed.append(store.zarr_group.path))
        with pytest.raises(ValueError, match=r"no variables \['nothing'\] were opened; there are \['height', 'lat'"):
            xr.open_groups(path, **kwargs | {"host_variables": ["plain", "nothing"]})
    assert sorted(closed) == ["", "a"]


def test_closing_a_tree_closes_its_stores(tmp_path: Path) -> None:
    path = str(tmp_path / "tree.zarr")
    xr.DataTree.from_dict({"/": example(), "/a": example()}).to_zarr(path)
    closed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgpuzarr.xarray_backend._Store, "close", lambda store: closed.append(store.zarr_group.path))
        xr.open_datatree(path, engine=ENGINE, device="cpu").close()
    assert sorted(closed) == ["", "a"]


class CountingStore(WrapperStore[MemoryStore]):
    """Counts what is asked of a store."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.asked: list[str] = []

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(key)
        return await super().get(key, *args, **kwargs)

    def with_read_only(self, read_only: bool = False) -> CountingStore:  # noqa: ARG002
        return self


@pytest.mark.parametrize("consolidated", [True, False])
def test_opening_asks_the_store_for_no_more_than_engine_zarr_does(consolidated: bool) -> None:
    inner = MemoryStore()
    example().to_zarr(inner, encoding=ENCODING, consolidated=consolidated)
    asked = []
    for kwargs in ({"engine": "zarr"}, {"engine": ENGINE, "device": "cpu"}):
        counting = CountingStore(inner)
        xr.open_dataset(counting, consolidated=consolidated, **kwargs)
        asked.append(sorted(counting.asked))
    assert asked[1] == asked[0]


def test_a_selection_reads_its_chunks_only() -> None:
    inner = MemoryStore()
    example().to_zarr(inner, encoding=ENCODING)
    counting = CountingStore(inner)
    opened = open_here(counting)
    counting.asked.clear()
    opened.plain.isel(time=0, lon=slice(1, 4)).variable.load()
    opened.plain.isel(time=0)[:, 4].variable.load()
    assert sorted(counting.asked) == ["plain/c/0/0/0", "plain/c/0/0/1", "plain/c/0/0/2"]


@pytest.mark.usefixtures("device_array")
def test_values_go_where_they_belong(store: str) -> None:
    opened = open_here(store, device="cuda")
    on_device = {name for name, v in opened.variables.items() if is_device_array(v.data)}
    assert on_device == ON_DEVICE
    expected = xr.open_dataset(store, engine="zarr")
    for name, variable in opened.variables.items():
        np.testing.assert_array_equal(variable.to_numpy(), expected.variables[name])
    assert_same(opened.as_numpy(), expected)


@pytest.mark.parametrize("decode_coords", [False, "all"])
@pytest.mark.usefixtures("device_array")
def test_bounds_and_coordinates_stay_on_the_host_however_they_are_decoded(store: str, decode_coords: Any) -> None:
    opened = open_here(store, device="cuda", decode_coords=decode_coords)
    assert {n for n, v in opened.variables.items() if is_device_array(v.data)} == ON_DEVICE


@pytest.mark.usefixtures("fake_device")
def test_the_device_keeps_nothing_that_the_user_dropped(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[FakeDeviceArray]] = []
    init = FakeDeviceArray.__init__
    monkeypatch.setattr(
        FakeDeviceArray, "__init__", lambda self, host: (init(self, host), made.append(weakref.ref(self)))[0]
    )
    opened = open_here(store, device="cuda")
    for dataset in (opened, opened.isel(time=slice(2)), opened.copy(), opened[["plain"]].rename(plain="p")):
        for variable in dataset.data_vars.values():
            total = variable.sum() if variable.dtype.kind == "f" else variable.data
            repr(variable)
            del total
    gc.collect()
    assert made
    assert not any(reference() is not None for reference in made)
    kept = opened.plain.load()
    assert [array for reference in made if (array := reference()) is not None] == [kept.variable._data]


def test_host_variables_are_read_once(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, keys = GpuZarrBackendArray.__getitem__, []
    monkeypatch.setattr(GpuZarrBackendArray, "__getitem__", lambda self, key: (keys.append(key), read(self, key))[1])
    opened = open_here(store)
    keys.clear()
    np.testing.assert_array_equal(opened.plain.values, opened.plain.values)
    assert len(keys) == 1


@pytest.mark.usefixtures("device_array")
def test_arithmetic_stays_on_the_device(store: str) -> None:
    opened, expected = open_here(store, device="cuda"), xr.open_dataset(store, engine="zarr")

    def compute(ds: xr.Dataset) -> xr.DataArray:
        return ((ds.plain - ds.packed.mean("time")) * 2).where(ds.flag).isel(lon=[1, 2]).max("lat")

    result = compute(opened)
    assert is_device_array(result.data)
    xr.testing.assert_allclose(result.as_numpy(), compute(expected))


@pytest.mark.usefixtures("device_array")
def test_the_way_to_the_host_is_named(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_here(store, device="cuda")
    monkeypatch.setattr("xgpuzarr.device_variable.device_problem", lambda: "no driver")
    with pytest.raises(TypeError, match=r"on the device and NumPy was asked for; .*\.as_numpy\(\).* no driver"):
        np.asarray(opened.plain)
    assert isinstance(opened.plain.to_numpy(), np.ndarray)
    assert isinstance(opened.as_numpy().plain.data, np.ndarray)


@pytest.mark.usefixtures("device_array")
def test_assigning_to_a_lazy_variable_changes_it_alone(store: str) -> None:
    opened = open_here(store, device="cuda")
    before = opened.plain.to_numpy()
    other = opened.copy(deep=True)
    opened.plain[0, 1] = -5
    changed = opened.plain.to_numpy()
    np.testing.assert_array_equal(changed[0, 1], np.full(5, -5))
    np.testing.assert_array_equal(changed[1:], before[1:])
    np.testing.assert_array_equal(other.plain.to_numpy(), before)
    np.testing.assert_array_equal(open_here(store, device="cuda").plain.to_numpy(), before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("device_array")
def test_pickles_are_small_and_read_the_same(store: str, device: str) -> None:
    opened = open_here(store, device=device)
    pickled = pickle.dumps(opened)
    restored = pickle.loads(pickled)
    assert_same(restored.as_numpy(), opened.as_numpy())
    assert is_device_array(restored.plain.data) == (device == "cuda")
    array = open_here(store, device=device).packed.isel(time=0).variable._data
    while not isinstance(array, GpuZarrBackendArray):
        array = array.array
    assert len(pickle.dumps(array)) < 1000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("device_array")
def test_loading_asynchronously(store: str, device: str) -> None:
    opened = open_here(store, device=device).isel(lat=[2, 0], lon=xr.DataArray([1, 2], dims="point"))
    loaded = asyncio.run(opened.load_async())
    assert is_device_array(loaded.packed.data) == (device == "cuda")
    expected = xr.open_dataset(store, engine="zarr").isel(lat=[2, 0], lon=xr.DataArray([1, 2], dims="point"))
    xr.testing.assert_identical(loaded.as_numpy(), expected)


def test_printing_reads_no_values(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_here(store)
    monkeypatch.setattr(GpuZarrBackendArray, "__getitem__", None)
    assert "packed" in repr(opened)
    assert "packed" in opened._repr_html_()
    assert "..." in repr(opened.packed)


def test_nobody_else_s_stores_are_taken(store: str) -> None:
    assert not GpuZarrBackendEntrypoint().guess_can_open(store)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "no such.zarr")
    with pytest.raises(FileNotFoundError, match=r"no such\.zarr"):
        open_here(missing)
    with pytest.raises(FileNotFoundError, match=r"no such\.zarr"):
        xr.open_datatree(missing, engine=ENGINE, device="cpu")


def test_a_group_that_is_not_there(store: str) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        open_here(store, group="nowhere")


@pytest.mark.parametrize("opener", [xr.open_dataset, xr.open_datatree])
def test_an_array_is_no_group(store: str, opener: Any) -> None:
    with pytest.raises(ValueError, match="group 'packed' is an array; name the group that it is in"):
        opener(store, engine=ENGINE, device="cpu", group="packed")


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("opener", [xr.open_dataset, xr.open_datatree])
def test_stores_without_consolidated_metadata_have_the_users_line_warned(
    zarr_format: Any, opener: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "tree.zarr")
    xr.DataTree.from_dict({"/": example(), "/a/b": example()}).to_zarr(
        path, zarr_format=zarr_format, consolidated=False
    )
    for group in (None, "/a", "a/b"):
        with pytest.warns(RuntimeWarning, match="Failed to open Zarr store with consolidated metadata") as warned:
            opened = opener(path, engine=ENGINE, device="cpu", group=group)
        assert [warning.filename for warning in warned] == [__file__]
        xr.testing.assert_identical(opened, opener(path, engine="zarr", group=group, consolidated=False))
    with pytest.warns(RuntimeWarning), pytest.raises(KeyError, match="nowhere"):
        opener(path, engine=ENGINE, device="cpu", group="nowhere")
    with pytest.raises(ValueError, match=r"Consolidated metadata requested|\.zmetadata"):
        opener(path, engine=ENGINE, device="cpu", consolidated=True)


@pytest.mark.usefixtures("device_array")
def test_route_device_is_for_data_variables(store: str) -> None:
    with pytest.raises(UnsupportedError, match="route='device' was asked for"):
        open_here(store, options=ReadOptions(route="device"))


@pytest.mark.usefixtures("device_array")
def test_variables_can_be_sent_elsewhere_by_name(store: str) -> None:
    opened = open_here(store, device="cuda", device_variables=["height", "lat_bounds"], host_variables="plain")
    on_device = {name for name, v in opened.variables.items() if is_device_array(v.data)}
    assert on_device == {"packed", "flag", "height", "lat_bounds"}
    assert_same(opened.as_numpy(), xr.open_dataset(store, engine="zarr"))


@pytest.mark.usefixtures("device_array")
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"device_variables": ["lat"]}, UnsupportedError, "variable 'lat' cannot be on the device: index"),
        ({"device_variables": ["label"]}, UnsupportedError, "'label' cannot be on the device: CuPy has no str64 dtype"),
        ({"device_variables": ["when"]}, UnsupportedError, "'when' cannot be on the device: xarray decodes it"),
        ({"device_variables": ["nothing"]}, ValueError, r"no variables \['nothing'\] were opened; there are \['crs'"),
        ({"host_variables": ["nothing"]}, ValueError, r"no variables \['nothing'\] were opened; there are \['crs'"),
        ({"host_variables": ["plain"], "device_variables": ["plain"]}, ValueError, r"both name \['plain'\]"),
        ({"cf_float": "float16"}, ValueError, "cf_float must be None or 'float32', got 'float16'"),
    ],
)
def test_what_cannot_be_is_refused(store: str, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_here(store, device="cuda", **kwargs)


@pytest.mark.parametrize("mode", ["w", "w-", "a", "r+"])
@pytest.mark.parametrize("opener", [xr.open_dataset, xr.open_datatree, xr.open_groups])
def test_modes_that_write_are_refused_before_they_do(store: str, mode: str, opener: Any) -> None:
    with pytest.raises(ValueError, match=rf"only reads: mode must be 'r', got '{re.escape(mode)}'"):
        opener(store, engine=ENGINE, device="cpu", mode=mode)
    assert open_here(store, device="cpu").equals(xr.open_dataset(store, engine="zarr"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("device_array")
def test_cf_float_halves_what_float32_holds(tmp_path: Path, device: str) -> None:
    path = str(tmp_path / "packed.zarr")
    values = {"i2": np.arange(-3, 3, dtype="i2"), "i4": np.arange(-3, 3, dtype="i4"), "f8": np.arange(6.0)}
    attributes = {"scale_factor": 0.1, "add_offset": 1.5, "missing_value": -1}
    xr.Dataset(
        {name: ("x", v, attributes) for name, v in values.items()}, {"c": ("x", values["i2"], attributes)}
    ).to_zarr(path)
    opened = open_here(path, device=device, cf_float="float32").set_coords("c").as_numpy()
    assert {name: v.dtype.name for name, v in opened.variables.items()} == {
        "i2": "float32",
        "i4": "float64",
        "f8": "float64",
        "c": "float64",
    }
    scaled = values["i2"].astype("f4") * np.float32(0.1) + np.float32(1.5)
    scaled[2] = np.nan
    np.testing.assert_array_equal(opened.i2.to_numpy(), scaled)
    np.testing.assert_allclose(opened.i2, xr.open_dataset(path, engine="zarr").i2, rtol=1e-6)


def write_zip(dataset: xr.Dataset, path: str) -> None:
    dataset.to_zarr(f"{path}.folder", encoding=ENCODING, consolidated=False)
    with zipfile.ZipFile(path, "w") as archive:
        for file in Path(f"{path}.folder").rglob("*"):
            archive.write(file, file.relative_to(f"{path}.folder"))


KINDS = ["zip", "zip store", "zip url", "path", "file url", "memory url", "cache url", "mapper", "memory", "icechunk"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_store_that_zarr_python_opens(kind: str, tmp_path: Path) -> None:
    path, source = str(tmp_path / "store"), example()
    if kind.startswith("zip"):
        write_zip(source, f"{path}.zip")
        stores: dict[str, Any] = {"zip": f"{path}.zip", "zip url": f"zip::{path}.zip"}
        store = stores[kind] if kind in stores else ZipStore(f"{path}.zip", mode="r")
    elif kind == "icechunk":
        icechunk = pytest.importorskip("icechunk")
        repository = icechunk.Repository.create(icechunk.in_memory_storage())
        session = repository.writable_session("main")
        source.to_zarr(session.store, encoding=ENCODING, consolidated=False)
        session.commit("example")
        store = repository.readonly_session("main").store
    elif kind == "memory":
        store = MemoryStore()
        source.to_zarr(store, encoding=ENCODING, consolidated=False)
    else:
        fsspec = pytest.importorskip("fsspec")
        url = {"memory url": f"memory://{path}", "file url": f"file://{path}"}.get(kind, path)
        source.to_zarr(url, encoding=ENCODING, consolidated=False)
        stores = {"mapper": fsspec.get_mapper(url), "cache url": f"simplecache::{path}"}
        store = stores.get(kind, url)
    expected = xr.open_dataset(ZipStore(store, mode="r") if kind == "zip" else store, engine="zarr", consolidated=False)
    with open_here(store, consolidated=False) as opened:
        xr.testing.assert_identical(opened, expected)
        assert_same(open_here(store, consolidated=False).isel(time=[2, 0]), expected.isel(time=[2, 0]))
    expected.close()


def test_a_zip_file_is_closed_with_its_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "store.zip")
    write_zip(example(), path)
    closed = []
    monkeypatch.setattr(ZipStore, "close", lambda store: closed.append(store.path))
    open_here(path, consolidated=False).close()
    assert [str(p) for p in closed] == [path]
    given = ZipStore(path, mode="r")
    open_here(given, consolidated=False).close()
    assert len(closed) == 1


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match=r"notes\.txt is a file and not a Zarr store"):
        open_here(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.usefixtures("device_array")
def test_many_stores_as_one(tmp_path: Path, parallel: bool) -> None:
    paths = [str(tmp_path / f"{number}.zarr") for number in range(3)]
    for number, path in enumerate(paths):
        dataset = example().isel(time=[number]).drop_vars(["time_bounds", "scalar", "crs", "wait"])
        dataset.to_zarr(path, encoding={"packed": ENCODING["packed"]})
    kwargs: dict[str, Any] = {"combine": "by_coords", "data_vars": "minimal", "coords": "minimal", "compat": "override"}
    opened = xr.open_mfdataset(paths, engine=ENGINE, device="cuda", parallel=parallel, **kwargs)
    assert is_device_array(opened.packed.data._meta)
    opened = opened.gpuzarr.to_device()  # after a concatenation, xarray's variables are plain ones
    result = (opened.packed * opened.lat).mean("time").compute()
    assert is_device_array(result.data)
    expected = xr.open_mfdataset(paths, engine="zarr", **kwargs)
    xr.testing.assert_allclose(result.as_numpy(), (expected.packed * expected.lat).mean("time").compute())
    xr.testing.assert_identical(opened.compute().as_numpy(), expected.compute())


@pytest.mark.usefixtures("device_array")
@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("write", [xr.Dataset.to_zarr, xr.Dataset.to_netcdf, lambda ds, _: ds.to_dataframe()])
def test_exports_do_not_copy_to_the_host_unasked(store: str, tmp_path: Path, load: bool, write: Any) -> None:
    opened = open_here(store, device="cuda")[["plain"]].drop_encoding()
    if load:
        opened.load()
    with pytest.raises(TypeError, match="NumPy"):
        write(opened, str(tmp_path / "copy"))
    write(opened.as_numpy(), str(tmp_path / "other copy"))


def test_an_unknown_device_is_refused(store: str) -> None:
    with pytest.raises(ValueError, match="device must be 'auto', 'cuda' or 'cpu', got 'gpu'"):
        open_here(store, device="gpu")


def test_listing_engines_loads_neither_zarr_nor_cuda() -> None:
    code = (
        "import sys, xgpuzarr.xarray_backend; "
        "print([m for m in ('zarr', 'dask', 'cupy', 'kvikio', 'numcodecs', 'nvidia') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_device_memory_returns_to_where_it_was(store: str) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    opened = open_here(store, device="cuda")
    assert isinstance(opened.plain.data, cupy.ndarray)  # whatever is made once and kept
    gc.collect()
    before = pool.used_bytes()
    for variable in opened.data_vars.values():
        variable.isel(lat=[0, 2]).copy().load() if "lat" in variable.dims else variable.load()
    del opened, variable
    gc.collect()
    assert pool.used_bytes() == before


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_blocks_may_cut_the_chunks_of_strings(tmp_path: Path, zarr_format: Any) -> None:
    letters = np.array(list("abcdefghij"), object)
    written = xr.Dataset({"a": ("t", np.arange(10.0)), "s": ("t", letters)})
    encoding = {"a": {"chunks": (3,)}, "s": {"chunks": (4,)}}
    written.to_zarr(tmp_path / "s", encoding=encoding, consolidated=False, zarr_format=zarr_format)
    with pytest.warns(UserWarning, match="blocks cut stored chunks of 4"):
        opened = xr.open_dataset(tmp_path / "s", engine=ENGINE, device="cpu", chunks={"t": 3}, consolidated=False)
    assert opened.chunks == {"t": (3, 3, 3, 1)}
    xr.testing.assert_equal(opened.load(), written)


def test_names_to_drop_may_be_given_once(store: str) -> None:
    opened = xr.open_dataset(
        store, engine=ENGINE, device="cpu", consolidated=False, drop_variables=(name for name in ["packed", "flag"])
    )
    assert "packed" not in opened
    assert "flag" not in opened
    assert "plain" in opened


def test_names_may_be_an_index(store: str) -> None:
    names: Any = {"drop_variables": pd.Index(["packed", "flag"]), "host_variables": pd.Index(["plain", "scalar"])}
    opened = xr.open_dataset(store, engine=ENGINE, device="cpu", consolidated=False, **names)
    assert {"packed", "flag", "plain"} & {*opened.variables} == {"plain"}


def test_no_names_may_be_none(store: str) -> None:
    options: Any = {"device_variables": None, "host_variables": None}
    opened = xr.open_dataset(store, engine=ENGINE, device="cpu", consolidated=False, **options)
    assert "plain" in opened


def test_lazy_variables_with_an_empty_axis_are_cut_into_blocks(tmp_path: Path) -> None:
    xr.Dataset({"t": (("y", "x"), np.zeros((4, 5), "f4"))}).to_zarr(tmp_path / "e", consolidated=False)
    opened = xr.open_dataset(tmp_path / "e", engine=ENGINE, device="cpu", consolidated=False)
    assert opened.isel(x=slice(0, 0)).chunk({"y": 2}).t.chunks == ((2, 2), (0,))
