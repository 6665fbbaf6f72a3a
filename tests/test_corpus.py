"""Is every array of real stores, written by other people's software, read as zarr-python reads it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr

import xgpuzarr
from tests import real_stores

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping
    from pathlib import Path

pytestmark = [
    # What zarr-python says of stores that are older, or newer, than the specification.
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
    pytest.mark.filterwarnings("ignore:Object at .* is not recognized"),
]


def numpy_keys(shape: tuple[int, ...]) -> Iterator[Any]:
    """Strided, reversed, integer, empty, fancy and boolean selections of an array, for `a[key]`."""
    yield ()
    yield (..., None)
    if not shape:
        return
    yield tuple(slice(None, None, 2) for _ in shape)
    yield tuple(slice(1, None, 3) for _ in shape)
    yield tuple(slice(None, None, -1) for _ in shape)
    yield tuple(slice(n // 3, n - n // 4) for n in shape)
    yield (..., slice(-1, None, -2))
    yield slice(0, 0)
    yield (..., slice(5, 2))
    if 0 in shape:
        return
    yield tuple(n // 2 for n in shape)
    yield -1
    yield (..., shape[-1] - 1)
    yield np.array([shape[0] - 1, 0, -1, shape[0] // 2])
    yield (..., np.array([[0, -1], [shape[-1] // 2, 0]]))
    yield np.array([], dtype=np.int64)
    yield np.arange(shape[0]) % 2 == 0
    yield np.indices(shape).sum(axis=0) % 3 == 1


def outer_keys(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Selections for `a.oindex[key]`: one array for each axis, and one integer among them."""
    yield tuple(np.array([n - 1, 0, n // 2]) for n in shape)
    yield tuple(np.arange(n) % 2 == 1 for n in shape)
    yield (0, *(np.array([n // 2, 0]) for n in shape[1:]))


def assert_same(actual: Any, expected: np.ndarray, what: object) -> None:
    """Compare values, shape and dtype; results are always in native byte order."""
    if hasattr(actual, "get"):
        actual = actual.get()
    assert actual.shape == expected.shape, what
    assert actual.dtype == (expected.dtype if expected.dtype.kind == "T" else expected.dtype.newbyteorder("=")), what
    assert real_stores.digest(actual) == real_stores.digest(expected), what


@pytest.mark.parametrize("record", real_stores.records(readable=True))
def test_reads_as_zarr_python(record: dict[str, Any], device: str) -> None:
    store, path = real_stores.place(record)
    options = {"path": path, "zarr_format": record["zarr_format"]}
    expected = np.asarray(zarr.open_array(store, mode="r", **options)[...])
    assert real_stores.digest(expected) == record["zarr_python"]["sha256"]

    array = xgpuzarr.open_array(store, device=device, **options)
    assert array.shape == expected.shape
    assert hasattr(array[...], "get") is (array.device == "cuda")
    assert_same(array[...], expected, "whole")
    for key in numpy_keys(expected.shape):
        assert_same(array[key], np.asarray(expected[key], dtype=expected.dtype), key)
    if 0 in expected.shape or not expected.shape:
        return
    for key in outer_keys(expected.shape):
        axes = [np.atleast_1d(np.arange(n)[k]) for n, k in zip(expected.shape, key, strict=True)]
        kept = tuple(slice(None) if np.ndim(k) else 0 for k in key)
        selected = np.asarray(expected[np.ix_(*axes)][kept], dtype=expected.dtype)
        assert_same(array.oindex[key], selected, ("outer", key))
    points = tuple(np.array([[n - 1, 0], [n // 2, -1]]) for n in expected.shape)
    assert_same(array.vindex[points], expected[points], ("points", points))


@pytest.mark.parametrize("record", real_stores.records(readable=False))
def test_unreadable_gives_the_witness_value_or_one_clear_error(record: dict[str, Any], device: str) -> None:
    store, path = real_stores.place(record)
    place = path or (record.get("array_dir") or record["zip"]).rsplit("/", 1)[-1]
    # What a store of another package raises stays what it is; its notes name the key.
    own_errors = (pytest.importorskip("icechunk").IcechunkError,) if record["store_kind"] == "icechunk" else ()
    try:
        values = xgpuzarr.open_array(store, path=path, zarr_format=record["zarr_format"], device=device)[...]
    except (xgpuzarr.XGpuZarrError, FileNotFoundError, *own_errors) as error:
        assert place in "".join([str(error), *getattr(error, "__notes__", [])])  # noqa: PT017  # either outcome is right
        return
    witness = record.get("ground_truth") or record.get("tensorstore") or {}
    if "sha256" in witness and not witness.get("lossy_codec"):
        assert real_stores.digest(values) == witness["sha256"]
    else:  # a codec that this environment has, and the one that made the corpus had not
        expected = zarr.open_array(store, path=path, mode="r", zarr_format=record["zarr_format"])[...]
        assert_same(values, np.asarray(expected), "whole")


def xarray_keys(sizes: Mapping[Hashable, int]) -> Iterator[dict[Hashable, Any]]:
    """Strided, reversed, integer, empty, outer and pointwise selections of a variable, for `v.isel(key)`."""
    yield {dim: slice(None, None, 2) for dim in sizes}
    yield {dim: slice(None, None, -1) for dim in sizes}
    yield {dim: slice(n, None) for dim, n in sizes.items()}
    yield {dim: n // 2 for dim, n in sizes.items()}
    yield {dim: [n - 1, 0, n // 2] for dim, n in sizes.items()}
    yield {dim: xr.Variable("points", [n - 1, 0, n // 2]) for dim, n in sizes.items()}


def plain(array: xr.DataArray) -> xr.Variable:
    """Give a variable of xarray's own class, in host memory: the engine's device variables are of another."""
    variable = array.variable.as_numpy()
    return xr.Variable(variable.dims, variable.data, variable.attrs, variable.encoding, fastpath=True)


@pytest.mark.parametrize("record", real_stores.records(readable=True))
def test_opens_as_engine_zarr(record: dict[str, Any], device: str, tmp_path: Path) -> None:
    group = real_stores.copy_into_group(record, tmp_path / "group.zarr")
    options = {"consolidated": False, "zarr_format": record["zarr_format"]}
    for decode_cf in (False, True):
        options["decode_cf"] = decode_cf
        expected = plain(xr.open_dataset(group, engine="zarr", **options)["v"])
        actual = plain(xr.open_dataset(group, engine="gpuzarr", device=device, **options)["v"])
        xr.testing.assert_identical(actual, expected)
        assert actual.encoding.keys() == expected.encoding.keys()
        assert_same(actual.to_numpy(), expected.to_numpy(), "whole")
        if not decode_cf:
            assert real_stores.digest(actual.to_numpy()) == record["zarr_python"]["sha256"]
        if expected.dtype.names:
            return  # xarray decodes no structured dtypes
    for key in xarray_keys(expected.sizes) if 0 not in expected.shape else ():
        lazy = xr.open_dataset(group, engine="gpuzarr", device=device, **options)["v"].variable
        assert_same(lazy.isel(key).to_numpy(), expected.isel(key).to_numpy(), key)
