from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import warnings
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from xarray.core.indexing import LazilyIndexedArray
from xarray.namedarray.daskmanager import DaskManager
from xarray.namedarray.parallelcompat import ChunkManagerEntrypoint, guess_chunkmanager, list_chunkmanagers
from zarr.storage import MemoryStore

import xgpuzarr.dask_arrays
from tests.fake_device import FakeDeviceArray, fake_device  # noqa: F401  # a fixture
from xgpuzarr import ReadOptions, open_array
from xgpuzarr.chunk_manager import BlockVariable, PreferredBlocks, preferred_blocks
from xgpuzarr.xarray_backend import GpuZarrBackendArray

SHAPE = (100, 20, 30)
VALUES = np.random.default_rng(3).random(SHAPE).astype("f4")
DIMS = ("time", "y", "x")
TARGET_BYTES = 8 * 20 * 30 * 4


class Engine(xr.backends.BackendEntrypoint):
    """Opens one array of a store as a variable "t"; the part of the engine that matters here."""

    def open_dataset(self, filename_or_obj, *, drop_variables=None, device="cpu", target_bytes=TARGET_BYTES):  # noqa: ARG002
        options = ReadOptions(target_block_bytes=target_bytes)
        stored = open_array(filename_or_obj, device=device, options=options)
        array = GpuZarrBackendArray(stored, dtype=stored.dtype, target_block_bytes=target_bytes)
        encoding = {"preferred_chunks": preferred_blocks(DIMS, array, 4)}
        variable = BlockVariable(DIMS, LazilyIndexedArray(array), {"units": "K"}, encoding)
        return xr.Dataset({"t": variable}, coords={"time": np.arange(SHAPE[0])})


@pytest.fixture
def store(tmp_path):
    zarr.create_array(tmp_path / "t.zarr", data=VALUES, chunks=(4, 20, 30))
    return str(tmp_path / "t.zarr")


@pytest.fixture
def device(fake_device):  # noqa: ARG001, F811
    """Reads to the fake device."""
    return "cuda"


@pytest.fixture
def reads(monkeypatch):
    """Chunks along time that each read of a block touches."""
    reads: list[set[int]] = []
    plan_read = xgpuzarr.array.plan_read

    def recorded(layout, selection):
        plan = plan_read(layout, selection)
        reads.append({int(row[0]) for row in plan.chunk_coords})
        return plan

    monkeypatch.setattr(xgpuzarr.array, "plan_read", recorded)
    return reads


def values(array: Any) -> np.ndarray:
    """Values of a computed array that must be on the device."""
    computed = array.compute(scheduler="sync")
    data = getattr(computed, "data", computed) if not isinstance(computed, FakeDeviceArray) else computed
    assert type(data) is FakeDeviceArray
    return data.get()


STEPS_OF_8 = (8,) * 12 + (4,)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ({}, STEPS_OF_8),
        ({"time": 24}, (24, 24, 24, 24, 4)),
        ({"time": -1}, (100,)),
        ({"time": 4, "x": 30}, (4,) * 25),
        ("auto", STEPS_OF_8),
    ],
)
def test_blocks_and_meta_are_on_the_device(store, device, chunks, expected):
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks=chunks)
    assert ds.t.chunks == (expected, (20,), (30,))
    assert type(ds.t.data._meta) is FakeDeviceArray
    for block in dask.compute(*ds.t.data.to_delayed().ravel()):
        assert type(block) is FakeDeviceArray
    np.testing.assert_array_equal(values(ds.t), VALUES)


def test_cpu_blocks_are_numpy(store):
    ds = xr.open_dataset(store, engine=Engine, chunks={})
    assert ds.t.chunks == (STEPS_OF_8, (20,), (30,))
    assert type(ds.t.data._meta) is np.ndarray
    np.testing.assert_array_equal(ds.t.compute().data, VALUES)


