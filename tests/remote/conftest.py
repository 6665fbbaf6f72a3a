"""Stores behind servers of this process, all with the same content."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import obstore.store
import pytest
import xarray as xr
import zarr
from fsspec.implementations.http import HTTPFileSystem
from zarr.codecs import ZstdCodec
from zarr.core.sync import sync
from zarr.errors import ZarrUserWarning
from zarr.storage import FsspecStore, ObjectStore

from tests.remote.range_server import RangeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zarr.abc.store import Store

SHAPE = (24, 40, 30)
DIMENSIONS = ("time", "y", "x")
VALUES = np.random.default_rng(0).integers(0, 1000, SHAPE).astype("f4")

ARRAYS: dict[str, dict[str, Any]] = {
    "chunks": {"chunks": (4, 40, 30), "compressors": ZstdCodec()},
    "plain": {"chunks": (8, 20, 30), "compressors": None},
    "shards": {"chunks": (2, 10, 30), "shards": (8, 40, 30), "compressors": ZstdCodec()},
    "blosc": {"chunks": (6, 40, 15), "compressors": numcodecs.Blosc("lz4")},
}
"""Names of the arrays, and how each is stored."""

S3 = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_region": "us-east-1"}
"""Options of a client of `s3`."""

GROUPS = {"v3": ["chunks", "plain", "shards"], "v2": ["blosc"]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups: v3 with the arrays `chunks`, `plain` and `shards`, and v2 with `blosc`; each has a chunk missing."""
    path = tmp_path_factory.mktemp("remote")
    for group, names in GROUPS.items():
        root = zarr.open_group(path / group, mode="w", zarr_format=int(group[1]))
        for name in names:
            names_of_v3 = {"dimension_names": DIMENSIONS} if group == "v3" else {}
            attributes = {"_ARRAY_DIMENSIONS": DIMENSIONS} if group == "v2" else {}
            array = root.create_array(
                name, shape=SHAPE, dtype="f4", fill_value=7, attributes=attributes, **ARRAYS[name], **names_of_v3
            )
            array[: SHAPE[0] - 8] = VALUES[: SHAPE[0] - 8]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)  # version 3 of the format has no word on it yet
            zarr.consolidate_metadata(path / group)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    """A web server of `folder`."""
    running = RangeServer(folder)
    yield running
    running.close()


@contextmanager
def fsspec_store(url: str) -> Iterator[FsspecStore]:
    """A store by fsspec's HTTP, whose connections are closed at the end."""
    file_system = HTTPFileSystem(asynchronous=True, skip_instance_cache=True)
    yield FsspecStore(file_system, read_only=True, path=url)
    if file_system._session is not None:
        sync(file_system._session.close())


def obstore_store(url: str, **retry: Any) -> ObjectStore[Any]:
    options = {"client_options": {"allow_http": True}, "retry_config": retry or None}
    return ObjectStore(obstore.store.HTTPStore.from_url(url, **options), read_only=True)


@pytest.fixture(params=["fsspec", "obstore"])
def http_store(request: pytest.FixtureRequest, server: RangeServer) -> Iterator[Store]:
    """The v3 group of `server`, by either client."""
    if request.param == "obstore":
        yield obstore_store(f"{server.url}/v3")
    else:
        with fsspec_store(f"{server.url}/v3") as store:
            yield store


def on_host(array: Any) -> np.ndarray:
    """A result of either device as a NumPy array."""
    return array.get() if hasattr(array, "get") else array


SELECTIONS = [
    {},
    {"time": 5},
    {"time": slice(3, 20, 4), "y": slice(12, 25)},
    {"x": [29, 0, 4], "time": slice(None, None, -1)},
]


def assert_reads_as_zarr(store: Any, device: str, **kwargs: Any) -> None:
    """The whole and parts of every variable, by the engine, are what ``engine="zarr"`` gives."""
    expected = xr.open_dataset(store, engine="zarr", **kwargs)
    opened = xr.open_dataset(store, engine="gpuzarr", device=device, **kwargs)
    assert set(opened) == set(expected) != set()
    for name in expected:
        for selection in SELECTIONS:
            got = on_host(opened[name].isel(selection).data)
            np.testing.assert_array_equal(got, expected[name].isel(selection).values, err_msg=f"{name} {selection}")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of moto's S3 server."""
    from moto.server import ThreadedMotoServer  # of few tests only

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()
