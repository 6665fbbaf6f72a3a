"""Operators between what is on the device, made by the engine or by xarray's functions, and what is on the host."""

from __future__ import annotations

import functools
import operator
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dask.array
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from xarray.core import indexing

from tests.fake_device import device_array, fake_device  # noqa: F401  # fixtures
from xgpuzarr import device_variable
from xgpuzarr.backend_array import GpuZarrBackendArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNKS: list[Any] = [None, {"time": 2}]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(1)
    t = rng.random((4, 3, 6), np.float32) * 9
    t[1, 2] = np.nan
    dataset = xr.Dataset(
        {
            "t": (("time", "lat", "lon"), t, {"units": "K", "long_name": "temperature"}),
            "packed": (("time", "lat"), rng.integers(0, 90, (4, 3)) / 10),
        },
        {
            "time": ("time", [1.0, 2.0, 4.0, 8.0], {"units": "K"}),
            "height": (("time", "lat"), rng.random((4, 3)), {"units": "m"}),
        },
    )
    path = str(tmp_path_factory.mktemp("store") / "store.zarr")
    encoding: dict[str, Any] = {
        "t": {"chunks": (2, 3, 6)},
        "packed": {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -1, "chunks": (2, 3)},
        "height": {"chunks": (2, 3)},
    }
    dataset.to_zarr(path, encoding=encoding, zarr_format=2, consolidated=True)
    return path


def on_device(store: str, **kwargs: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine="gpuzarr", device="cuda", **kwargs)


def on_host(store: str, **kwargs: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine="zarr", **kwargs)


def assert_as_on_host(result: Any, expected: Any, device_array: type) -> None:  # noqa: F811
    """Compare everything that xarray makes of the same expression, and see where the values are."""
    assert type(result.data) is type(expected.data) or isinstance(result.data, device_array)
    computed = result.compute()
    assert isinstance(computed.data, device_array)
    here = computed.as_numpy()
    assert (here.dims, here.dtype, here.attrs) == (expected.dims, expected.dtype, expected.attrs)
    np.testing.assert_allclose(here.values, expected.values, rtol=1e-6)
    if isinstance(expected, xr.DataArray):
        assert here.name == expected.name
        xr.testing.assert_identical(here.coords.to_dataset(), expected.coords.to_dataset().compute())


MADE: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "the engine": lambda ds: ds.t,
    "arithmetic": lambda ds: ds.t * ds.time,
    "fillna": lambda ds: ds.t.fillna(np.float32(0)),
    "where": lambda ds: ds.t.where(ds.t > 3),
    "clip": lambda ds: ds.t.clip(2.0, 8.0),
    "astype": lambda ds: ds.t.astype("float64"),
    "isnull": lambda ds: ds.t.isnull(),  # noqa: PD003
    "coarsen": lambda ds: ds.t.coarsen(lon=2).sum(),
    "stack": lambda ds: ds.t.assign_coords(height=ds.height[:, 0]).stack(point=("lat", "lon")),  # noqa: PD013
    "expand_dims": lambda ds: ds.t.expand_dims(member=2, axis=1),
    "concat": lambda ds: xr.concat([ds.t.compute()[:3], ds.t.compute()[3:]], "time"),
    "np.sqrt": lambda ds: np.sqrt(ds.t),
}


def in_place(array: xr.DataArray) -> xr.DataArray:
    array = array.copy()
    array *= array.time
    return array