def test_nothing_else_is_changed(store, device, tmp_path):
    before = list_chunkmanagers().copy()
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks={})
    assert list_chunkmanagers() == before
    assert type(guess_chunkmanager(None)) is DaskManager
    assert xr.get_options()["chunk_manager"] == "dask"
    xr.Dataset({"u": (DIMS, VALUES)}).to_zarr(
        tmp_path / "u.zarr", consolidated=False, encoding={"u": {"chunks": (5, 20, 30)}}
    )
    other = xr.open_dataset(tmp_path / "u.zarr", engine="zarr", chunks={}, consolidated=False)
    assert other.u.chunks[0] == (5,) * 20
    assert type(other.u.data._meta) is np.ndarray
    assert type(other.u.variable) is xr.Variable
    assert type(ds.time.variable) is xr.IndexVariable


def test_host_coordinates_are_chunked_as_ever(store):
    ds = xr.open_dataset(store, engine=Engine, chunks={}).assign_coords(lat=("y", np.arange(20)))
    assert type(ds.chunk(y=5).lat.data._meta) is np.ndarray


def test_another_chunk_manager_is_left_alone(store):
    class Other(ChunkManagerEntrypoint):
        chunks = normalize_chunks = compute = apply_gufunc = None

        def __init__(self):
            self.array_cls = str

        def from_array(self, data, chunks, **_kwargs):
            return np.full(data.shape, len(chunks))

    variable = xr.open_dataset(store, engine=Engine).t.variable
    assert variable.chunk({"time": 8}, chunked_array_type=Other()).data[0, 0, 0] == 3


LAZY_OPERATIONS = {
    "as opened": lambda ds: ds,
    "isel": lambda ds: ds.isel(time=slice(10, 30), x=3),
    "isel backwards": lambda ds: ds.isel(time=slice(None, None, -3)),
    "isel by an array": lambda ds: ds.isel(time=[3, 50, 9]),
    "isel by points": lambda ds: ds.isel(time=xr.DataArray([1, 2], dims="p"), x=xr.DataArray([3, 4], dims="p")),
    "sel": lambda ds: ds.sel(time=slice(3, 17)),
    "rename": lambda ds: ds.rename(time="step"),
    "swap_dims": lambda ds: ds.assign_coords(step=("time", np.arange(100) * 2.0)).swap_dims(time="step"),
    "transpose": lambda ds: ds.transpose("x", ...),
    "copy": lambda ds: ds.copy(),
    "assign_attrs": lambda ds: ds.t.assign_attrs(a=1).to_dataset(),
    "set_coords and back": lambda ds: ds.set_coords("t").reset_coords("t"),
    "drop the index": lambda ds: ds.drop_indexes("time"),
    "reset_index": lambda ds: ds.reset_index("time"),
    "merge": lambda ds: xr.merge([ds[["t"]], xr.Dataset({"u": ("y", np.arange(20))})]),
    "tree": lambda ds: xr.DataTree.from_dict({"/a": ds})["a"].to_dataset(),
    "pickle": lambda ds: pickle.loads(pickle.dumps(ds)),
    "head": lambda ds: ds.head(y=4),
}


@pytest.mark.parametrize("name", LAZY_OPERATIONS)
def test_lazy_variables_are_chunked_on_the_device_whatever_came_before(store, device, name):
    operation = LAZY_OPERATIONS[name]
    lazy = operation(xr.open_dataset(store, engine=Engine, device=device, cache=False))
    expected = operation(xr.Dataset({"t": (DIMS, VALUES)}, coords={"time": np.arange(100)}))
    chunked = lazy.chunk({lazy.t.dims[0]: 4})
    assert type(chunked.t.data._meta) is FakeDeviceArray
    assert chunked.t.chunks[0][0] == min(4, expected.t.shape[0])
    np.testing.assert_array_equal(values(chunked.t), expected.t.data)


