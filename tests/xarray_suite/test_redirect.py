"""Do xarray's tests really read through this package's engine?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr
from xarray.backends import api
from xarray.tests import test_backends, test_backends_datatree

from tests.xarray_suite.redirect import ENGINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.xarray_suite.redirect import Redirection

pytestmark = pytest.mark.skipif(ENGINE == "zarr", reason="the baseline is not redirected")


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "store.zarr")
    xr.Dataset({"v": ("x", np.arange(6.0))}).to_zarr(path)
    return path


@pytest.mark.parametrize(
    "opener",
    [
        xr.open_zarr,
        lambda store: xr.open_dataset(store),  # noqa: PLW0108  # looked up when called
        lambda store: xr.open_dataset(store, engine="zarr"),
        lambda store: xr.load_dataset(store, engine="zarr"),
        lambda store: xr.open_dataarray(store, engine="zarr"),
        lambda store: xr.load_dataarray(store, engine="zarr"),
        lambda store: xr.open_mfdataset([store], engine="zarr"),
        lambda store: xr.open_datatree(store, engine="zarr"),
        lambda store: xr.load_datatree(store, engine="zarr"),
        lambda store: xr.open_groups(store, engine="zarr")["/"],
        lambda store: test_backends.open_dataset(store, engine="zarr"),
        lambda store: test_backends_datatree.open_datatree(store, engine="zarr"),
    ],
)
def test_every_zarr_opening_is_redirected(
    opener: Callable[[str], xr.Dataset], store: str, redirection: Redirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get_backend = api.plugins.get_backend
    monkeypatch.setattr(api.plugins, "get_backend", lambda engine: asked.append(engine) or get_backend(engine))
    opened = opener(store)
    assert redirection.n_opened == 1
    assert asked == [ENGINE]
    values = opened if isinstance(opened, xr.DataArray) else opened["v"]
    np.testing.assert_array_equal(values, np.arange(6.0))


def test_engine_zarr_itself_is_refused(redirection: Redirection) -> None:
    assert redirection.n_opened == 0
    with pytest.raises(AssertionError, match="past the redirection"):
        api.plugins.get_backend("zarr")