OPERATORS: dict[str, Callable[[xr.DataArray], Any]] = {
    "index behind": lambda a: a * a.time,
    "index before": lambda a: a.time - a,
    "2-D coordinate behind": lambda a: a / a.height,
    "2-D coordinate before": lambda a: a.height + a,
    "derived array behind": lambda a: a + np.cos(a.time),
    "derived array before": lambda a: np.cos(a.height) * a,
    "transposed coordinate before": lambda a: a.height.T - a,
    "NumPy array": lambda a: a + np.arange(a.shape[-1]) / 2,
    "NumPy scalar": lambda a: a * np.float64(0.5),
    "less than index": lambda a: a < a.time,
    "index less than": lambda a: a.time <= a,
    "equal to index": lambda a: a == a.time,
    "unequal to 2-D coordinate": lambda a: a.height != a,
    "and": lambda a: (a > 1) & (a.time > 3),
    "or, behind": lambda a: (a.time > 3) | (a > 1),
    "in place": in_place,
    "variables": lambda a: a.time.variable * a.variable,
    "variable and index": lambda a: a.variable - a.time.variable,
    "variable and NumPy array": lambda a: a.variable > np.ones(a.shape),
    "dataset": lambda a: (a.to_dataset(name="a") * a.time).a,
    "dataset behind": lambda a: (np.cos(a.time) - a.to_dataset(name="a")).a,
    "several": lambda a: (a * np.cos(a.time) + a.time) / a.time,
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(
    ("made_by", "operation"),
    [(m, o) for m in MADE for o in OPERATORS if (m, o) != ("isnull", "in place")],  # NumPy casts no float to bool
)
def test_operators_mix_what_is_on_the_device_with_the_host(
    store: str,
    made_by: str,
    operation: str,
    chunks: Any,
    device_array: type,  # noqa: F811
) -> None:
    make, operate = MADE[made_by], OPERATORS[operation]
    result = operate(make(on_device(store, chunks=chunks)))
    assert_as_on_host(result, operate(make(on_host(store, chunks=chunks))), device_array)


def test_lazy_data_in_a_plain_variable_broadcasts(store: str, device_array: type) -> None:  # noqa: F811
    results = []
    for open_on in (on_device, on_host):
        dataset = open_on(store, cache=False)
        plain = xr.Variable(("time", "lat"), dataset.packed.variable._data)
        assert type(plain._data) is type(dataset.packed.variable._data)
        results.append(plain / dataset.t.variable)
    assert_as_on_host(*results, device_array)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_float32_reading_stays_float32(store: str, chunks: Any, device_array: type) -> None:  # noqa: F811
    half = xr.open_dataset(store, engine="gpuzarr", device="cuda", chunks=chunks, cf_float="float32").packed
    weights = np.cos(half.time).astype("float32")
    result = (half.fillna(np.float32(0)) * weights).compute()
    assert isinstance(result.data, device_array)
    assert result.dtype == "float32"
    np.testing.assert_allclose(result.as_numpy(), on_host(store).packed * weights, rtol=1e-6)


def test_datasets_opened_together_mix(store: str, tmp_path: Path, device_array: type) -> None:  # noqa: F811
    later = str(tmp_path / "later.zarr")
    on_host(store).assign_coords(time=[16.0, 17.0, 18.0, 19.0]).load().to_zarr(later, zarr_format=2, consolidated=True)
    together = [
        xr.open_mfdataset([store, later], engine=engine, combine_attrs="override", **device)
        for engine, device in (("gpuzarr", {"device": "cuda"}), ("zarr", {}))
    ]
    assert_as_on_host(*(ds.t * ds.time for ds in together), device_array)
    assert_as_on_host(*(ds.height - ds.t for ds in together), device_array)


@pytest.mark.usefixtures("device_array")
@pytest.mark.parametrize("chunks", CHUNKS)
def test_what_was_mixed_has_a_value_on_the_host(store: str, chunks: Any) -> None:
    means = [
        float((ds.t.fillna(np.float32(0)) * ds.time).mean())
        for ds in (on_device(store, chunks=chunks), on_host(store, chunks=chunks))
    ]
    assert means[0] == pytest.approx(means[1])


@pytest.mark.parametrize("made_by", ["the engine", "np.sqrt"])
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_all_numbers_mix(store: str, dtype: str, made_by: str, device_array: type) -> None:  # noqa: F811
    values = np.array([0, 1, 1, 2]).astype(dtype)
    datasets = on_device(store), on_host(store)
    for other in (xr.DataArray(values, dims="time"), xr.DataArray(dask.array.from_array(values, 2), dims="time")):
        for operate in (operator.add, operator.eq):
            assert_as_on_host(*(operate(MADE[made_by](ds), other) for ds in datasets), device_array)
            assert_as_on_host(*(operate(other, MADE[made_by](ds)) for ds in datasets), device_array)


class OwnArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A duck array that says it may have a dask graph, as pint's do, and has no name."""

    __dask_graph__ = None
    dtype, shape, ndim = np.dtype("f8"), (4,), 1

    def __init__(self, values: Any) -> None:
        self.host = values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        return OwnArray(getattr(ufunc, method)(*(x.host if isinstance(x, OwnArray) else x for x in inputs)))

    def __array_function__(self, *_: Any) -> Any:
        return NotImplemented


OTHERS: dict[str, Any] = {
    "times": xr.DataArray(np.array(["2001"] * 4, "M8[ns]"), dims="time"),
    "durations": xr.DataArray(np.array([1, 2, 3, 4], "m8[ns]"), dims="time"),
    "strings": xr.DataArray(list("abcd"), dims="time"),
    "objects": xr.DataArray(np.array([1.5, None, 2, 3], object), dims="time"),
    "nullable integers": xr.DataArray(pd.array([1, None, 2, 3], dtype="Int64"), dims="time"),
    "nullable index": xr.DataArray(xr.IndexVariable("time", pd.Index([1, 2, 3, 4], dtype="Int64"))),
    "array of others": xr.DataArray(OwnArray(np.arange(4.0)), dims="time"),
    "masked array": np.ma.masked_equal(np.arange(6.0), 3),
    "array of objects": np.array([1.5, None, 2, 3, 4, 5], object),
}


@pytest.mark.usefixtures("device_array")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("made_by", ["the engine", "np.sqrt"])
def test_what_is_no_number_is_left_to_xarray(
    store: str, monkeypatch: pytest.MonkeyPatch, name: str, made_by: str
) -> None:
    array, other = MADE[made_by](on_device(store).load()), OTHERS[name]
    monkeypatch.setattr(device_variable, "to_device", lambda _: pytest.fail("it was copied to the device"))
    with pytest.raises(TypeError):
        _ = array * other
    if isinstance(other, xr.DataArray):
        with pytest.raises(TypeError):
            _ = other * array


@pytest.mark.usefixtures("device_array")
def test_each_operand_is_read_once(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = on_device(store, cache=False)
    plain, zeros, read = np.sqrt(dataset.t), dask.array.zeros((4, 3)), []
    assert type(plain.variable) is xr.Variable
    getitem = GpuZarrBackendArray.__getitem__

    def noting(self: GpuZarrBackendArray, key: Any) -> Any:
        read.append(self.name)
        return getitem(self, key)

    monkeypatch.setattr(GpuZarrBackendArray, "__getitem__", noting)
    for operate, names in (
        (lambda: plain - dataset.packed, ["packed"]),
        (lambda: dataset.packed - plain, ["packed"]),
        (lambda: plain - dataset.height.variable, ["height"]),
        (lambda: dataset.height.variable - plain.variable, ["height"]),
        (lambda: xr.DataArray(dataset.t.variable) * dataset.packed.variable, ["t", "packed"]),
        (lambda: operator.iadd(plain.copy(), dataset.packed), ["packed"]),
        (lambda: operator.iadd(xr.Variable(("time", "lat"), zeros), dataset.packed.variable), ["packed"]),
    ):
        read.clear()
        operate()
        assert sorted(read) == sorted(names)


@pytest.mark.usefixtures("device_array")
def test_an_array_of_numpy_is_not_changed_in_place_by_the_device(store: str) -> None:
    dataset = on_device(store)
    total = xr.DataArray(np.ones((4, 3)), dims=("time", "lat"))
    part = total[1:]
    for value in (dataset.packed[1:], dataset.packed.astype("float64")[1:]):
        with pytest.raises(TypeError, match=r"write `a = a \* b` for `a \*= b`"):
            part += value
    np.testing.assert_array_equal(total, np.ones((4, 3)))
    time = dataset.time
    with pytest.raises(TypeError, match="immutable"):
        time += np.sqrt(dataset.time).gpuzarr.to_device()


def test_blocks_on_the_host_are_changed_in_place_by_the_device(store: str, device_array: type) -> None:  # noqa: F811
    results = []
    for open_on in (on_device, on_host):
        dataset = open_on(store, chunks={"time": 2})
        total = xr.zeros_like(dataset.t)
        before = total.variable
        total += dataset.t
        total += dataset.packed
        assert total.variable is before
        results.append(total)
    assert_as_on_host(*results, device_array)


class OwnVariable(xr.Variable):
    """A subclass of others'."""

    __slots__ = ()

    def _binary_op(self, other: Any, f: Any, reflexive: bool = False) -> Any:
        return "own", super()._binary_op(other, f, reflexive)


class CountingArray(xr.backends.BackendArray):
    """Lazy data of another engine, which counts how often it is read."""

    dtype, shape = np.dtype("f8"), (4,)
    n_read = 0

    def __getitem__(self, key: Any) -> Any:
        CountingArray.n_read += 1
        return np.arange(4.0)[key.tuple]


HOST: dict[str, Callable[[], Any]] = {
    "variable": lambda: xr.Variable("x", [1.0, 2.0, 3.0, 4.0], {"units": "m"}),
    "2-D variable": lambda: xr.Variable(("y", "x"), np.arange(8, dtype="f4").reshape(2, 4), {"units": "K"}),
    "index": lambda: xr.IndexVariable("x", [1, 2, 3, 4]),
    "own variable": lambda: OwnVariable("x", [1.0, 2.0, 3.0, 4.0]),
    "own array": lambda: xr.Variable("x", OwnArray(np.arange(4.0))),
    "lazy": lambda: xr.Variable("x", indexing.LazilyIndexedArray(CountingArray())),
    "dask": lambda: xr.Variable("x", dask.array.arange(4, chunks=2)),
    "times": lambda: xr.Variable("x", pd.date_range("2001", periods=4).values),
    "durations": lambda: xr.Variable("x", np.array([1, 2, 3, 4], "m8[ns]")),
    "strings": lambda: xr.Variable("x", list("abcd")),
    "nullable integers": lambda: xr.Variable("x", pd.array([1, None, 2, 3], dtype="Int64")),
    "NumPy array": lambda: np.array([4.0, 3.0, 2.0, 1.0]),
    "masked array": lambda: np.ma.masked_equal([4, 3, 2, 1], 3),
    "no dimension": lambda: np.array(2.0),
    "number": lambda: 2,
    "NumPy scalar": lambda: np.float32(2),
    "list": lambda: [1, 2, 3, 4],
    "array": lambda: xr.DataArray([1.0, 2.0, 3.0], {"x": [1, 2, 3]}, "x", "array"),
    "dataset": lambda: xr.Dataset({"v": ("x", [1.0, 2.0]), "s": ("x", ["a", "b"])}, {"x": [0, 1]})[["v"]],
    "tree": lambda: xr.DataTree(xr.Dataset({"v": ("x", [1.0, 2.0, 3.0, 4.0])})),
    "groups": lambda: xr.DataArray(np.arange(4.0), {"g": ("x", [0, 0, 1, 1])}, "x").groupby("g"),
    "none": lambda: None,
}
OPERATIONS = ["add", "sub", "mul", "eq", "lt", "and_", "iadd", "imul"]


def outcome(operation: str, one: str, other: str) -> tuple[Any, ...]:
    """What an operation gives, or its error; whether it gives the left operand; how often lazy operands are read."""
    operands = HOST[one](), HOST[other]()
    CountingArray.n_read = 0
    try:
        result = getattr(operator, operation)(*operands)
    except Exception as error:  # noqa: BLE001  # whatever it is
        result = (type(error), str(error))
    return result, result is operands[0], CountingArray.n_read


def assert_same(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    match result:
        case tuple():
            for items in zip(result, expected, strict=True):
                assert_same(*items)
        case xr.DataTree():
            assert_same(result.to_dataset(), expected.to_dataset())
        case xr.Dataset():
            assert list(result.variables) == list(expected.variables)
            assert_same(tuple(result.variables.values()), tuple(expected.variables.values()))
        case xr.DataArray():
            assert_same((result.name, result.variable), (expected.name, expected.variable))
            assert_same(result.coords.to_dataset(), expected.coords.to_dataset())
        case xr.Variable():
            assert (result.dims, result.attrs, result.dtype) == (expected.dims, expected.attrs, expected.dtype)
            assert type(result._data) is type(expected._data)
            assert_same(result.data, expected.data)
        case OwnArray():
            assert_same(result.host, expected.host)
        case pd.api.extensions.ExtensionArray():
            assert result.equals(expected)
        case _:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", HOST)
@pytest.mark.parametrize("one", HOST)
def test_where_nothing_is_on_the_device_nothing_changes(one: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(isinstance(HOST[name](), (xr.Variable, xr.DataArray, xr.Dataset)) for name in (one, other)):
        return
    for operation in OPERATIONS:
        result = outcome(operation, one, other)
        with monkeypatch.context() as patch:
            patch.setattr(xr.Variable, "_binary_op", device_variable._binary_op_of_xarray)
            patch.setattr(xr.Variable, "_inplace_binary_op", device_variable._inplace_binary_op_of_xarray)
            expected = outcome(operation, one, other)
        assert_same(result, expected)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_what_dask_cannot_try_beforehand_is_on_the_device_all_the_same(
    store: str,
    chunks: Any,
    device_array: type,  # noqa: F811
) -> None:
    dataset, expected = on_device(store, chunks=chunks), on_host(store, chunks=chunks)
    median, expected_median = dataset.t.median("time"), expected.t.median("time")
    assert median.to_dataset(name="median").gpuzarr.routes[-1].device == "cuda"
    assert_as_on_host(median * dataset.height[0], expected_median * expected.height[0], device_array)
    assert_as_on_host(dataset.height[0] - median, expected.height[0] - expected_median, device_array)
    for exit_ in (median.gpuzarr.to_host(), median.as_numpy()):
        assert type(exit_.compute().data) is np.ndarray
        np.testing.assert_allclose(exit_, expected_median, rtol=1e-6)
    assert float(median.max()) == pytest.approx(float(expected_median.max()))


def test_blocks_that_dask_takes_for_numpys_leave_the_device(store: str, device_array: type) -> None:  # noqa: F811
    dataset = on_device(store, chunks={"time": 2})
    doubled = dataset.t.map_blocks(lambda block: block * 2)
    assert isinstance(doubled.compute().data, device_array)
    on_the_host = doubled.gpuzarr.to_host()
    assert type(on_the_host.compute().data) is np.ndarray
    np.testing.assert_array_equal(on_the_host, on_host(store).t * 2)
    mixed = doubled.gpuzarr.to_device() * dataset.height
    assert isinstance(mixed.compute().data, device_array)
    np.testing.assert_allclose(mixed.as_numpy(), on_host(store).t * 2 * on_host(store).height, rtol=1e-6)


def test_importing_the_module_once_more_changes_nothing() -> None:
    script = (
        "import importlib, xarray, xgpuzarr.device_variable as module\n"
        "for _ in range(2):\n"
        "    importlib.reload(module)\n"
        "one = xarray.Variable('x', [1, 2])\n"
        "one += xarray.apply_ufunc(abs, one) + 1\n"
        "print(one.values.tolist())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "[3, 5]\n"


@pytest.mark.parametrize("chunks", CHUNKS)
def test_functions_without_a_module_reduce_too(store: str, chunks: Any, device_array: type) -> None:  # noqa: F811
    greatest = functools.partial(lambda values, axis: values.max(axis=axis))
    result = on_device(store, chunks=chunks).packed.reduce(greatest, "time")
    assert isinstance(result.compute().data, device_array)
    np.testing.assert_allclose(result.as_numpy(), on_host(store).packed.max("time"))


FUNCTIONS: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "where": lambda ds: ds.t.where(ds.time > 1),
    "where, 2-D": lambda ds: ds.t.where((ds.height > 0.5) & (ds.time > 1)),
    "where, another value": lambda ds: ds.t.where(ds.t > 3, ds.height),
    "where, dropping the rest": lambda ds: ds.t.where(ds.time > 1, drop=True),
    "where of a result": lambda ds: np.sqrt(ds.t).where(ds.height > 0.5),
    "where of a dataset": lambda ds: ds[["t", "packed"]].where(ds.height > 0.5).t,
    "xr.where": lambda ds: xr.where(ds.height > 0.5, ds.t, ds.packed),
    "fillna": lambda ds: ds.t.fillna(ds.height),
    "combine_first": lambda ds: ds.t.combine_first(ds.height),
    "clip": lambda ds: ds.t.clip(max=ds.height * 9),
    "NumPy's function": lambda ds: np.maximum(ds.t, ds.time),
    "NumPy's function, the index first": lambda ds: np.hypot(ds.time, ds.t),
    "NumPy's array first": lambda ds: np.arange(6.0) * ds.t,
    "apply_ufunc": lambda ds: xr.apply_ufunc(np.add, ds.t, ds.height, dask="allowed"),
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_several_operands_take_host_data(
    store: str,
    name: str,
    chunks: Any,
    device_array: type,  # noqa: F811
) -> None:
    expected = FUNCTIONS[name](on_host(store, chunks=chunks))
    assert_as_on_host(FUNCTIONS[name](on_device(store, chunks=chunks)), expected, device_array)


def test_functions_of_users_get_what_they_were_given(store: str, device_array: type) -> None:  # noqa: F811
    got: list[type] = []

    def note(*values: Any) -> Any:
        got.extend(map(type, values))
        return values[0]

    dataset = on_device(store)
    xr.apply_ufunc(note, dataset.t, dataset.time, np.ones(6))
    assert issubclass(got[0], device_array)
    assert got[1:] == [np.ndarray, np.ndarray]
    host = on_host(store)
    got.clear()
    xr.apply_ufunc(note, host.t, host.t)
    assert got == [np.ndarray, np.ndarray]
