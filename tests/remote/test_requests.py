"""What does a read ask of a server? Requests are counted, and how many of them are in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xgpuzarr
from tests.remote.conftest import VALUES, on_host
from tests.remote.range_server import Request
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from tests.remote.range_server import RangeServer


def asked(server: RangeServer, store: Store, name: str, key: Any, device: str, **options: Any) -> list[Request]:
    """Requests of one selection of an array that is open already; its values are looked at too."""
    array = xgpuzarr.open_array(store, path=name, device=device, options=ReadOptions(**options))
    server.reset()
    got = on_host(array[key])
    np.testing.assert_array_equal(got, np.where(np.arange(24)[:, None, None] < 16, VALUES, 7)[key])
    return sorted(server.seen.requests, key=lambda request: (request.path, request.range))


def test_a_chunk_is_one_request(server: RangeServer, http_store: Store, device: str) -> None:
    requests = asked(server, http_store, "chunks", np.s_[3:9, ::2], device)
    assert requests == [Request(f"v3/chunks/c/{number}/0/0", "") for number in range(3)]


def test_a_shard_is_one_request_and_its_index(server: RangeServer, http_store: Store, device: str) -> None:
    requests = asked(server, http_store, "shards", ..., device)
    assert [request.path for request in requests] == [f"v3/shards/c/{n}/0/0" for n in (0, 0, 1, 1, 2)]
    index = "bytes=-260"  # 16 chunks, 16 bytes each, and a checksum
    assert [request.range for request in requests].count(index) == 3
    assert all(request.range.startswith("bytes=0-") for request in requests if request.range != index)


@pytest.mark.parametrize(("max_gap_bytes", "n_requests"), [(1 << 20, 1), (0, 2)])
def test_inner_chunks_that_lie_close_are_one_request(
    server: RangeServer, http_store: Store, device: str, max_gap_bytes: int, n_requests: int
) -> None:
    options = {"max_remote_gap_bytes": max_gap_bytes, "max_gap_bytes": max_gap_bytes}
    requests = asked(server, http_store, "shards", np.s_[0, ::39], device, **options)
    assert len(requests) == 1 + n_requests


def test_a_joined_request_is_no_larger_than_asked_for(server: RangeServer, http_store: Store, device: str) -> None:
    requests = asked(server, http_store, "shards", np.s_[:8], device, max_read_bytes=8000)
    spans = [request.range.removeprefix("bytes=").split("-") for request in requests[1:]]
    nbytes = [int(last) - int(first) + 1 for first, last in spans]
    assert len(nbytes) > 1
    assert max(nbytes) <= 8000


def test_metadata_is_read_once(server: RangeServer, http_store: Store, device: str) -> None:
    opened = xr.open_dataset(http_store, engine="gpuzarr", device=device)
    server.reset()
    for time in (0, 5):
        for name in opened:
            on_host(opened[name].isel(time=time).data)
    assert {request.path.rpartition("/")[2] for request in server.seen.requests} == {"0"}


@pytest.mark.parametrize(("name", "concurrency"), [("plain", 3), ("shards", 2)])
def test_as_many_requests_are_in_flight_as_the_options_say(
    server: RangeServer, http_store: Store, device: str, name: str, concurrency: int
) -> None:
    options = ReadOptions(concurrency=concurrency, n_threads=2, max_read_bytes=4000)
    array = xgpuzarr.open_array(http_store, path=name, device=device, options=options)
    server.reset(gather=concurrency)
    np.testing.assert_array_equal(on_host(array[:16]), VALUES[:16])
    assert server.seen.most_in_flight == concurrency
