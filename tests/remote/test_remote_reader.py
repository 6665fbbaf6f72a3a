"""Shards read by KvikIO where the store's client would read the same; without a device, on stand-ins for both."""

from __future__ import annotations

import pickle
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import s3fs
import xarray as xr
from obstore.store import S3Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

import xgpuzarr
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from tests.remote import plain_remote_file
from tests.remote.conftest import S3, VALUES, fsspec_store, on_host
from xgpuzarr import diagnostics
from xgpuzarr.dask_arrays import to_dask
from xgpuzarr.errors import ChunkReadError, UnsupportedError
from xgpuzarr.locate import locate
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "host":
        request.getfixturevalue("host_device")
        with plain_remote_file.installed(monkeypatch):
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _same_random_bytes(_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same numbers in every run: one in 256 is equal to what a request brings, and makes one more request."""
    from xgpuzarr.readers import remote

    monkeypatch.setattr(remote, "_random_bytes", lambda shape: np.random.default_rng(0).integers(0, 256, shape, "u1"))


@pytest.fixture(params=["one wave", "waves of a chunk"])
def _waves(request: pytest.FixtureRequest, _device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut reads of these small arrays into waves as if they were large."""
    if request.param != "one wave":
        monkeypatch.setattr("xgpuzarr.waves.MIN_WAVE_DECODED_NBYTES", 1)
        monkeypatch.setattr("xgpuzarr.waves.MAX_STORE_WAVE_DECODED_NBYTES", 1)


def opened(store: Any, **options: Any) -> xgpuzarr.ZarrArray:
    options = ReadOptions(**{"route": "device", "remote_reader": "kvikio", **options})
    return xgpuzarr.open_array(store, path="shards", device="cuda", options=options)


def read(array: xgpuzarr.ZarrArray, key: Any = ...) -> diagnostics.ReadReport:
    """Look at the values of a selection; what the read says of itself."""
    with diagnostics.collect() as reports:
        got = on_host(array[key])
    np.testing.assert_array_equal(got, np.where(np.arange(24)[:, None, None] < 16, VALUES, 7)[key])
    return diagnostics.total(reports)


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("key", [..., np.s_[3], np.s_[::-5, 12:25, ::7], np.s_[20:]])
def test_values(http_store: Store, key: Any) -> None:
    report = read(opened(http_store), key)
    if key != np.s_[20:]:  # where nothing is stored
        assert (report.remote_reader, report.remote_reader_reason, report.n_again) == ("kvikio", "", 0)


def test_chunks_are_asked_for_by_kvikio_and_all_else_by_the_client(server: RangeServer, http_store: Store) -> None:
    array = opened(http_store)
    read(array)  # the sample is behind us
    server.reset()
    read(array, np.s_[:16])
    by_client = [request for request in server.seen.requests if request.agent]
    assert [request.range for request in by_client if request.range != "bytes=-260"] == []
    by_kvikio = sorted((r.path, *map(int, r.range[6:].split("-"))) for r in server.seen.requests if not r.agent)
    assert [path for path, *_ in by_kvikio] == ["v3/shards/c/0/0/0"] * 2 + ["v3/shards/c/1/0/0"] * 2
    for (_, first, last), (_, behind, end) in zip(by_kvikio[::2], by_kvikio[1::2], strict=True):
        assert (first, last + 1) == (0, behind)
        assert 0 < last + 1 - (end + 1 - behind) <= 2  # of unequal size


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize("fault", ["fail", "cut", "move", "page", "short", "lost", "ignore ranges", "forbid"])
def test_what_kvikio_does_not_bring_the_client_is_asked_for(server: RangeServer, http_store: Store, fault: str) -> None:
    array = opened(http_store)
    read(array)
    server.reset(fault, every=2, of_kvikio=True)
    n_again = read(array).n_again
    assert server.failed if fault == "fail" else n_again > 0  # KvikIO itself asks again where a server is busy


@pytest.mark.parametrize("fault", ["move", "page", "short", "lost", "ignore ranges", "forbid"])
def test_a_store_of_which_kvikio_reads_other_bytes_is_read_by_its_client(
    server: RangeServer, http_store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("xgpuzarr.remote_fetch.MIN_MEAN_NBYTES", 1)
    array = opened(http_store, remote_reader="auto")
    server.reset(fault, of_kvikio=True)
    for _ in range(2):
        report = read(array)
        assert (report.remote_reader, report.remote_reader_reason[:6]) == ("client", "KvikIO")
    assert len([request for request in server.seen.requests if not request.agent]) <= 2  # once a store
    with pytest.raises(UnsupportedError, match=r"array 'shards' .*remote_reader='kvikio' was asked for, but KvikIO"):
        opened(http_store)[:]


@pytest.mark.usefixtures("_waves")
@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        ("forbid", r"key 'shards/c/1/0/0' \(bytes \d+:\d+\): .*403"),
        ("short", r"key 'shards/c/1/0/0' \(bytes 0:\d+\): "),
        ("lost", r"key 'shards/c/1/0/0': object vanished"),
    ],
)
def test_what_nobody_reads_is_the_error_of_the_client(
    server: RangeServer, http_store: Store, monkeypatch: pytest.MonkeyPatch, fault: str, pattern: str
) -> None:
    array = opened(http_store, n_retries=0)
    read(array)

    def locate_then_fail(*arguments: Any) -> Any:
        ranges = locate(*arguments)
        server.reset(fault)
        return ranges

    monkeypatch.setattr("xgpuzarr.waves.locate", locate_then_fail)
    with pytest.raises(xgpuzarr.XGpuZarrError, match=rf"array 'shards': store .*127\.0\.0\.1.*{pattern}"):
        array[8:16]
    monkeypatch.undo()


