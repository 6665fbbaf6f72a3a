"""CF decoding against xarray's, bit for bit, over what stored dtypes and attributes can combine to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import MemoryStore

from tests.fake_device import device_array, fake_device  # noqa: F401  # fixtures
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from xgpuzarr import cf

STORED = ["bool", "i1", "u1", *(order + name for name in ("i2", "u2", "i4", "u4", "i8", "u8") for order in "<>")]
STORED += ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c16"]
FILLS = [
    {},
    {"_FillValue": 7},
    {"missing_value": 7},
    {"missing_value": [7, 8]},
    {"_FillValue": 7, "missing_value": [8, 9.5]},
    {"_FillValue": float("nan")},
    {"_FillValue": 7, "missing_value": float("nan")},
    {"missing_value": 300},
    {"_FillValue": 0.0},
    {"missing_value": 1e-40},
]
SCALES = [
    {},
    {"scale_factor": 0.1},
    {"add_offset": 0.3},
    {"scale_factor": 0.1, "add_offset": 273.15},
    {"scale_factor": 2},
    {"add_offset": 3},
    {"scale_factor": 2, "add_offset": 0.5},
    {"scale_factor": [0.1]},
]
MEANINGS = [{"_Unsigned": "true"}, {"_Unsigned": "false"}, {"dtype": "bool"}, {"units": "days"}]
ATTRIBUTES = [fill | scale for fill, scale in itertools.product(FILLS, SCALES)]
ATTRIBUTES += [fill | scale | meaning for fill, scale, meaning in itertools.product(FILLS, SCALES[:2], MEANINGS)]
NAMES = [f"v{number}" for number in range(len(ATTRIBUTES))]

pytestmark = pytest.mark.filterwarnings(
    "ignore::xarray.SerializationWarning",
    "ignore:invalid value encountered in cast:RuntimeWarning",
    "ignore:overflow encountered in cast:RuntimeWarning",
    "ignore:Casting complex values to real:numpy.exceptions.ComplexWarning",
)


def values(dtype: np.dtype[Any]) -> np.ndarray:
    """Small numbers, the fill values among them, and the ends of the dtype's range."""
    small = np.arange(-4, 12).astype(dtype)
    if dtype.kind == "b":
        return small
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        ends = [limits.min, limits.min + 1, limits.max // 3, limits.max - 1, limits.max]
    else:
        limits = np.finfo(dtype)
        subnormal = [limits.smallest_subnormal, -limits.smallest_subnormal, limits.tiny / 3]
        ends = [limits.min, limits.tiny, *subnormal, 0.0, -0.0, np.inf, -np.inf, np.nan, limits.max]
    return np.concatenate([small, np.array(ends, dtype)])


def write(stored: str, zarr_format: int) -> MemoryStore:
    """Store one variable a set of attributes; for Zarr v2, ``_FillValue`` is the array's own fill value."""
    store = MemoryStore()
    group = zarr.create_group(store, zarr_format=zarr_format)
    dtype = np.dtype(stored)
    for name, attributes in zip(NAMES, map(dict, ATTRIBUTES), strict=True):
        options: dict[str, Any] = {}
        if zarr_format == 2:
            attributes["_ARRAY_DIMENSIONS"] = ["x"]
            options["fill_value"] = attributes.pop("_FillValue", None)
            if options["fill_value"] is not None and dtype.kind in "iub" and np.isnan(options["fill_value"]):
                options["fill_value"] = None
        else:
            options["dimension_names"] = ["x"]
            if "_FillValue" in attributes:
                attributes["_FillValue"] = encoded_fill_value(attributes["_FillValue"], dtype)
        array = group.create_array(name, shape=values(dtype).shape, dtype=dtype, attributes=attributes, **options)
        array[:] = values(dtype)
    return store


def encoded_fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """The attribute as xarray writes it with Zarr v3."""
    from xarray.backends.zarr import FillValueCoder

    if dtype.kind in "iub" and np.isnan(value):
        value = 7
    return FillValueCoder.encode(dtype.type(value).item(), dtype)


def opened(store: MemoryStore, **kwargs: Any) -> dict[str, xr.Variable | type[Exception]]:
    """Every variable decoded, or the kind of error that decoding gives at once."""
    try:
        return dict(xr.open_dataset(store, consolidated=False, **kwargs).variables)
    except Exception:  # noqa: BLE001  # one of them is bad: find out which
        found: dict[str, xr.Variable | type[Exception]] = {}
        for name in NAMES:
            others = [other for other in NAMES if other != name]
            try:
                dataset = xr.open_dataset(store, consolidated=False, drop_variables=others, **kwargs)
                found[name] = dataset.variables[name]
            except Exception as error:  # noqa: BLE001
                found[name] = type(error)
        return found


def read(variable: xr.Variable) -> np.ndarray | type[Exception]:
    """The values, or the kind of error that they give; NumPy may warn of them, the device does not."""
    try:
        with np.errstate(all="ignore"):
            return variable.to_numpy()
    except Exception as error:  # noqa: BLE001
        return type(error)


def assert_bits(actual: Any, expected: Any, name: str) -> None:
    """The same bits, where NaN has but one: what a NaN carries depends on the machine."""
    if isinstance(expected, type):
        assert actual is expected, name
        return
    assert actual.dtype == expected.dtype, name
    if expected.dtype == object:
        assert repr(actual) == repr(expected), name
        return
    if expected.dtype.kind in "fc":
        real = expected.real.dtype
        actual, expected = actual.view(real), expected.view(real)
        assert np.array_equal(np.isnan(actual), np.isnan(expected)), name
        actual, expected = (np.where(np.isnan(a), np.nan, a) for a in (actual, expected))
    assert actual.tobytes() == expected.tobytes(), (name, actual, expected)


@functools.cache
def reference(stored: str, zarr_format: int) -> tuple[MemoryStore, dict[str, Any], dict[str, Any]]:
    """A store, and its variables and their values as xarray decodes them."""
    store = write(stored, zarr_format)
    variables = opened(store, engine="zarr")
    return store, variables, {name: read(v) for name, v in variables.items() if not isinstance(v, type)}


def belongs_on_device(stored: np.dtype[Any], attributes: dict[str, Any]) -> bool:
    """Whether there is no excuse: numbers that decode to floats."""
    if attributes.keys() & {"units", "dtype"}:
        return False
    if stored.kind in "bc":
        return not attributes
    return all(isinstance(attributes.get(name, 0.0), float) for name in ("scale_factor", "add_offset"))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("device", ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parity(stored: str, zarr_format: int, device: str, request: pytest.FixtureRequest) -> None:
    if device == "fake":
        request.getfixturevalue("fake_device")
    store, expected, values_expected = reference(stored, zarr_format)
    actual = opened(store, engine="gpuzarr", device="cpu" if device == "cpu" else "cuda")
    assert set(actual) == set(expected) == set(NAMES)
    for name, attributes in zip(NAMES, ATTRIBUTES, strict=True):
        got, wanted = actual[name], expected[name]
        if isinstance(wanted, type):
            assert got is wanted, attributes
            continue
        assert got.dtype == wanted.dtype, attributes
        assert repr(got.attrs) == repr(wanted.attrs), attributes
        assert repr(got.encoding) == repr(wanted.encoding), attributes
        if device != "cpu" and belongs_on_device(np.dtype(stored), attributes):
            assert not isinstance(got.data, np.ndarray), attributes
        assert_bits(read(got), values_expected[name], str(attributes))


F4, F8, I2, I4 = map(np.dtype, ("f4", "f8", "i2", "i4"))


def test_each_step_rounds_on_its_own_and_leaves_the_stored_values_alone() -> None:
    stored = np.array([1, 2, 3, 32767], I2)
    steps = (cf.Mask(F8, (np.int16(2), 3), np.nan), cf.Scale(F8, 0.1, 273.15))
    np.testing.assert_array_equal(cf.decode(stored, steps), [1 * 0.1 + 273.15, np.nan, np.nan, 32767 * 0.1 + 273.15])
    np.testing.assert_array_equal(stored, np.array([1, 2, 3, 32767], I2))
    assert cf.decode(stored, ()) is stored


def test_a_fill_value_keeps_its_own_precision_if_it_has_one() -> None:
    """A Python float is taken for a float32, as NumPy takes it; a NumPy float64 is not equal to its neighbour."""
    stored = np.array([0.1, 0.2], F4)
    assert np.isnan(cf.decode(stored, (cf.Mask(F4, (0.1,), np.nan),))).tolist() == [True, False]
    assert np.isnan(cf.decode(stored, (cf.Mask(F4, (np.float64(0.1),), np.nan),))).tolist() == [False, False]


SUBNORMAL = np.array([[1e-45, -1e-45, 1e-40], [1.1754942e-38, 1.1754944e-38, 2e-38], [0.0, -0.0, 1.0]], F4)


@pytest.fixture(params=["host_device", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """CuPy, or what flushes subnormal float32 as CuPy does."""
    if request.param == "host_device":
        return request.getfixturevalue("host_device")
    return pytest.importorskip(request.param)


@pytest.mark.parametrize(
    "steps",
    [
        [cf.Mask(F4, (0.0,), np.nan)],
        [cf.Mask(F4, (np.float64(0.0),), np.nan)],
        [cf.Mask(F4, (1e-40,), np.nan)],
        [cf.Mask(F4, (np.float64(1e-40), np.float64(np.float32(1e-40))), np.nan)],
        [cf.Mask(F8, (0.0,), np.nan)],
        [cf.Mask(np.dtype("c8"), (0.0,), np.nan)],
        [cf.Scale(F4, 0.3, None)],
        [cf.Scale(F4, None, -1e-40)],
        [cf.Scale(F4, 1e-20, 3e-39)],
        [cf.Scale(F8, 3.0, 1e-40)],
        [cf.Mask(F4, (0.0,), np.nan), cf.Scale(F4, 0.7, 1e-39)],
        [cf.Cast(np.dtype(bool))],
    ],
)
def test_subnormal_float32_is_no_zero_on_the_device(xp: Any, steps: list[cf.Step]) -> None:
    for stored in (SUBNORMAL, SUBNORMAL.T, SUBNORMAL[1:2, 1].reshape(())):
        given = stored.astype("c8" if steps[0].dtype.kind == "c" else "f4")
        expected = cf.decode(given, steps)
        on_device = xp.asarray(given.T.copy()).T  # in the order of `given`
        found = cf.decode(on_device, steps)
        found = found.get() if hasattr(found, "get") else found  # NumPy makes a scalar of an array without axes
        assert_bits(found.flatten(), expected.flatten(), "")
        assert_bits(on_device.get().flatten(), given.flatten(), "")


@pytest.mark.parametrize(
    ("stored", "step", "reason"),
    [
        (I2, cf.Mask(F4, (1,), np.nan), ""),
        (I2, cf.Mask(F4, ("1",), np.nan), "not all numbers"),
        (I2, cf.Mask(np.dtype("i8"), (1,), np.nan), "int64 has no NaN"),
        (np.dtype("?"), cf.Mask(np.dtype(object), (1,), np.nan), "object has no NaN"),
        (I2, cf.Scale(F8, 0.1, None), ""),
        (I2, cf.Scale(F4, 0.1, 1), ""),
        (I2, cf.Scale(np.dtype("i8"), 0.1, None), "0.1 does not scale values of dtype int64"),
        (I2, cf.Scale(F8, "0.1", None), "'0.1' does not scale values of dtype float64"),
        (np.dtype("c8"), cf.Scale(np.dtype("c8"), 2.0, None), "complex values are scaled on the host"),
        (F4, cf.Scale(np.dtype("i8"), 2, None), "converting float32 to int64 is not the same on every machine"),
        (np.dtype("U3"), cf.Scale(np.dtype("U3"), 2, None), "the device has no <U3 dtype"),
        (np.dtypes.StringDType(), cf.Scale(np.dtypes.StringDType(), 2.0, 1), "the device has no StringDType() dtype"),
        (I2, cf.Cast(np.dtype("u2")), ""),
        (F4, cf.Cast(np.dtype(bool)), ""),
        (np.dtype("M8[s]"), cf.Cast(np.dtype("i8")), "the device has no datetime64[s] dtype"),
        (
            np.dtype("c8"),
            cf.Mask(np.dtype("c16"), (1,), np.nan),
            "converting complex64 to complex128 is left to the host",
        ),
        (np.dtype("c8"), cf.Mask(np.dtype("c8"), (1,), np.nan), ""),
    ],
)
def test_steps_that_the_host_keeps_say_why(stored: np.dtype[Any], step: cf.Step, reason: str) -> None:
    found = cf.host_reason(stored, (step,))
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_reason_looks_at_each_step_s_own_input() -> None:
    to_int = cf.Scale(np.dtype("i8"), 2, None)
    assert cf.host_reason(I2, (to_int,)) == ""
    assert "float32 to int64" in cf.host_reason(I2, (cf.Mask(F4, (1,), np.nan), to_int))


@pytest.mark.parametrize("stored", ["i1", "u2", "f2", "f4"])
def test_float32_takes_what_it_holds_exactly(stored: str) -> None:
    steps = (cf.Mask(F8, (1,), np.nan), cf.Scale(F8, 0.1, None))
    assert [step.dtype for step in cf.in_float32(np.dtype(stored), steps)] == [F4, F4]


@pytest.mark.parametrize("stored", ["i4", "u4", "i8", "f8", "c8"])
def test_float32_leaves_what_it_would_round(stored: str) -> None:
    steps = (cf.Mask(F8, (1,), np.nan), cf.Scale(F8, 0.1, None))
    assert cf.in_float32(np.dtype(stored), steps) is steps


@pytest.mark.parametrize(
    ("stored", "factor", "offset"),
    [
        ("u1", 1e39, None),
        ("u1", 1e37, None),
        ("i2", None, -1e39),
        ("i2", 1e34, 3e38),
        ("u1", 1e-39, None),
        ("u1", None, 1e-39),
        ("f2", 1e34, None),
        ("f4", 1.5, None),
        ("i2", float("inf"), None),
    ],
)
def test_float32_leaves_what_may_be_outside_its_range(stored: str, factor: float | None, offset: float | None) -> None:
    steps = (cf.Mask(F8, (np.float64(1e300),), np.nan), cf.Scale(F8, factor, offset))
    assert cf.in_float32(np.dtype(stored), steps) is steps


@pytest.mark.parametrize(
    ("stored", "factor", "offset"),
    [("u1", 1e36, None), ("i2", -1e33, 2e38), ("u1", 1e-37, 0.0), ("f2", 1e33, -1e30), ("f4", -1, 273.15)],
)
def test_float32_takes_what_stays_inside_its_range(stored: str, factor: float | None, offset: float | None) -> None:
    (step,) = cf.in_float32(np.dtype(stored), (cf.Scale(F8, factor, offset),))
    limits = np.iinfo(stored) if np.dtype(stored).kind in "iu" else np.finfo(stored)
    with np.errstate(all="raise"):
        ends = step.apply(np.array([limits.min, 0, limits.max], stored))
    assert ends.dtype == F4
    assert np.isfinite(ends).all()
    expected = cf.Scale(F8, factor, offset).apply(np.array([limits.min, 0, limits.max], stored))
    np.testing.assert_allclose(ends, expected, rtol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("device_array")
def test_strings_that_claim_to_be_scaled_keep_no_other_variable_from_opening(device: str) -> None:
    store = MemoryStore()
    group = zarr.create_group(store)
    group.create_array(
        "label",
        data=np.array(["a", "b"]),
        attributes={"scale_factor": 2, "missing_value": float("nan")},
        dimension_names=["x"],
    )
    group.create_array("number", shape=(2,), dtype="f4", fill_value=1, dimension_names=["x"])
    expected = xr.open_dataset(store, engine="zarr", consolidated=False)
    actual = xr.open_dataset(store, engine="gpuzarr", device=device, consolidated=False)
    assert {name: v.dtype for name, v in actual.items()} == {name: v.dtype for name, v in expected.items()}
    assert read(actual.number.variable).tolist() == [1.0, 1.0]
    assert_bits(read(actual.label.variable), read(expected.label.variable), "label")