def test_what_was_assigned_to_stays_assigned(store, device):
    ds = xr.open_dataset(store, engine=Engine, device=device, cache=False).load()
    ds.t[0, 0, 0] = 7
    assert values(ds.chunk(time=10).t[0, 0, 0]) == 7


def test_assigning_to_blocks_is_seen_by_later_selections(store, device):
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks={})
    ds.t[3, 0, 0] = 7
    assert values(ds.t[3, 0, 0]) == 7
    assert values(ds.t.isel(time=3)[0, 0]) == 7


def test_rechunking_stays_on_the_device(store, device, monkeypatch):
    methods = []
    rechunk = da.Array.rechunk
    monkeypatch.setattr(
        da.Array, "rechunk", lambda self, *args, **kwargs: methods.append(kwargs) or rechunk(self, *args, **kwargs)
    )
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks={}).chunk(time=-1, y=5)
    assert methods == [{"method": "tasks"}]
    assert ds.t.chunks == ((100,), (5,) * 4, (30,))
    np.testing.assert_array_equal(values(ds.t), VALUES)


CHAINS = {
    "a point": (lambda t: t.sel(time=10)[3, 4], [{2}]),
    "a stretch": (lambda t: t.isel(time=slice(9, 13)), [{2, 3}]),
    "strides": (lambda t: t.isel(time=slice(0, 60, 16)), [{0}, {4}, {8}, {12}]),
    "backwards": (lambda t: t.isel(time=slice(20, 8, -4)), [{4, 5}, {3}]),
    "a region, then a time": (lambda t: t.isel(y=slice(2, 5), x=slice(3)).isel(time=50), [{12}]),
    "a large region, then a time": (lambda t: t.isel(y=slice(2, 20)).isel(time=-1), [{24}]),
    "a span, then a time": (lambda t: t.sel(time=slice(8, 60)).isel(time=1), [{2}]),
    "four steps": (lambda t: t.isel(x=1).sel(time=slice(8, 60)).isel(y=slice(1, 4)).isel(time=slice(0, 2)), [{2}]),
    "then computed": (lambda t: (t.isel(y=0).isel(time=5) * 2).sum(), [{1}]),
    "nothing": (lambda t: t.isel(time=slice(0, 0)), [set()]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_selections_read_only_the_chunks_touched(store, device, reads, name):
    operation, chunks = CHAINS[name]
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks={})
    expected = operation(xr.DataArray(VALUES, dims=DIMS, coords={"time": np.arange(100)}))
    got = operation(ds.t)
    assert type(got.data._meta) is FakeDeviceArray
    assert got.dims == expected.dims
    np.testing.assert_allclose(values(got), expected.data, rtol=1e-6)
    assert sorted(map(sorted, reads)) == sorted(map(sorted, chunks))


def test_overlapping_selections_share_blocks(store, device, reads):
    ds = xr.open_dataset(store, engine=Engine, device=device, chunks={})
    np.testing.assert_array_equal(values(ds.t.diff("time")), np.diff(VALUES, axis=0))
    assert len(reads) == len(STEPS_OF_8)


@pytest.mark.parametrize("select", [lambda t: t[100], lambda t: t[2:][98], lambda t: t.isel(x=-31), lambda t: t[0, 20]])
def test_an_integer_out_of_range_is_named_with_axis_and_length(store, select):
    blocks = xr.open_dataset(store, engine=Engine, chunks={}).t
    with pytest.raises(IndexError) as caught:
        select(blocks)
    with pytest.raises(IndexError) as of_numpy:
        select(blocks.compute())
    assert str(caught.value) == str(of_numpy.value)
    assert "out of bounds for axis" in str(caught.value)


def test_a_selection_from_many_blocks_makes_no_tasks(store):
    ds = xr.open_dataset(store, engine=Engine, chunks={"time": 4})
    (layer,) = ds.t.isel(x=2).data.__dask_graph__().layers.values()
    assert not layer.is_materialized()


def test_cuts_warn_with_a_better_length(store, device):
    with pytest.warns(UserWarning, match=r"cut stored chunks of 4 along 'time', .* chunks=\{'time': 12\}") as record:
        xr.open_dataset(store, engine=Engine, device=device, chunks={"time": 13})
    assert [(w.filename, w.category) for w in record] == [(__file__, UserWarning)]


def test_blocks_that_cut_default_blocks_but_no_chunk_do_not_warn(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xr.open_dataset(store, engine=Engine, chunks={"time": 12})


@pytest.fixture
def open_large(tmp_path):
    """Opens an array far larger than dask's own blocks, in chunks of 1 MiB; nothing is written."""
    group = zarr.create_group(tmp_path / "large.zarr")
    group.create_array("t", shape=(4000, 512, 1024), chunks=(1, 512, 512), dtype="f4", dimension_names=DIMS)

    def open_t(target_mib, chunks=None):
        options = ReadOptions(target_block_bytes=target_mib << 20)
        kwargs = {"engine": "gpuzarr", "device": "cpu", "consolidated": False, "options": options}
        return xr.open_dataset(tmp_path / "large.zarr", chunks=chunks, **kwargs).t

    return open_t


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("axes", [c for n in range(1, 4) for c in itertools.combinations(DIMS, n)])
@pytest.mark.parametrize(("target_mib", "length"), [(16, 8), (128, 64), (1024, 512), (1 << 14, 4000)])
def test_auto_is_the_default_whatever_dask_would_choose(open_large, axes, target_mib, length):
    default = open_large(target_mib, {}).chunks
    assert (default[0][0], *default[1:]) == (length, (512,), (1024,))
    assert open_large(target_mib, "auto").chunks == default
    assert open_large(target_mib).chunk("auto").chunks == default
    assert open_large(target_mib, dict.fromkeys(axes, "auto")).chunks == default
    named = {"time": length, "y": 512, "x": 1024} | dict.fromkeys(axes, "auto")
    assert open_large(target_mib, named).chunks == default
    assert open_large(target_mib).chunk(named).chunks == default


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("target_mib", [1, 16, 1024])
def test_auto_is_near_the_size_that_dask_was_told(open_large, target_mib):
    default = open_large(target_mib, {}).chunks
    with dask.config.set({"array.chunk-size": "64 MiB"}):
        assert open_large(target_mib, {}).chunks == default
        for chunks in ("auto", {"time": "auto", "y": -1, "x": -1}):
            blocks = open_large(target_mib, chunks).data
            assert blocks.chunksize == (32, 512, 1024)


@pytest.fixture
def tiles(tmp_path):
    """A group whose variables are stored in tiles, in shards, and in chunks of unequal lengths along a dimension."""
    encoding = {
        "t": {"chunks": (4, 7, 8)},
        "sharded": {"chunks": (2, 5, 30), "shards": (8, 10, 30)},
        "packed": {"chunks": (6, 20), "dtype": "i2", "scale_factor": 0.5, "_FillValue": -9},
        "lat": {"chunks": (5, 30)},
    }
    xr.Dataset(
        {"t": (DIMS, VALUES), "sharded": (DIMS, VALUES), "packed": (DIMS[:2], np.ones(SHAPE[:2]))},
        {"lat": (DIMS[1:], np.ones(SHAPE[1:]))},
    ).to_zarr(tmp_path / "tiles.zarr", consolidated=False, encoding=encoding)
    return tmp_path / "tiles.zarr"


def lengths_and_encoded(path, **kwargs):
    """Of each variable, the lengths of its blocks, and what it would be written with."""
    ds = xr.open_dataset(path, consolidated=False, **kwargs)
    return {name: (ds[name].chunks, ds[name].encoding["chunks"]) for name in ds.variables}


@pytest.mark.filterwarnings("ignore:.* cut stored", "ignore:The specified chunks separate")
@pytest.mark.parametrize("overwrite_encoded_chunks", [False, True])
@pytest.mark.parametrize(
    "chunks",
    [{}, -1, 9, {"time": 12}, {"time": 5}, {"time": 1}, {"y": -1}, {"time": (30, 70), "x": 8}, dict.fromkeys(DIMS, 20)],
    ids=str,
)
def test_blocks_of_a_byte_are_the_stored_chunks_as_with_engine_zarr(tiles, chunks, overwrite_encoded_chunks):
    kwargs = {"chunks": chunks, "overwrite_encoded_chunks": overwrite_encoded_chunks}
    options = ReadOptions(target_block_bytes=1)
    expected = lengths_and_encoded(tiles, engine="zarr", **kwargs)
    assert lengths_and_encoded(tiles, engine="gpuzarr", device="cpu", options=options, **kwargs) == expected
    assert (expected["t"][1] == (4, 7, 8)) is (chunks == {} or not overwrite_encoded_chunks)


@pytest.mark.filterwarnings("ignore:.* cut stored", "ignore:The specified chunks separate")
@pytest.mark.parametrize("overwrite_encoded_chunks", [False, True])
@pytest.mark.parametrize("chunks", [{}, "auto", -1, {"time": 12}, {"time": 12, "y": 7, "x": 16}], ids=str)
def test_blocks_are_noted_as_chunks_where_that_is_asked(tiles, chunks, overwrite_encoded_chunks):
    kwargs = {"chunks": chunks, "overwrite_encoded_chunks": overwrite_encoded_chunks}
    of_zarr = lengths_and_encoded(tiles, engine="zarr", **kwargs)
    ours = lengths_and_encoded(tiles, engine="gpuzarr", device="cpu", **kwargs)
    for name, (lengths, encoded) in ours.items():
        if overwrite_encoded_chunks:
            assert encoded == tuple(along[0] for along in lengths)
        else:
            assert encoded == of_zarr[name][1]
    named = range(3) if chunks == -1 else [DIMS.index(dim) for dim in chunks] if isinstance(chunks, dict) else ()
    assert all(ours["t"][0][axis] == of_zarr["t"][0][axis] for axis in named)


@pytest.fixture
def two_lengths(tmp_path):
    """A group of two variables whose stored chunks differ in length, so that the blocks of one are made to line up."""
    source = xr.Dataset({"t": (DIMS, VALUES[:96]), "zonal": (DIMS[:2], VALUES[:96, :, 0])})
    encoding = {"t": {"chunks": (4, 20, 30)}, "zonal": {"chunks": (8, 20)}}
    source.to_zarr(tmp_path / "g.zarr", consolidated=False, encoding=encoding)
    return tmp_path / "g.zarr"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chunks", ["auto", {"time": "auto"}])
def test_auto_is_near_the_size_that_dask_was_told_where_blocks_of_variables_line_up(two_lengths, chunks):
    kwargs = {"engine": "gpuzarr", "device": "cpu", "options": ReadOptions(target_block_bytes=TARGET_BYTES)}
    with dask.config.set({"array.chunk-size": f"{32 * 20 * 30 * 4} B"}):
        ds = xr.open_dataset(two_lengths, chunks=chunks, consolidated=False, **kwargs)
    assert ds.zonal.encoding["preferred_chunks"] == {"time": 8, "y": 20}
    assert (ds.t.data.chunksize, ds.zonal.data.chunksize) == ((32, 20, 30), (96, 20))


@pytest.mark.filterwarnings("ignore:blocks cut stored", "ignore:The specified chunks separate")
@pytest.mark.parametrize("n_bytes", [100, 640, 1280, 2560, 10_000])
def test_a_small_size_told_to_dask_cuts_as_with_engine_zarr(two_lengths, n_bytes):
    options = ReadOptions(target_block_bytes=16 * 20 * 30 * 4)
    with dask.config.set({"array.chunk-size": f"{n_bytes} B"}):
        kwargs = {"chunks": "auto", "consolidated": False}
        ours = xr.open_dataset(two_lengths, engine="gpuzarr", device="cpu", options=options, **kwargs)
        of_zarr = xr.open_dataset(two_lengths, engine="zarr", **kwargs)
    assert ours.zonal.chunks == of_zarr.zonal.chunks


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
@pytest.mark.parametrize("chunks", [{}, "auto", -1, 5, {"y": "auto"}, {"x": "auto"}])
def test_arrays_without_extent(tmp_path, shape, chunks):
    xr.Dataset({"t": (("y", "x"), np.zeros(shape))}).to_zarr(tmp_path / "e.zarr", consolidated=False)
    ds = xr.open_dataset(tmp_path / "e.zarr", engine="gpuzarr", device="cpu", chunks=chunks, consolidated=False)
    assert ds.t.chunks == tuple((n,) for n in shape)
    assert ds.t.compute(scheduler="sync").shape == shape


@pytest.mark.filterwarnings("error")
def test_auto_leaves_tiles_whole(tmp_path):
    zarr.create_array(tmp_path / "t.zarr", data=VALUES, chunks=(1, 7, 8))
    kwargs = {"engine": Engine, "target_bytes": 12 * 14 * 16 * 4}
    default = xr.open_dataset(tmp_path / "t.zarr", **kwargs, chunks={}).t.chunks
    assert xr.open_dataset(tmp_path / "t.zarr", **kwargs, chunks="auto").t.chunks == default
    for chunks in ({"time": 24, "y": "auto", "x": "auto"}, {"time": 24}):
        ds = xr.open_dataset(tmp_path / "t.zarr", **kwargs, chunks=chunks)
        assert ds.t.chunks == ((24, 24, 24, 24, 4), (14, 6), (8, 8, 8, 6))
        assert {type(length) for along in ds.t.chunks for length in along} == {int}
    series = xr.open_dataset(tmp_path / "t.zarr", **kwargs, chunks={"time": -1}).t
    assert series.chunks == ((100,), (7, 7, 6), (8, 8, 8, 6))


@pytest.mark.parametrize(("chunks", "chunk_size"), [({}, "128MiB"), ("auto", "128MiB"), ({}, "64 MiB")])
def test_arrays_of_any_length_can_be_opened(tmp_path, chunks, chunk_size):
    group = zarr.create_group(tmp_path / "long.zarr")
    group.create_array("t", shape=(2**61,), chunks=(2**10,), dtype="u1", dimension_names=["time"])
    kwargs = {"engine": "gpuzarr", "device": "cpu", "consolidated": False}
    with dask.config.set({"array.chunk-size": chunk_size}):
        ds = xr.open_dataset(tmp_path / "long.zarr", chunks=chunks, **kwargs)
    assert 900_000 < len(ds.t.chunks[0]) <= 1_000_000


def test_a_size_in_bytes_makes_whole_chunks(store):
    ds = xr.open_dataset(store, engine=Engine).chunk(f"{13 * 20 * 30 * 4} B")
    assert ds.t.chunks == ((16,) * 6 + (4,), (20,), (30,))
    with pytest.raises(ValueError, match=r"chunks has '1 MiB' for axis 0: a size in bytes is that of whole blocks"):
        xr.open_dataset(store, engine=Engine).chunk(time="1 MiB")


def test_preferred_blocks_are_a_dict_that_does_not_pose_as_stored_chunks(store):
    preferred = xr.open_dataset(store, engine=Engine).t.encoding["preferred_chunks"]
    assert preferred == {"time": 8, "y": 20, "x": 30}
    again = pickle.loads(pickle.dumps(preferred))
    assert type(again) is PreferredBlocks
    assert again.objects == {"time": 4, "y": 20, "x": 30}
    assert preferred.get("time", 20) == [8, 8, 4]
    assert preferred.get("time", 0) == 8
    assert preferred.get("other", 100) == 100
    assert preferred.get("time") is None


@pytest.fixture(params=["local", "file://", "reference", "memory"])
def place(request, tmp_path):
    """Stores of one dataset, as keywords of `open_dataset`; of those that are no folder, handles may be of any size."""
    encoding = {
        "sharded": {"chunks": (4, 20, 30), "shards": (8, 20, 30)},
        "packed": {"dtype": "i2", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": np.int16(-9)},
    }
    ds = xr.Dataset(dict.fromkeys(("plain", "sharded", "packed"), (DIMS, VALUES)))
    path = tmp_path.joinpath(*["folder-of-a-typical-name"] * 3, "dataset.zarr")
    if request.param == "memory":
        path = MemoryStore()
    ds.to_zarr(path, consolidated=False, encoding=encoding)
    if request.param == "reference":
        files = [(str(file.relative_to(path)), f"file://{file}") for file in path.rglob("*") if file.is_file()]
        refs = {key: [url] for key, url in files} | {f"plain/c/9/9/{i}": [files[0][1]] for i in range(9999)}
        options = {"fo": {"version": 1, "refs": refs}, "remote_protocol": "file"}
        return {"filename_or_obj": "reference://", "storage_options": options}
    return {"filename_or_obj": f"file://{path}" if request.param == "file://" else path}


@pytest.mark.filterwarnings("ignore:.*asynchronous=True")
@pytest.mark.parametrize("name", ["plain", "packed", "sharded"])
def test_tasks_are_small(place, name):
    options = ReadOptions(target_block_bytes=TARGET_BYTES)
    ds = xr.open_dataset(**place, engine="gpuzarr", device="cpu", chunks={}, consolidated=False, options=options)
    expected = xr.open_dataset(**place, engine="zarr", consolidated=False)[name].data
    arrays = [
        (ds[name].data, expected),
        (ds[name].isel(time=slice(3, None, 9), x=3).data, expected[3::9, :, 3]),
        (ds[name].isel(x=3).isel(time=5).data, expected[5, :, 3]),
    ]
    for array, values in arrays:
        graph = dict(array.__dask_graph__())
        assert set(graph) - set(dask.core.flatten(array.__dask_keys__())) <= {f"original-{array.name}"}
        for key in dask.core.flatten(array.__dask_keys__()):
            source = graph[key].args[0]
            assert len(pickle.dumps(getattr(source, "value", source))) < 1000
        np.testing.assert_array_equal(array.compute(scheduler="sync"), values)


def test_index_arrays_are_in_the_graph_once(store):
    index = np.random.default_rng(1).integers(0, 100, 5000)
    array = xr.open_dataset(store, engine=Engine).t.isel(time=index).chunk(time=100).data
    nbytes = {key: len(pickle.dumps(task)) for key, task in dict(array.__dask_graph__()).items()}
    assert nbytes.pop(f"original-{array.name}") > index.nbytes
    assert max(nbytes.values()) < 2000
    np.testing.assert_array_equal(array[::7, 3].compute(scheduler="sync"), VALUES[index[::7], 3])


def test_names_are_deterministic_and_tell_selections_apart(store):
    def open_t():
        return xr.open_dataset(store, engine=Engine, chunks={}).t

    with dask.config.set({"tokenize.ensure-deterministic": True}):
        names = [select(open_t()).data.name for select in (lambda t: t, lambda t: t[3], lambda t: t[4]) for _ in "ab"]
    assert names[::2] == names[1::2]
    assert len(set(names)) == 3


def test_names_tell_long_index_arrays_apart(store):
    first, second = np.zeros((2, 5000), int)
    second[2500] = 1
    lazy = xr.open_dataset(store, engine=Engine, cache=False).t
    assert lazy.isel(time=first).chunk().data.name != lazy.isel(time=second).chunk().data.name


def test_several_stores_are_concatenated(store, device, tmp_path):
    zarr.create_array(tmp_path / "t2.zarr", data=VALUES + 1, chunks=(4, 20, 30))
    stores = [store, str(tmp_path / "t2.zarr")]
    ds = xr.open_mfdataset(stores, engine=Engine, device=device, combine="nested", concat_dim="time", join="override")
    assert type(ds.t.data._meta) is FakeDeviceArray
    np.testing.assert_array_equal(values(ds.t), np.concatenate([VALUES, VALUES + 1]))


@pytest.fixture
def group(tmp_path):
    """A group as users have them: floats of two widths, packed integers, and coordinates of one and two dimensions."""
    packed = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": -9}
    xr.Dataset(
        {"t": (DIMS, VALUES), "u": (DIMS, VALUES.astype("f8")), "packed": (DIMS, VALUES)},
        coords={"time": np.arange(100), "y": np.arange(20.0), "lat": (("y", "x"), np.ones((20, 30)))},
    ).to_zarr(
        tmp_path / "g.zarr",
        consolidated=False,
        encoding={
            "t": {"chunks": (4, 20, 30)},
            "u": {"chunks": (4, 20, 30)},
            "packed": packed | {"chunks": (4, 20, 30)},
        },
    )
    return tmp_path / "g.zarr"


@pytest.mark.parametrize(
    ("chunks", "expected"), [({}, STEPS_OF_8), ({"time": 24}, (24, 24, 24, 24, 4)), ("auto", STEPS_OF_8)]
)
def test_the_engine_gives_blocks_on_the_device(group, device, chunks, expected):
    options = ReadOptions(target_block_bytes=8 * 20 * 30 * 8)
    ds = xr.open_dataset(group, engine="gpuzarr", device=device, chunks=chunks, consolidated=False, options=options)
    on_host = xr.open_dataset(group, engine="zarr", consolidated=False)
    assert ds.chunksizes["time"] == expected  # of variables of 4 and of 8 bytes alike
    for name in ("t", "u", "packed"):
        assert type(ds[name].data._meta) is FakeDeviceArray
        np.testing.assert_array_equal(values(ds[name]), on_host[name].data)
    assert type(ds.lat.data._meta) is np.ndarray
    np.testing.assert_array_equal(ds.lat.compute(scheduler="sync").data, on_host.lat.data)


def test_default_blocks_on_the_host_hold_many_chunks_too(group):
    options = ReadOptions(target_block_bytes=8 * 20 * 30 * 8)
    ds = xr.open_dataset(group, engine="gpuzarr", device="cpu", chunks={}, consolidated=False, options=options)
    assert ds.chunksizes["time"] == STEPS_OF_8
    np.testing.assert_array_equal(ds.t.data.compute(scheduler="sync"), VALUES)


def test_importing_needs_no_dask():
    script = (
        "import sys; sys.modules['dask'] = None; import xgpuzarr.chunk_manager; "
        "assert 'dask.array' not in sys.modules and 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_default_blocks_of_all_variables_line_up(tmp_path, device):
    xr.Dataset(
        {
            "t": (DIMS, VALUES),
            "zonal": (DIMS[:2], VALUES[:, :, 0]),
            "when": ("time", np.arange(100).astype("M8[s]")),
        }
    ).to_zarr(
        tmp_path / "g.zarr",
        consolidated=False,
        encoding={"t": {"chunks": (1, 20, 30)}, "zonal": {"chunks": (1, 20)}, "when": {"chunks": (4,)}},
    )
    options = ReadOptions(target_block_bytes=8 * 20 * 30 * 4)
    ds = xr.open_dataset(
        tmp_path / "g.zarr", engine="gpuzarr", device=device, chunks={}, consolidated=False, options=options
    )
    assert ds.chunks["time"] == STEPS_OF_8
    assert {name: ds[name].chunksizes["time"] for name in ds} == dict.fromkeys(ds, STEPS_OF_8)
    np.testing.assert_array_equal(ds.when.compute(scheduler="sync").data, np.arange(100).astype("M8[s]"))
