"""`ds.gpuzarr`: the route table, moving between host and device, and mixing the two."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.fake_device import device_array, fake_device  # noqa: F401  # fixtures
from xgpuzarr.accessor import Route
from xgpuzarr.backend_array import GpuZarrBackendArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("device_array")


@pytest.fixture
def store(tmp_path: Path) -> str:
    rng = np.random.default_rng(1)
    dataset = xr.Dataset(
        {
            "t": (("time", "lat", "lon"), rng.random((4, 3, 5), np.float32)),
            "packed": (("time", "lat"), rng.integers(0, 90, (4, 3)) / 10),
            "label": ("lon", list("abcde")),
        },
        {"lat": [10.0, 20.0, 30.0], "height": (("lat", "lon"), rng.random((3, 5)))},
    )
    encoding = {
        "packed": {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -1, "chunks": (2, 3)},
        "t": {"chunks": (2, 3, 5)},
    }
    path = str(tmp_path / "store.zarr")
    dataset.to_zarr(path, encoding=encoding, zarr_format=2, consolidated=True)
    return path


def open_on(device: str, store: str, **kwargs: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine="gpuzarr", device=device, **kwargs)


def on_device(dataset: xr.Dataset) -> set[Any]:
    return {name for name, v in dataset.variables.items() if is_device_array(getattr(v.data, "_meta", v.data))}


def is_device_array(data: Any) -> bool:
    return not isinstance(data, np.ndarray)


@pytest.mark.parametrize("chunks", [None, {}, {"time": 2}])
def test_routes(store: str, chunks: Any) -> None:
    routes = {route.variable: route for route in open_on("cuda", store, chunks=chunks).gpuzarr.routes}
    n_times = 2 if chunks else 4
    assert routes["t"] == Route(
        "t",
        (4, 3, 5),
        "float32",
        routes["t"].codec_chain,
        "cuda",
        routes["t"].route,
        routes["t"].reason,
        chunk_nbytes=2 * 3 * 5 * 4,
        block_nbytes=n_times * 3 * 5 * 4,
    )
    assert "blosc" in routes["t"].codec_chain
    assert routes["packed"].dtype == "float64"
    assert routes["packed"].chunk_nbytes == 2 * 3 * 2
    assert routes["packed"].block_nbytes == n_times * 3 * 8
    assert routes["lat"].reason == "index"
    assert routes["lat"].device == "cpu"
    assert routes["height"].reason == "coordinate"
    assert "blosc" in routes["height"].codec_chain
    assert routes["height"].chunk_nbytes == 3 * 5 * 8
    assert routes["label"].reason.startswith("CuPy has no")


def test_routes_of_what_was_read_or_computed(store: str) -> None:
    dataset = open_on("cuda", store)[["t"]].load()
    dataset["mean"] = dataset.t.mean("time")
    dataset["plain"] = ("lat", np.zeros(3))
    routes = {route.variable: route for route in dataset.gpuzarr.routes}
    assert (routes["t"].device, routes["t"].route, routes["t"].reason) == ("cuda", "", "")
    assert (routes["mean"].device, routes["mean"].chunk_nbytes) == ("cuda", None)
    assert (routes["plain"].device, routes["plain"].reason) == ("cpu", "in memory or computed")


def test_routes_of_host_blocks_that_were_computed_with(store: str) -> None:
    for device in ("cuda", "cpu"):
        dataset = open_on(device, store, chunks={})
        dataset["twice"] = 2 * dataset.height
        dataset["less"] = dataset.height.copy()
        dataset["less"][0] = 0.0
        routes = {route.variable: route for route in dataset.gpuzarr.routes}
        assert "blosc" in routes["height"].codec_chain
        for name in ("twice", "less"):
            assert (routes[name].codec_chain, routes[name].reason) == ("", "in memory or computed")


def test_routes_print_as_a_table(store: str) -> None:
    dataset = open_on("cuda", store)
    dataset["<b>"] = dataset.t
    heads, *lines = repr(dataset.gpuzarr.routes).splitlines()
    assert heads.split("  ")[0] == "variable"
    assert "remote reader" not in heads  # of a local folder
    assert heads.index("shape") == lines[0].index("(")
    assert len(lines) == len(dataset.variables)
    page = dataset.gpuzarr.routes._repr_html_()
    assert page.count("<tr>") == 1 + len(dataset.variables)
    assert "<td>&lt;b&gt;</td>" in page


def test_printing_routes_reads_nothing(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_on("cuda", store)
    monkeypatch.setattr(GpuZarrBackendArray, "__getitem__", None)
    assert "packed" in repr(dataset.gpuzarr.routes)
    assert dataset.gpuzarr.nbytes_device == 4 * 3 * 5 * 4 + 4 * 3 * 8


@pytest.mark.parametrize("chunks", [None, {}])
def test_to_host_and_back(store: str, chunks: Any) -> None:
    expected = xr.open_dataset(store, engine="zarr")
    dataset = open_on("cuda", store, chunks=chunks).isel(time=slice(1, None))
    expected = expected.isel(time=slice(1, None))
    there = dataset.gpuzarr.to_host()
    assert on_device(there) == set()
    xr.testing.assert_identical(there.compute(), expected)
    assert on_device(dataset.gpuzarr.to_host("t")) == {"packed"}
    back = there.gpuzarr.to_device()
    assert on_device(back) == {"t", "packed"}
    xr.testing.assert_identical(back.compute().as_numpy(), expected)
    assert on_device(there.gpuzarr.to_device(["height"])) == {"height"}


def test_moving_lazy_variables_reads_nothing(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_on("cuda", store).isel(time=[2, 0], lat=xr.DataArray([1, 2], dims="lat"))
    read, devices = GpuZarrBackendArray.__getitem__, []
    monkeypatch.setattr(
        GpuZarrBackendArray, "__getitem__", lambda self, key: (devices.append(self.device), read(self, key))[1]
    )
    there = dataset.gpuzarr.to_host()
    back = there.gpuzarr.to_device()
    assert devices == []
    assert isinstance(there.packed.data, np.ndarray)
    assert is_device_array(back.packed.data)
    assert devices == ["cpu", "cuda"]


def test_an_index_cannot_move(store: str) -> None:
    dataset = open_on("cuda", store)
    with pytest.raises(TypeError, match="'lat' is an index"):
        dataset.gpuzarr.to_device("lat")
    with pytest.raises(TypeError, match="CuPy has no <U1 dtype"):
        dataset.gpuzarr.to_device("label")
    with pytest.raises(KeyError, match="nowhere"):
        dataset.gpuzarr.to_device("nowhere")


def test_prefetch_holds_every_lazy_variable(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_on("cuda", store)
    held = dataset.gpuzarr.prefetch()
    with monkeypatch.context() as patch:
        patch.setattr(GpuZarrBackendArray, "__getitem__", None)
        assert is_device_array(held.t.data)
        assert held.packed.data is held.packed.data
    xr.testing.assert_identical(held.as_numpy(), xr.open_dataset(store, engine="zarr"))


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_a_name_that_is_not_there(store: str, method: str) -> None:
    dataset = xr.open_dataset(store, engine="gpuzarr", device="cpu")
    with pytest.raises(KeyError, match=r"no variables \['nope'\]; there are \[.*'t'"):
        getattr(dataset.gpuzarr, method)("nope")


def test_prefetch_with_nothing_to_read() -> None:
    dataset = xr.Dataset({"v": ("x", np.arange(3))})
    xr.testing.assert_identical(dataset.gpuzarr.prefetch(), dataset)


MIXED = {
    "data * coordinate": lambda ds: ds.t * np.cos(ds.lat),
    "coordinate * data": lambda ds: np.cos(ds.lat) * ds.t,
    "data * index": lambda ds: ds.t * ds.lat,
    "index * data": lambda ds: ds.lat * ds.t,
    "index * dataset": lambda ds: (ds.lat * ds[["t", "packed"]]).t,
    "index <= data": lambda ds: ds.lat / 30 <= ds.t,
    "bare index < data": lambda ds: ds.lat < ds.t,
    "index ** data": lambda ds: ds.lat**ds.packed,
    "number / data": lambda ds: 2.0 / ds.t,
    "data - 2-D coordinate": lambda ds: ds.t - ds.height,
    "2-D coordinate - data": lambda ds: ds.height - ds.t,
    "chained": lambda ds: (ds.t - ds.t.mean("time")) * ds.lat / 2,
    "after a reduction": lambda ds: ds.t.mean("time") * ds.lat,
    "after a unary operation": lambda ds: -ds.t * ds.lat,
    "comparison": lambda ds: ds.t > ds.height,
    "NumPy array": lambda ds: ds.t + np.arange(5.0),
    "dataset": lambda ds: (ds[["t", "packed"]] * ds.lat).packed,
    "a function's result, wrapped again": lambda ds: np.sqrt(ds.t).gpuzarr.to_device() * ds.lat,
    "after selection": lambda ds: (ds.t.isel(lon=2) * ds.lat).sel(lat=20.0),
}
COPIED_BY_CUPY = {
    "weighted": lambda ds, weights: ds.t.weighted(weights).mean(("lat", "lon")),
    "dot": lambda ds, weights: xr.dot(ds.t, weights, dim="lat"),
}
FIXED_BY_TO_DEVICE = {
    "function of the user": lambda ds, weights: xr.apply_ufunc(lambda t, w: t + w, ds.t, weights),
}


@pytest.mark.parametrize("chunks", [None, {"time": 2}])
@pytest.mark.parametrize("expression", MIXED.values(), ids=MIXED)
def test_device_data_mixes_with_host_data(store: str, chunks: Any, expression: Any) -> None:
    result = expression(open_on("cuda", store, chunks=chunks))
    assert is_device_array(result.compute().data)
    expected = expression(open_on("cpu", store))
    assert result.dims == expected.dims
    xr.testing.assert_allclose(result.compute().as_numpy(), expected.as_numpy())


@pytest.mark.parametrize("expression", COPIED_BY_CUPY.values(), ids=COPIED_BY_CUPY)
def test_sums_of_products_take_host_data(store: str, expression: Any) -> None:
    dataset, host = open_on("cuda", store), open_on("cpu", store)
    result = expression(dataset, np.cos(np.deg2rad(dataset.lat)))
    assert is_device_array(result.data)
    xr.testing.assert_allclose(result.as_numpy(), expression(host, np.cos(np.deg2rad(host.lat))))


@pytest.mark.parametrize("expression", FIXED_BY_TO_DEVICE.values(), ids=FIXED_BY_TO_DEVICE)
def test_to_device_fixes_what_xarray_does_not_let_through(store: str, expression: Any) -> None:
    dataset = open_on("cuda", store)
    weights = np.cos(np.deg2rad(dataset.lat))
    with pytest.raises(TypeError):
        expression(dataset, weights)
    result = expression(dataset, weights.gpuzarr.to_device())
    assert is_device_array(result.data)
    host = open_on("cpu", store)
    xr.testing.assert_allclose(result.as_numpy(), expression(host, np.cos(np.deg2rad(host.lat))))


def test_a_scalar_has_a_value_on_the_host(store: str) -> None:
    dataset, expected = open_on("cuda", store), open_on("cpu", store)
    assert float(dataset.t.mean()) == pytest.approx(float(expected.t.mean()))
    assert (dataset.t > 0.5).any()
    assert dataset.t[0, 0, 0].values == expected.t[0, 0, 0].values
    with pytest.raises(TypeError):
        _ = dataset.t[0].values


@pytest.mark.parametrize("chunks", [None, {"time": 2}])
def test_a_scalar_in_dask_blocks_has_a_value_on_the_host(store: str, chunks: Any) -> None:
    result = open_on("cuda", store, chunks=chunks).t.mean()
    assert float(result) == pytest.approx(float(open_on("cpu", store).t.mean()))


def test_lazy_data_broadcasts_and_reindexes(store: str) -> None:
    dataset, expected = open_on("cuda", store), open_on("cpu", store)
    for operate in (
        lambda ds: ds.t.expand_dims(member=2),
        lambda ds: ds.packed.broadcast_like(ds.t),
        lambda ds: ds.t.reindex(lat=[20.0, 25.0]),
    ):
        result = operate(dataset)
        assert is_device_array(result.data)
        xr.testing.assert_identical(result.as_numpy(), operate(expected))


@pytest.mark.parametrize("chunks", [None, {"time": 2}])
def test_a_condition_on_a_coordinate_goes_beside_the_data(store: str, chunks: Any) -> None:
    dataset, expected = open_on("cuda", store, chunks=chunks), open_on("cpu", store)
    condition = (dataset.lat > 15).gpuzarr.beside(dataset.t)
    assert hasattr(condition.data, "__dask_graph__") == bool(chunks)
    result = dataset.t.where(condition).compute()
    assert is_device_array(result.data)
    xr.testing.assert_identical(result.as_numpy(), expected.t.where(expected.lat > 15))


def test_beside_data_on_the_host_nothing_moves(store: str) -> None:
    host, dataset = open_on("cpu", store), open_on("cuda", store)
    xr.testing.assert_identical(host.lat.gpuzarr.beside(host.t), host.lat)
    assert isinstance(host.height.gpuzarr.beside(host.t).data, np.ndarray)
    assert is_device_array(dataset.t.gpuzarr.beside(dataset.packed).data)
    with pytest.raises(TypeError, match="CuPy has no <U1 dtype"):
        dataset.label.gpuzarr.beside(dataset.t)


def test_in_place_arithmetic(store: str) -> None:
    dataset, expected = open_on("cuda", store), open_on("cpu", store).load()
    array, wanted = dataset.t, expected.t
    array *= dataset.lat
    wanted *= expected.lat
    assert is_device_array(array.data)
    xr.testing.assert_allclose(array.as_numpy(), wanted)


@pytest.mark.parametrize("operate", [operator.mul, operator.add])
def test_times_do_not_go_to_the_device(store: str, operate: Any) -> None:
    dataset = open_on("cuda", store)
    with pytest.raises(TypeError):
        operate(dataset.t, xr.DataArray(np.array(["2001"], "M8[s]"), dims="day"))


def test_host_datasets_have_the_accessor_too(store: str) -> None:
    dataset = open_on("cpu", store)
    assert dataset.gpuzarr.nbytes_device == 0
    assert {route.device for route in dataset.gpuzarr.routes} == {"cpu"}
    xr.testing.assert_identical(dataset.gpuzarr.to_host(), dataset)
    assert on_device(dataset.gpuzarr.to_device()) == {"t", "packed"}


BINARY = {
    "data + data": lambda ds: ds.t + ds.packed,
    "data - index": lambda ds: ds.t - ds.lat,
    "index - data": lambda ds: ds.lat - ds.t,
    "coordinate - data": lambda ds: ds.height - ds.t,
    "data < data": lambda ds: ds.t < ds.packed,
    "in place": lambda ds: operator.iadd(ds.t, ds.packed),
}


@pytest.mark.parametrize("expression", BINARY.values(), ids=BINARY)
def test_arithmetic_reads_each_operand_once(
    store: str, monkeypatch: pytest.MonkeyPatch, expression: Callable[[xr.Dataset], Any]
) -> None:
    dataset, read = open_on("cuda", store).load(), []
    dataset = open_on("cuda", store).assign_coords(height=dataset.height)
    getitem = GpuZarrBackendArray.__getitem__

    def noting(self: GpuZarrBackendArray, key: Any) -> Any:
        read.append(self.name)
        return getitem(self, key)

    monkeypatch.setattr(GpuZarrBackendArray, "__getitem__", noting)
    expression(dataset)
    assert len(read) == len(set(read)) > 0


POINTS = {"time": xr.DataArray([0, 3], dims="p"), "lat": xr.DataArray([1, 2], dims="p")}
ASSIGNED: dict[str, Callable[[xr.Dataset], Any]] = {
    "number": lambda _: ({"lat": 0}, 2.0),
    "list": lambda _: ({"lon": [0, 2]}, [1, 2.5]),
    "NumPy array": lambda _: ({"time": slice(1, 3)}, np.arange(15.0).reshape(3, 5)),
    "coordinate": lambda ds: ({"time": 2}, ds.height),
    "index": lambda ds: ({"time": 2, "lon": 0}, ds.lat),
    "device data": lambda ds: ({"time": 2, "lon": 0}, ds.packed[1]),
    "points": lambda ds: (POINTS, ds.height[0]),
}


@pytest.mark.parametrize(
    ("how", "name"),
    [(how, name) for how in ("lazy", "read") for name in ASSIGNED]
    + [("blocks", name) for name in ASSIGNED if name != "points"],  # to which dask does not assign
)
def test_assignment_takes_values_from_the_host(store: str, how: str, name: str) -> None:
    datasets = [open_on(device, store, chunks={} if how == "blocks" else None) for device in ("cuda", "cpu")]
    if how == "read":
        datasets = [dataset.load() for dataset in datasets]
    for dataset in datasets:
        key, value = ASSIGNED[name](dataset)
        dataset.t[key] = value
    (route, *_) = [route for route in datasets[0].gpuzarr.routes if route.variable == "t"]
    assert route.device == "cuda"
    results = [dataset.t.compute() for dataset in datasets]
    assert is_device_array(results[0].data)
    xr.testing.assert_identical(results[0].as_numpy(), results[1])


def test_what_cupy_does_not_have_is_not_assigned(store: str) -> None:
    dataset = open_on("cuda", store)
    with pytest.raises(TypeError, match="CuPy has no <U1 dtype"):
        dataset.t[0, 0] = dataset.label
    with pytest.raises(TypeError, match="CuPy has no <U1 dtype"):
        dataset.t[0, 0, 0] = "a"


@pytest.mark.parametrize("position", [3, -4, 9])
def test_positions_that_are_not_there_are_an_error(store: str, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    dataset = open_on("cuda", store).drop_vars(("lat", "height")).load()
    monkeypatch.setattr(type(dataset.t.data), "__getitem__", None)  # CuPy would take them modulo the length
    points = xr.DataArray([0, position], dims="p")
    for key in ([0, position], points):
        with pytest.raises(IndexError, match=rf"index {position} is out of bounds for axis 1 with size 3"):
            dataset.t.isel(lat=key)
        with pytest.raises(IndexError, match="out of bounds"):
            dataset.t[{"lat": key}] = 0.0


@pytest.mark.parametrize("chunks", [None, {}])
def test_device_data_is_compared_with_host_data(store: str, chunks: Any) -> None:
    dataset, host = open_on("cuda", store, chunks=chunks), open_on("cpu", store)
    assert dataset.t.equals(host.t)
    assert dataset.identical(host)
    assert dataset.t.broadcast_equals(host.t.expand_dims(member=2))
    assert not dataset.t.equals(host.t + 1)
    assert not dataset.t.equals(host.label)
    assert not dataset.t.equals(None)
    assert set(xr.merge([dataset[["t"]], host[["t", "packed"]]], compat="equals")) == {"t", "packed"}
    with pytest.raises(xr.MergeError, match="conflicting values for variable 't'"):
        xr.merge([dataset[["t"]], host[["t"]] + 1], compat="equals")


def test_indexes_of_others_calculate_as_before() -> None:
    lat = xr.DataArray([1.0, 2.0], dims="lat", coords={"lat": [1.0, 2.0]}).lat
    assert isinstance(lat.variable, xr.IndexVariable)
    np.testing.assert_array_equal((lat * lat).values, [1.0, 4.0])
    np.testing.assert_array_equal((3 - lat).values, [2.0, 1.0])
    with pytest.raises(TypeError, match="immutable"):
        lat += 1


def test_lazy_data_that_was_assigned_to_is_on_the_device(store: str) -> None:
    dataset, expected = open_on("cuda", store), open_on("cpu", store).load()
    for one in (dataset, expected):
        one.t[0] = 0.0
    xr.testing.assert_allclose((dataset.t * dataset.lat).as_numpy(), expected.t * expected.lat)
    xr.testing.assert_identical(dataset.gpuzarr.to_host().t, expected.t)
    assert is_device_array(dataset.lat.gpuzarr.beside(dataset.t).data)
    (route,) = [route for route in dataset.gpuzarr.routes if route.variable == "t"]
    assert (route.device, route.reason) == ("cuda", "")
