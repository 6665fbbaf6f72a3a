"""Stores of every kind read as ``engine="zarr"`` reads them, whole and in parts."""

from __future__ import annotations

import base64
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import fsspec
import icechunk
import numpy as np
import obstore
import pytest
import s3fs
import xarray as xr
import zarr
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.reference import ReferenceFileSystem
from obstore.store import S3Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, MemoryStore, ObjectStore, ZipStore

import xgpuzarr
from tests.remote.conftest import ARRAYS, S3, VALUES, assert_reads_as_zarr, fsspec_store, on_host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


def objects(folder: Path) -> dict[str, bytes]:
    """Every object below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_http_v3(http_store: Store, device: str) -> None:
    assert_reads_as_zarr(http_store, device)


def test_http_v2(server: RangeServer, device: str) -> None:
    with fsspec_store(f"{server.url}/v2") as store:
        assert_reads_as_zarr(store, device)


@pytest.fixture
def _forget_file_systems() -> Iterator[None]:
    """Close the connections of file systems that fsspec makes of URLs, and keeps."""
    yield
    for file_system in HTTPFileSystem._cache.values():
        if file_system._session is not None:
            sync(file_system._session.close())
    HTTPFileSystem.clear_instance_cache()
    ReferenceFileSystem.clear_instance_cache()


@pytest.mark.usefixtures("_forget_file_systems")
def test_url(server: RangeServer, device: str) -> None:
    assert_reads_as_zarr(f"{server.url}/v3", device, storage_options={"headers": {"X-Who": "test"}})


@pytest.mark.usefixtures("_forget_file_systems")
def test_pickled_handles_and_dask_blocks_read(http_store: Store, device: str) -> None:
    array = pickle.loads(pickle.dumps(xgpuzarr.open_array(http_store, path="shards", device=device)))
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    blocks = xr.open_dataset(http_store, engine="gpuzarr", device=device, chunks={"time": 8})
    np.testing.assert_array_equal(on_host(blocks["shards"].data[:16].compute()), VALUES[:16])


@pytest.mark.parametrize("name", ARRAYS)
def test_open_array(server: RangeServer, device: str, name: str) -> None:
    group = "v2" if name == "blosc" else "v3"
    with fsspec_store(f"{server.url}/{group}") as store:
        array = xgpuzarr.open_array(store, path=name, device=device)
        expected = zarr.open_array(store, path=name, mode="r")
        for key in (..., np.s_[3], np.s_[::-5, 12:25, ::7]):
            np.testing.assert_array_equal(on_host(array[key]), expected[...][key])
        assert (on_host(array[:16]) == VALUES[:16]).all()
        assert (on_host(array[16:]) == 7).all()


def test_s3(folder: Path, s3: str, device: str) -> None:
    file_system = s3fs.S3FileSystem(
        endpoint_url=s3, key="key", secret="secret", asynchronous=True, skip_instance_cache=True
    )
    sync(file_system._mkdir("bucket"))
    bucket = S3Store("bucket", endpoint=s3, client_options={"allow_http": True}, config=S3)
    for group in ("v2", "v3"):
        for key, content in objects(folder / group).items():
            obstore.put(bucket, f"{group}/{key}", content)
        assert_reads_as_zarr(FsspecStore(file_system, read_only=True, path=f"bucket/{group}"), device)
        by_obstore = S3Store("bucket", prefix=group, endpoint=s3, client_options={"allow_http": True}, config=S3)
        assert_reads_as_zarr(ObjectStore(by_obstore, read_only=True), device)
    sync(file_system.s3.close() if hasattr(file_system, "s3") else file_system._s3.close())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip(folder: Path, tmp_path: Path, compression: int, device: str) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w", compression) as archive:
        for key, content in objects(folder / "v3").items():
            archive.writestr(key, content)
    with ZipStore(tmp_path / "s.zip", mode="r") as store:
        assert_reads_as_zarr(store, device)


def test_memory(folder: Path, device: str) -> None:
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    store = MemoryStore({key: buffer.from_bytes(content) for key, content in objects(folder / "v3").items()})
    assert_reads_as_zarr(store, device)


def test_icechunk(folder: Path, tmp_path: Path, device: str) -> None:
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repository")))
    session = repository.writable_session("main")
    source = xr.open_dataset(folder / "v3", engine="zarr", mask_and_scale=False)
    source.to_zarr(session.store, consolidated=False)
    session.commit("all of it")
    assert_reads_as_zarr(repository.readonly_session("main").store, device, consolidated=False)


@pytest.fixture
def references(folder: Path, server: RangeServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Objects of the v2 group as kerchunk writes them: metadata inline, chunks as byte ranges of one large file."""
    found: dict[str, Any] = {}
    packed = b""
    for key, content in objects(folder / "v2").items():
        if key.rpartition("/")[2].startswith("."):
            found[key] = content.decode()
        elif key == "blosc/0.0.0":
            found[key] = "base64:" + base64.b64encode(content).decode()
        else:
            found[key] = [f"{server.url}/packed/0", len(packed) + 100, len(content)]
            packed += content
    server.folder = tmp_path_factory.mktemp("references")
    (server.folder / "packed").mkdir()
    (server.folder / "packed" / "0").write_bytes(bytes(100) + packed)
    return found


def reference_file_system(references: dict[str, Any]) -> Any:
    return fsspec.filesystem(
        "reference",
        fo=references,
        remote_protocol="http",
        remote_options={"asynchronous": True, "skip_instance_cache": True},
        asynchronous=True,
        skip_instance_cache=True,
    )


def test_kerchunk_references(references: dict[str, Any], server: RangeServer, device: str) -> None:
    file_system = reference_file_system(references)
    assert_reads_as_zarr(FsspecStore(file_system, read_only=True, path=""), device, consolidated=False)
    assert {request.range != "" for request in server.seen.requests} == {True}
    sync(file_system.fss["http"]._session.close())


@pytest.mark.usefixtures("_forget_file_systems")
def test_url_of_references(references: dict[str, Any], device: str) -> None:
    options = {"fo": references, "remote_protocol": "http", "remote_options": {"asynchronous": True}}
    assert_reads_as_zarr("reference://", device, storage_options=options, consolidated=False)


def test_a_reference_to_a_file_that_is_gone_is_no_fill_value(
    references: dict[str, Any], server: RangeServer, device: str
) -> None:
    (server.folder / "packed" / "0").unlink()
    file_system = reference_file_system(references)
    array = xgpuzarr.open_array(FsspecStore(file_system, read_only=True, path=""), path="blosc", device=device)
    with pytest.raises(xgpuzarr.ChunkReadError, match=r"key 'blosc/0.0.1' \(whole object\): Reference .* failed"):
        array[:6, :, 15:]
    sync(file_system.fss["http"]._session.close())