def test_an_object_that_has_become_shorter_is_an_error(folder: Path, tmp_path: Path) -> None:
    """Behind the chunks the shard's index must follow, as where the client reads."""
    from tests.remote.range_server import RangeServer

    shutil.copytree(folder / "v3", tmp_path / "v3")
    server = RangeServer(tmp_path)
    with fsspec_store(f"{server.url}/v3") as store:
        array = opened(store)
        read(array)
        shard = tmp_path / "v3/shards/c/1/0/0"
        index = shard.read_bytes()[-260:]
        shard.write_bytes(shard.read_bytes()[:-400] + index)  # the last chunk would lie in the index
        with pytest.raises(xgpuzarr.CorruptChunkError, match="bytes follow, the shard index takes 260"):
            array[:]
    server.close()


@pytest.mark.parametrize(("fault", "n_again"), [("", 0), ("short", 2)])
def test_a_last_byte_that_is_equal_by_chance_is_asked_for(
    server: RangeServer, http_store: Store, monkeypatch: pytest.MonkeyPatch, fault: str, n_again: int
) -> None:
    """The last of the bytes that are there before a request is the one that it will bring."""
    from xgpuzarr.readers import remote

    array = opened(http_store)
    brought: list[np.ndarray] = []
    to_ask_for = remote.RemoteWave._to_ask_for

    def note(wave: remote.RemoteWave) -> list[int]:
        brought.append(on_host(wave._slab[wave._last]))
        return to_ask_for(wave)

    def foresee(shape: tuple[int, ...]) -> np.ndarray:
        assert brought[0].shape == shape
        return brought[0] ^ np.array([1, 1, 1, 1, 1, 1, 1, 0], np.uint8)

    with monkeypatch.context() as patched:
        patched.setattr(remote.RemoteWave, "_to_ask_for", note)
        read(array)
    monkeypatch.setattr(remote, "_random_bytes", foresee)
    server.reset(fault, of_kvikio=True)
    assert read(array).n_again == n_again
    last = [request.range for request in server.seen.requests if request.agent and request.range != "bytes=-260"]
    assert len(last) == len(brought[0]) + n_again


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_under_way_than_the_options_say(
    server: RangeServer, http_store: Store, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    monkeypatch.setattr("xgpuzarr.waves.MIN_WAVE_DECODED_NBYTES", 1)
    array = opened(http_store, concurrency=concurrency, max_read_bytes=2000)
    read(array)
    server.reset(gather=concurrency)
    read(array, np.s_[:16])
    assert server.seen.most_in_flight == concurrency


@pytest.mark.parametrize(("remote_reader", "n_by_kvikio"), [("auto", 0), ("client", 0), ("kvikio", 2)])
def test_small_requests_are_left_to_the_client(
    server: RangeServer, http_store: Store, remote_reader: str, n_by_kvikio: int
) -> None:
    array = opened(http_store, remote_reader=remote_reader)
    read(array)
    server.reset()
    report = read(array, np.s_[:8])
    assert len([request for request in server.seen.requests if not request.agent]) == n_by_kvikio
    reasons = {"auto": "bytes are not faster by KvikIO", "client": "remote_reader='client' was asked for", "kvikio": ""}
    assert report.remote_reader_reason.endswith(reasons[remote_reader])


@pytest.mark.parametrize(
    ("name", "setting", "value", "reason"),
    [
        ("chunks", "", None, "each chunk is an object, whose size only one more request would tell"),
        (
            "shards",
            "remote_io_backend",
            SimpleNamespace(name="MULTI_POLL"),
            "KvikIO's MULTI_POLL reads into host memory only",
        ),
        ("shards", "task_size", 4096, "KvikIO's task_size is 4096 bytes, less than 2097152"),
        ("shards", "http_timeout", 99, "let a request take 309 s, more than timeout_s=300.0"),
    ],
)
def test_what_kvikio_does_not_read_is_refused_or_read_by_the_client(
    http_store: Store, monkeypatch: pytest.MonkeyPatch, name: str, setting: str, value: Any, reason: str
) -> None:
    import kvikio.defaults

    get = kvikio.defaults.get
    monkeypatch.setattr(kvikio.defaults, "get", lambda name: value if name == setting else get(name))
    array = xgpuzarr.open_array(http_store, path=name, device="cuda")
    assert array.remote_reader == "client"
    assert reason in array.remote_reader_reason
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    with pytest.raises(UnsupportedError, match="remote_reader='kvikio' was asked for, but "):
        xgpuzarr.open_array(http_store, path=name, device="cuda", options=ReadOptions(remote_reader="kvikio"))


def test_local_folders_have_no_remote_reader(folder: Path) -> None:
    array = xgpuzarr.open_array(
        folder / "v3", path="shards", device="cuda", options=ReadOptions(remote_reader="kvikio")
    )
    assert (array.remote_reader, array.remote_reader_reason) == ("", "")


def test_pickled_handles_and_dask_blocks_read(http_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpuzarr.transfer.device_problem", lambda: "")
    array = pickle.loads(pickle.dumps(opened(http_store)))
    assert array.remote_reader == "kvikio"
    assert read(array).remote_reader == "kvikio"
    with diagnostics.collect() as reports, dask.config.set(scheduler="threads"):
        blocks = to_dask(array, ((8, 8, 8), (40,), (30,)))
        np.testing.assert_array_equal(on_host(blocks[:16].compute()), VALUES[:16])
    assert {report.remote_reader for report in reports} == {"kvikio"}


def test_routes_tell_who_reads(http_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpuzarr.device_variable.device_problem", lambda: "")
    dataset = xr.open_dataset(http_store, engine="gpuzarr", device="cuda")
    readers = {route.variable: route.remote_reader for route in dataset.gpuzarr.routes}
    assert readers["shards"] == "kvikio"
    assert readers["chunks"] == "client: each chunk is an object, whose size only one more request would tell"
    assert repr(dataset.gpuzarr.routes).splitlines()[0].endswith("remote reader")


def s3_file_system(s3: str, **options: Any) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(endpoint_url=s3, asynchronous=True, skip_instance_cache=True, **options)


def s3_client(s3: str, config: dict[str, Any]) -> S3Store:
    return S3Store("sharded", prefix="v3", endpoint=s3, client_options={"allow_http": True}, config=config)


@pytest.fixture(params=["s3fs", "s3fs anon", "obstore", "obstore anon"])
def s3_store(request: pytest.FixtureRequest, folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The v3 group in a bucket."""
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    owner = s3_file_system(s3, key="key", secret="secret")
    if not sync(owner._exists("sharded")):
        sync(owner._mkdir("sharded"))
    for file in (folder / "v3").rglob("*"):
        if file.is_file():
            key = f"sharded/v3/{file.relative_to(folder / 'v3')}"
            sync(owner._pipe_file(key, file.read_bytes(), ACL="public-read"))
    file_system = s3_file_system(s3, anon=True) if request.param == "s3fs anon" else owner
    if request.param.startswith("s3fs"):
        yield FsspecStore(file_system, read_only=True, path="sharded/v3")
    else:
        unsigned = {"aws_skip_signature": True, "aws_region": "us-east-1"}
        yield ObjectStore(s3_client(s3, unsigned if "anon" in request.param else S3), read_only=True)
    for opened_system in {id(owner): owner, id(file_system): file_system}.values():
        if opened_system._s3 is not None:
            sync(opened_system._s3.close())


def test_s3(s3_store: Store) -> None:
    array = opened(s3_store)
    assert array.remote_reader_reason == ""
    report = read(array)
    assert (report.remote_reader, report.n_again) == ("kvikio", 0)


def test_signatures_are_in_no_message(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvikio

    def refuse(url: str, _nbytes: int) -> None:
        raise RuntimeError(f"cannot open {url}")

    monkeypatch.setattr(kvikio.RemoteFile, "open_http", refuse)
    with pytest.raises(UnsupportedError, match=r"KvikIO cannot read what .*: cannot open \(URL\)$") as raised:
        opened(s3_store)[:]
    assert "X-Amz" not in str(raised.value)
    assert isinstance(raised.value, xgpuzarr.XGpuZarrError)
    assert not isinstance(raised.value, ChunkReadError)
