"""Arrays on their way to the device and back, in graphs that a client without a device makes for workers with one."""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import dask.array
import numpy as np
import pytest
import xarray as xr

from tests.fake_device import FakeDeviceArray, fake_device  # noqa: F401  # fixture
from xgpuzarr.device_array import DeviceMeta, is_on_device
from xgpuzarr.errors import MissingDependencyError
from xgpuzarr.transfer import device_meta, to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = (24, 10, 12)


@pytest.fixture
def store(tmp_path: Path) -> str:
    values = np.random.default_rng(0).normal(280, 10, SHAPE).astype("f4")
    coordinates = {"time": np.arange(24), "lat": np.linspace(-80, 80, 10), "lon": np.arange(12) * 30.0}
    source = xr.Dataset({"t": (("time", "lat", "lon"), values)}, coordinates)
    source.to_zarr(tmp_path / "s.zarr", encoding={"t": {"chunks": (6, 10, 12)}}, consolidated=False)
    return str(tmp_path / "s.zarr")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process that has no device."""
    for module in ("transfer", "device_variable", "array"):
        monkeypatch.setattr(f"xgpuzarr.{module}.device_problem", lambda: "no CUDA device")
    monkeypatch.setitem(sys.modules, "cupy", None)


def _monthly(ds: xr.Dataset) -> xr.DataArray:
    with xr.set_options(use_flox=False):
        return ds.t.groupby(ds.time % 4).mean()


OPERATIONS: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "all": lambda ds: ds.t,
    "selected": lambda ds: ds.t.sel(lat=80).isel(time=slice(None, None, 5)),
    "mean": lambda ds: ds.t.mean(),
    "mean along time": lambda ds: ds.t.mean("time"),
    "anomaly": lambda ds: ds.t - ds.t.mean("time"),
    "weights": lambda ds: ds.t * np.cos(np.deg2rad(ds.lat)),
    "weights first": lambda ds: ds.lat * ds.t,
    "groups": _monthly,
    "where": lambda ds: ds.t.where(ds.t > 280),
    "rechunked": lambda ds: ds.t.chunk(time=-1, lat=5),
    "zeros": lambda ds: xr.zeros_like(ds.t) + ds.t,
    "concatenated": lambda ds: xr.concat([ds.t, ds.t + 1], "copy"),
    "shifted": lambda ds: ds.t.roll(time=3, roll_coords=False) - ds.t,
    "std": lambda ds: (ds.t - ds.t.mean()).std(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_graphs_of_a_client_without_a_device(name: str, store: str, request: pytest.FixtureRequest) -> None:
    operation = OPERATIONS[name]
    opened = {"chunks": {"time": 6}, "consolidated": False}
    expected = operation(xr.open_dataset(store, engine="zarr", **opened)).values
    request.getfixturevalue("no_device")
    result = operation(xr.open_dataset(store, engine="gpuzarr", device="cuda", **opened))
    assert type(result.data._meta) is DeviceMeta
    on_host = result.gpuzarr.to_host()
    assert type(on_host.data._meta) is np.ndarray
    graphs = cloudpickle.dumps((result.data, on_host.data))
    request.getfixturevalue("fake_device")
    on_device, on_host = pickle.loads(graphs)
    with dask.config.set(scheduler="synchronous"):
        (on_device,), (on_host,) = dask.compute(on_device), dask.compute(on_host)
    assert type(on_device) is FakeDeviceArray
    assert type(on_host) is np.ndarray or np.isscalar(on_host)
    np.testing.assert_allclose(on_host, expected, rtol=1e-6)
    np.testing.assert_array_equal(on_device.get(), on_host)


@pytest.mark.usefixtures("fake_device")
def test_workers_copy_what_is_to_be_numpy(store: str) -> None:
    """A client without a device could not take CuPy arrays from them."""
    ds = xr.open_dataset(store, engine="gpuzarr", device="cuda", chunks={}, consolidated=False)
    taken: list[type] = []
    expected = xr.open_dataset(store, engine="zarr", consolidated=False).t
    with dask.config.set(scheduler=lambda graph, keys, **kwargs: _noting(taken, graph, keys, **kwargs)):
        np.testing.assert_array_equal(ds.t.to_numpy(), expected.values)
        np.testing.assert_array_equal(ds.t.as_numpy().values, expected.values)
        assert float(ds.t.max()) == float(expected.max())
    assert taken
    assert FakeDeviceArray not in taken


def _noting(taken: list[type], graph: Any, keys: Any, **kwargs: Any) -> Any:
    """Compute in this thread, and note the types of what a client would be sent."""
    results = dask.get(graph, keys, **kwargs)

    def note(result: Any) -> None:
        if isinstance(result, (list, tuple)):
            for item in result:
                note(item)
        else:
            taken.append(type(result))

    note(results)
    return results


@pytest.mark.usefixtures("no_device")
def test_metas_stay_those_of_the_device() -> None:
    meta = device_meta(3, np.dtype("f4"))
    assert type(meta) is DeviceMeta
    assert (meta.shape, meta.dtype) == ((0, 0, 0), np.dtype("f4"))
    for result in (meta + 1, np.sqrt(meta), meta.sum(), np.sum(meta), np.concatenate([meta, meta]), meta.sum()[()]):
        assert type(result) is DeviceMeta
    assert is_on_device(meta)
    again = pickle.loads(pickle.dumps(meta))
    assert (type(again), again.shape, again.dtype) == (DeviceMeta, meta.shape, meta.dtype)


def test_metas_are_of_cupy_where_it_is(no_device: None, request: pytest.FixtureRequest) -> None:  # noqa: ARG001
    pickled = pickle.dumps(device_meta(2, np.dtype("i2")))
    request.getfixturevalue("fake_device")
    meta = pickle.loads(pickled)
    assert type(meta) is FakeDeviceArray
    assert (meta.shape, meta.dtype) == ((0, 0), np.dtype("i2"))


@pytest.mark.usefixtures("fake_device")
def test_to_the_device_and_back() -> None:
    values = np.arange(6.0)
    there = to_device(values)
    assert type(there) is FakeDeviceArray
    assert to_device(there) is there
    back = to_host(there)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, values)
    assert to_host(values) is values
    with pytest.raises(TypeError, match="CuPy has no datetime64"):
        to_device(np.array(["2020"], "M8[s]"))


class Quantity:
    """Values with a unit, which passes on whatever else it is asked for, as pint's does."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("where", ["host", "device"])
def test_values_with_a_unit_do_not_lose_it(where: str) -> None:
    values = dask.array.from_array(np.arange(4.0), chunks=2)
    quantity = Quantity(to_device(values) if where == "device" else values)
    assert to_host(quantity) is quantity
    with pytest.raises(TypeError, match="only NumPy and dask arrays can be copied to the device, got Quantity"):
        to_device(quantity)


@pytest.mark.usefixtures("no_device")
def test_a_copy_to_a_device_that_is_not_there_says_what_is_missing(store: str) -> None:
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        to_device(np.ones(2))
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        to_device(dask.array.ones(2)).compute(scheduler="sync")
    dataset = xr.open_dataset(store, engine="gpuzarr", device="cuda", consolidated=False)
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        dataset.gpuzarr.prefetch()
