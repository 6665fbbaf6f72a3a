"""Do the operations that people use give the CPU's answer, where the table in `tests/operations.py` says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib import pyplot as plt

from tests.operations import DEVICE, ENCODING, HOST, OPERATIONS, Operation, carry_out, dataset, page

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOT = Path(__file__).parents[1]

CHUNKS = {"time": 12}

pytestmark = pytest.mark.filterwarnings(
    # flox, xarray and netCDF4 on the host too
    "ignore:endian-ness of dtype and endian kwarg do not match:UserWarning",
    "ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning",
    "ignore:Treating an array-like object that is not:pandas.errors.Pandas4Warning",
)

CASES = [
    pytest.param(operation, chunked, id=f"{operation.name}-{'dask' if chunked else 'lazy'}")
    for rows in OPERATIONS.values()
    for operation in rows
    for chunked in (False, True)
    if operation.outcome(chunked=chunked)
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("operations") / "months.zarr")
    dataset().to_zarr(path, encoding=ENCODING, zarr_format=2)
    return path


@pytest.fixture(autouse=True)
def _own_surroundings() -> Generator[None]:
    """Show figures on no screen, and put options back to what they were."""
    with mpl.rc_context({"backend": "agg"}), xr.set_options(use_flox=True):
        yield
    plt.close("all")


@pytest.fixture
def carry_out_on(
    store: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Open the store and carry out code on it, in an empty folder and on no figure."""

    def carry_out_on(code: str, **how: Any) -> Any:
        monkeypatch.chdir(tmp_path_factory.mktemp("files"))
        plt.close("all")
        return carry_out(code, xr.open_dataset(store, **how))

    return carry_out_on


@pytest.mark.parametrize(("operation", "chunked"), CASES)
def test_operation(operation: Operation, chunked: bool, device: str, carry_out_on: Callable[..., Any]) -> None:
    chunks = CHUNKS if chunked else None
    here = {"engine": "gpuzarr", "device": device, "chunks": chunks}
    expected = carry_out_on(operation.code, engine="zarr", chunks=chunks)
    if device == "cpu":
        assert_same(carry_out_on(operation.code, **here), expected, exactly=True)
        if operation.exit:
            assert_same(carry_out_on(operation.exit, **here), expected, exactly=False)
        return
    observed, result = observe(lambda: carry_out_on(operation.code, **here))
    if observed in (DEVICE, HOST):
        assert_same(result, expected, exactly=False)
    outcome = operation.outcome(chunked=chunked)
    assert observed == outcome, f"{operation.code}: observed {observed!r}, the table says {outcome!r}: {result!r}"
    if outcome not in (DEVICE, HOST):
        assert_same(carry_out_on(operation.exit, **here), expected, exactly=False)


def observe(carried_out: Callable[[], Any]) -> tuple[str, Any]:
    """Where the result is, and the result; or the name of the error, and the error."""
    try:
        result = carried_out()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__, error
    numbers = [v.data for v in data_variables(result) if v.dtype.kind in "biufc"]
    return DEVICE if numbers and not any(isinstance(data, np.ndarray) for data in numbers) else HOST, result


def data_variables(result: Any) -> list[xr.Variable]:
    """What holds the values of a result, without its coordinates."""
    if isinstance(result, xr.Dataset):
        return [result[name].variable for name in result.data_vars]
    return [result.variable] if isinstance(result, xr.DataArray) else []


def assert_same(result: Any, expected: Any, *, exactly: bool) -> None:
    """Compare names, dimensions, attributes, dtypes and values; values bit by bit, or as far as the dtype goes."""
    result, expected = as_dataset(result).gpuzarr.to_host(), as_dataset(expected)
    if exactly:
        xr.testing.assert_identical(result, expected)
    assert set(result.variables) == set(expected.variables)
    assert result.attrs == expected.attrs
    for name, variable in expected.variables.items():
        values = result.variables[name]
        assert (values.dims, values.dtype, values.attrs) == (variable.dims, variable.dtype, variable.attrs), name
        if not exactly:
            assert_close(values.values, variable.values)


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    """A device sums in another order: values differ in the last digits of the largest of them."""
    if expected.dtype.kind not in "fc":
        np.testing.assert_array_equal(result, expected)
        return
    rtol = 32 * float(np.finfo(expected.dtype).eps)
    finite = np.abs(expected[np.isfinite(expected)])
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol * float(finite.max(initial=0.0)))


def as_dataset(result: Any) -> xr.Dataset:
    """Whatever an operation gives, as a dataset to compare."""
    if isinstance(result, (pd.DataFrame, pd.Series)):
        result = result.to_xarray()
    if isinstance(result, xr.DataArray):
        return result.to_dataset(name="values" if result.name is None else result.name)
    if isinstance(result, xr.Dataset):
        return result
    values = np.asarray(result)
    return xr.Dataset({"values": (tuple(f"axis {i}" for i in range(values.ndim)), values)})


def test_there_is_a_row_for_what_people_do() -> None:
    rows = [operation for group in OPERATIONS.values() for operation in group]
    assert len(rows) == len({row.name for row in rows}) >= 60


def test_rows_with_an_error_have_an_exit() -> None:
    for rows in OPERATIONS.values():
        for row in rows:
            fails = {row.lazy, row.dask} - {DEVICE, HOST, ""}
            assert bool(fails) == bool(row.exit), row.name


def test_the_page_is_what_the_generator_writes() -> None:
    assert (ROOT / "docs/operations.md").read_text() == page()
