"""Blocks read by worker processes: values, cancelled and lost work, and stores that a worker does not see."""

from __future__ import annotations

import os
import re
import signal
import time

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from distributed import Client, LocalCluster, wait
from zarr.storage import MemoryStore

from xgpuzarr import ChunkReadError, CorruptChunkError, ReadOptions, from_zarr

SHAPE = (96, 20, 30)
VALUES = np.random.default_rng(11).random(SHAPE)
BLOCKS_OF_8 = ReadOptions(target_block_bytes=8 * 20 * 30 * 8)


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, memory_limit="1GiB", dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def write(store):
    zarr.create_array(store, data=VALUES, chunks=(4, 20, 30), shards=(8, 20, 30))
    return from_zarr(store, device="cpu", options=BLOCKS_OF_8)


@pytest.fixture
def array(tmp_path):
    return write(tmp_path / "t.zarr")


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x.mean(axis=0),
        lambda x: (x - x.mean()).std(),
        lambda x: x[3:50:3, ::-1, 4],
        lambda x: x.rechunk((-1, 5, 30)).sum(axis=0) if isinstance(x, da.Array) else x.sum(axis=0),
        lambda x: x[[90, 3, 41]],
    ],
)
def test_values(array, function):
    np.testing.assert_allclose(function(array).compute(), function(VALUES), rtol=1e-12)


@pytest.fixture
def dataset(tmp_path):
    time = pd.date_range("2001-01-01", periods=SHAPE[0], freq="2D")
    dataset = xr.Dataset({"t": (("time", "y", "x"), VALUES)}, coords={"time": time, "y": np.arange(20.0)})
    dataset.to_zarr(tmp_path / "g.zarr", consolidated=False, encoding={"t": {"chunks": (4, 20, 30)}})
    return dataset


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("chunks", [{}, "auto", {"time": 24}])
def test_datasets(dataset, tmp_path, chunks):
    ds = xr.open_dataset(
        tmp_path / "g.zarr", engine="gpuzarr", device="cpu", chunks=chunks, consolidated=False, options=BLOCKS_OF_8
    )
    for function in (
        lambda ds: ds.t.isel(y=slice(3, 9)).isel(time=5),
        lambda ds: ds.t.groupby("time.month").mean(),
        lambda ds: (ds.t * np.cos(ds.y)).rolling(time=3).mean().isel(time=slice(2, None)),
    ):
        xr.testing.assert_allclose(function(ds).compute(), function(dataset))


@pytest.mark.usefixtures("client")
def test_datasets_of_many_stores_opened_by_the_workers(dataset, tmp_path):
    xr.concat([dataset, dataset], "run").isel(run=1).to_zarr(tmp_path / "h.zarr", consolidated=False)
    ds = xr.open_mfdataset(
        [tmp_path / "g.zarr", tmp_path / "h.zarr"],
        engine="gpuzarr",
        device="cpu",
        parallel=True,
        combine="nested",
        concat_dim="run",
        consolidated=False,
    )
    np.testing.assert_array_equal(ds.t.compute().data, np.stack([VALUES, VALUES]))


@pytest.mark.usefixtures("client")
def test_persisted_blocks_stay_with_their_workers(array):
    persisted = array.persist()
    wait(persisted)
    np.testing.assert_array_equal(persisted.compute(), VALUES)


def slowly(block):
    time.sleep(0.05)
    return block * 2


def test_cancelled_work_can_be_asked_for_again(client, array):
    doubled = array.map_blocks(slowly, meta=array._meta)
    futures = client.compute(doubled.to_delayed().ravel().tolist())
    wait(futures[:2])
    client.cancel(futures)
    np.testing.assert_array_equal(doubled.compute(), VALUES * 2)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_worker_killed_midway_costs_nothing_but_time(tmp_path, in_memory):
    array = write(MemoryStore() if in_memory else tmp_path / "t.zarr")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="1GiB", dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        doubled = array.map_blocks(slowly, meta=array._meta).persist()
        while not any(client.has_what().values()):
            time.sleep(0.01)
        pid = next(iter(client.run(os.getpid).values()))
        os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(doubled.compute(), VALUES * 2)
        assert pid not in client.run(os.getpid).values()


def test_a_store_that_a_worker_does_not_see_is_named_with_the_worker(client, array, tmp_path):
    (tmp_path / "t.zarr").rename(tmp_path / "elsewhere.zarr")
    with pytest.raises(ChunkReadError) as raised:
        array.sum().compute()
    workers = "|".join(re.escape(address) for address in client.scheduler_info()["workers"])
    assert re.search(rf"worker ({workers}) on host \S+ cannot open .*{tmp_path}/t\.zarr", str(raised.value))


def test_a_worker_that_meets_a_damaged_shard_is_named(client, array, tmp_path):
    file = tmp_path / "t.zarr/c/3/0/0"
    raw = bytearray(file.read_bytes())
    raw[-10] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptChunkError) as raised:
        array.sum().compute()
    workers = "|".join(re.escape(address) for address in client.scheduler_info()["workers"])
    assert re.match(rf"worker ({workers}) on host \S+: array '' of .*key 'c/3/0/0': .*CRC32C", str(raised.value))
