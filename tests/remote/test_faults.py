"""A server that fails, cuts answers short or stalls gives right data after all, or one clear error in bounded time."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
import obstore.exceptions
import pytest

import xgpuzarr
from tests.remote.conftest import VALUES, fsspec_store, obstore_store, on_host
from xgpuzarr.errors import ChunkReadError
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


@pytest.fixture
def impatient(http_store: Store) -> Store:
    """The store of `http_store`; obstore makes no request twice, so that its errors come at once."""
    if "obstore" in str(type(http_store)):
        return obstore_store(http_store.store.url, max_retries=0, retry_timeout=timedelta(seconds=1))
    return http_store


@pytest.mark.parametrize("fault", ["fail", "cut"])
@pytest.mark.parametrize("name", ["chunks", "plain", "shards"])
def test_every_fifth_request_fails(server: RangeServer, http_store: Store, device: str, fault: str, name: str) -> None:
    array = xgpuzarr.open_array(http_store, path=name, device=device, options=ReadOptions(max_read_bytes=8000))
    server.reset(fault)
    for _ in range(2):
        np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    assert server.failed


@pytest.mark.parametrize(
    ("fault", "name", "pattern"),
    [
        ("fail", "chunks", r"key 'chunks/c/\d/0/0' \(whole object\): .*503"),
        ("cut", "chunks", r"key 'chunks/c/\d/0/0' \(whole object\): "),
        ("forbid", "chunks", r"key 'chunks/c/0/0/0' \(whole object\): .*403"),
        ("forbid", "shards", r"key 'shards/c/0/0/0' \(last 260 bytes\): .*403"),
        ("ignore ranges", "shards", r"key 'shards/c/0/0/0' \(last 260 bytes\): "),
    ],
)
def test_what_does_not_pass_is_an_error_that_names_store_key_and_range(
    server: RangeServer, impatient: Store, device: str, fault: str, name: str, pattern: str
) -> None:
    options = ReadOptions(n_retries=0, concurrency=1)
    array = xgpuzarr.open_array(impatient, path=name, device=device, options=options)
    server.reset(fault, every=1)
    with pytest.raises(ChunkReadError, match=rf"store .*127\.0\.0\.1.*{pattern}"):
        array[:8]


def test_no_permission_is_not_asked_for_twice(server: RangeServer, device: str) -> None:
    with fsspec_store(f"{server.url}/v3") as store:
        array = xgpuzarr.open_array(store, path="chunks", device=device)
        server.reset("forbid")
        with pytest.raises(ChunkReadError, match="403"):
            array[:4]
    assert len(server.seen.requests) == 1


@pytest.mark.parametrize(("name", "span"), [("chunks", "whole object"), ("shards", "last 260 bytes")])
def test_a_stall_ends(server: RangeServer, http_store: Store, device: str, name: str, span: str) -> None:
    array = xgpuzarr.open_array(http_store, path=name, device=device, options=ReadOptions(timeout_s=0.2))
    server.reset("stall")
    expected = rf"store .*key '{name}/c/0/0/0' \({span}\): no answer within 0.2 s; .*timeout_s in ReadOptions"
    with pytest.raises(ChunkReadError, match=expected):
        array[:4]


@pytest.mark.parametrize("fault", ["fail", "cut"])
def test_metadata_that_cannot_be_read_is_no_missing_array(
    server: RangeServer, impatient: Store, device: str, fault: str
) -> None:
    """zarr-python reads metadata, and the client's error comes out, with the store's name."""
    server.reset(fault, every=1)
    with pytest.raises((aiohttp.ClientError, obstore.exceptions.BaseError)) as failed:
        xgpuzarr.open_array(impatient, path="chunks", device=device)
    assert any("metadata of array 'chunks' of store" in note for note in failed.value.__notes__)


def test_after_a_fault_the_same_array_reads_on(server: RangeServer, http_store: Store, device: str) -> None:
    array = xgpuzarr.open_array(http_store, path="chunks", device=device, options=ReadOptions(timeout_s=0.2))
    server.reset("stall")
    with pytest.raises(ChunkReadError):
        array[:]
    server.closing.set()
    server.reset()
    again = xgpuzarr.open_array(http_store, path="chunks", device=device)
    np.testing.assert_array_equal(on_host(again[:16]), VALUES[:16])
