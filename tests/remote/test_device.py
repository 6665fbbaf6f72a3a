"""Reads of stores to the device, on both routes; without a device, on the stand-in of `tests.host_device`."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xgpuzarr
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from tests.remote.conftest import GROUPS, VALUES, on_host
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if request.param == "host":
        request.getfixturevalue("host_device")


def check(store: Any, name: str, **options: Any) -> None:
    array = xgpuzarr.open_array(store, path=name, device="cuda", options=ReadOptions(**options))
    for key in (..., np.s_[3], np.s_[::-5, 12:25, ::7]):
        expected = np.where(np.arange(24)[:, None, None] < 16, VALUES, 7)[key]
        np.testing.assert_array_equal(on_host(array[key]), expected)


@pytest.mark.parametrize("name", GROUPS["v3"])
@pytest.mark.parametrize("route", ["device", "host"])
def test_http(http_store: Store, route: str, name: str) -> None:
    check(http_store, name, route=route)


@pytest.mark.parametrize("name", GROUPS["v3"])
def test_zip(folder: Path, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for file in (folder / "v3").rglob("*"):
            archive.write(file, file.relative_to(folder / "v3"))
    check(tmp_path / "s.zip", name)


@pytest.mark.parametrize("fault", ["fail", "cut"])
@pytest.mark.parametrize("route", ["device", "host"])
def test_every_second_request_fails(server: RangeServer, http_store: Store, route: str, fault: str) -> None:
    array = xgpuzarr.open_array(http_store, path="shards", device="cuda", options=ReadOptions(route=route))
    server.reset(fault, every=2)
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    assert server.failed
