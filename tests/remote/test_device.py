"""Reads of stores to the device, on both routes; without a device, on the stand-in of `tests.host_device`."""

from __future__ import annotations

import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from zarr.storage import FsspecStore

import xgpuzarr
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from tests.remote.conftest import GROUPS, VALUES, on_host
from tests.remote.test_requests import asked
from xgpuzarr.errors import ChunkReadError
from xgpuzarr.locate import locate
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if request.param == "host":
        request.getfixturevalue("host_device")


@pytest.fixture(params=["one wave", "waves of a chunk"])
def _waves(request: pytest.FixtureRequest, _device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut reads of these small arrays into waves as if they were large."""
    if request.param != "one wave":
        monkeypatch.setattr("xgpuzarr.waves.MIN_WAVE_DECODED_NBYTES", 1)
        monkeypatch.setattr("xgpuzarr.waves.MAX_STORE_WAVE_DECODED_NBYTES", 1)


def check(store: Any, name: str, **options: Any) -> None:
    array = xgpuzarr.open_array(store, path=name, device="cuda", options=ReadOptions(**options))
    for key in (..., np.s_[3], np.s_[::-5, 12:25, ::7]):
        expected = np.where(np.arange(24)[:, None, None] < 16, VALUES, 7)[key]
        np.testing.assert_array_equal(on_host(array[key]), expected)


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("name", GROUPS["v3"])
@pytest.mark.parametrize("route", ["device", "host"])
def test_http(http_store: Store, route: str, name: str) -> None:
    check(http_store, name, route=route)


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", GROUPS["v3"])
def test_zip(folder: Path, tmp_path: Path, name: str, compression: int) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w", compression) as archive:
        for file in (folder / "v3").rglob("*"):
            archive.write(file, file.relative_to(folder / "v3"))
    check(tmp_path / "s.zip", name)


@pytest.mark.parametrize("route", ["device", "host"])
@pytest.mark.parametrize(
    ("name", "key", "options"),
    [
        ("chunks", np.s_[3:9, ::2], {}),
        ("plain", ..., {}),
        ("shards", ..., {}),
        ("shards", np.s_[0, ::39], {"max_remote_gap_bytes": 0, "max_gap_bytes": 1 << 20}),
        ("shards", np.s_[0, ::39], {"max_remote_gap_bytes": 1 << 20, "max_gap_bytes": 0}),
        ("shards", np.s_[:8], {"max_read_bytes": 8000}),
    ],
)
def test_requests_are_those_of_a_read_to_the_host(
    server: RangeServer, http_store: Store, route: str, name: str, key: Any, options: dict[str, Any]
) -> None:
    expected = asked(server, http_store, name, key, "cpu", **options)
    assert asked(server, http_store, name, key, "cuda", route=route, **options) == expected


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("route", ["device", "host"])
@pytest.mark.parametrize(("name", "concurrency"), [("plain", 3), ("shards", 2)])
def test_requests_are_in_flight_whatever_the_waves(
    server: RangeServer, http_store: Store, route: str, name: str, concurrency: int
) -> None:
    options = ReadOptions(route=route, concurrency=concurrency, n_threads=2, max_read_bytes=4000)
    array = xgpuzarr.open_array(http_store, path=name, device="cuda", options=options)
    server.reset(gather=concurrency)
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    assert server.seen.most_in_flight == concurrency


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("fault", ["fail", "cut"])
@pytest.mark.parametrize("route", ["device", "host"])
@pytest.mark.parametrize("name", ["chunks", "shards"])
def test_every_second_request_fails(server: RangeServer, http_store: Store, name: str, route: str, fault: str) -> None:
    array = xgpuzarr.open_array(http_store, path=name, device="cuda", options=ReadOptions(route=route))
    server.reset(fault, every=2)
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    assert server.failed


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("route", ["device", "host"])
@pytest.mark.parametrize(
    ("fault", "name", "pattern"),
    [
        ("forbid", "chunks", r"key 'chunks/c/\d/0/0' \(whole object\): .*403"),
        ("forbid", "shards", r"key 'shards/c/\d/0/0' \(last 260 bytes\): .*403"),
        ("stall", "chunks", r"key 'chunks/c/\d/0/0' \(whole object\): no answer within 0.5 s"),
    ],
)
def test_an_error_names_store_key_and_range_and_the_array_reads_on(
    server: RangeServer, http_store: Store, route: str, fault: str, name: str, pattern: str
) -> None:
    options = ReadOptions(route=route, timeout_s=0.5)
    array = xgpuzarr.open_array(http_store, path=name, device="cuda", options=options)
    server.reset(fault)
    with pytest.raises(ChunkReadError, match=rf"store .*127\.0\.0\.1.*{pattern}"):
        array[:]
    server.closing.set()
    server.reset()
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])


@pytest.mark.usefixtures("_waves")
def test_a_chunk_that_cannot_be_read_late_is_an_error(server: RangeServer, http_store: Store) -> None:
    """The waves before it have been queued by then."""
    options = ReadOptions(route="device", concurrency=1, n_retries=0)
    array = xgpuzarr.open_array(http_store, path="chunks", device="cuda", options=options)
    array[:]
    server.reset()
    server.forbidden = "v3/chunks/c/3/0/0"
    with pytest.raises(ChunkReadError, match=r"key 'chunks/c/3/0/0' \(whole object\): .*403"):
        array[:]
    assert [request.path for request in server.seen.requests] == [f"v3/chunks/c/{n}/0/0" for n in range(4)]
    server.reset()
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])


def test_a_shard_that_vanishes_is_no_fill_value(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "v3", tmp_path / "v3")
    store = FsspecStore.from_url(f"file://{tmp_path}/v3", read_only=True)
    array = xgpuzarr.open_array(store, path="shards", device="cuda", options=ReadOptions(route="device"))

    def locate_then_delete(*arguments: Any) -> Any:
        ranges = locate(*arguments)
        (tmp_path / "v3/shards/c/1/0/0").unlink()
        return ranges

    monkeypatch.setattr("xgpuzarr.waves.locate", locate_then_delete)
    with pytest.raises(ChunkReadError, match=r"key 'shards/c/1/0/0': object vanished"):
        array[:]


@pytest.mark.parametrize("name", GROUPS["v3"])
def test_a_wave_that_meets_too_little_memory_is_read_again_in_halves(
    server: RangeServer, http_store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import cupy

    from xgpuzarr import execute_device

    class Wave(execute_device.Wave):
        def start(self) -> None:
            if len(self.fetched.rows) > 1:
                raise cupy.cuda.memory.OutOfMemoryError(1, 1)
            super().start()

    monkeypatch.setattr(execute_device, "Wave", Wave)
    check(http_store, name, route="device")
    assert server.seen.requests
