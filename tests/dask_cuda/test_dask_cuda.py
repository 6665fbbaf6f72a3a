"""dask-cuda on one GPU: blocks stay on the device at every step, and every result equals NumPy's."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

from xgpuzarr import ReadOptions, from_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import dask.array as da
    from distributed import Client

# Other people's clusters warn of deprecations of their own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SHAPE = (192, 181, 360)
VALUES = np.random.default_rng(5).random(SHAPE).astype("f4")
OPTIONS = ReadOptions(target_block_bytes=16 * 181 * 360 * 4)
BLOCK_NBYTES = OPTIONS.target_block_bytes
PROTOCOLS = ["tcp", "ucx"] if importlib.util.find_spec("distributed_ucxx") else ["tcp"]
TIME = pd.date_range("2001-01-01", periods=SHAPE[0], freq="2D")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A group with `t` in shards of zstd chunks, and an array in Blosc chunks of format 2."""
    folder = tmp_path_factory.mktemp("stores")
    xr.Dataset({"t": (("time", "lat", "lon"), VALUES)}, coords={"time": TIME}).to_zarr(
        folder / "group.zarr",
        consolidated=False,
        encoding={"t": {"chunks": (1, 91, 180), "shards": (8, 182, 360)}},
    )
    zarr.create_array(folder / "v2.zarr", data=VALUES, chunks=(1, 181, 360), zarr_format=2)
    return folder


@pytest.fixture(
    scope="module", params=[(n, p) for p in PROTOCOLS for n in (1, 4)], ids=lambda p: f"{p[0]} threads, {p[1]}"
)
def client(request) -> Iterator[Client]:
    """One worker on the GPU, as `LocalCUDACluster` sets it up."""
    dask_cuda = pytest.importorskip("dask_cuda")
    from distributed import Client

    n_threads, protocol = request.param
    with (
        dask_cuda.LocalCUDACluster(
            CUDA_VISIBLE_DEVICES="0", threads_per_worker=n_threads, protocol=protocol, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module", params=PROTOCOLS)
def sharing_client(request) -> Iterator[Client]:
    """Two worker processes on one GPU; `LocalCUDACluster` gives each GPU one worker only."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, protocol=request.param, dashboard_address=":0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def block_types(array: da.Array) -> set[str]:
    """Where the blocks of an array are, asked of the workers."""
    blocks = array.to_delayed().ravel()
    return set(dask.compute(*[dask.delayed(lambda block: type(block).__module__)(block) for block in blocks]))


def as_numpy(result: Any) -> np.ndarray:
    """Values of a computed result, which must be CuPy's unless it is a Python scalar."""
    import cupy

    assert isinstance(result, cupy.ndarray)
    return result.get()


STEPS: dict[str, Callable[[Any], Any]] = {
    "as read": lambda x: x,
    "selected": lambda x: x[5:100:3, ::-1, 7],
    "mean over time": lambda x: x.mean(axis=0),
    "deviation": lambda x: (x - x.mean()).std(),
    "anomaly": lambda x: x - x.mean(axis=0),
    "transposed": lambda x: x.transpose(2, 0, 1) * 2,
}


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("store", ["group.zarr/t", "v2.zarr"])
def test_results_equal_numpys_and_blocks_are_cupys(folder, store, name):
    x = from_zarr(folder / store, options=OPTIONS)
    assert x.numblocks[0] == SHAPE[0] // 16
    result = STEPS[name](x)
    assert type(x._meta).__module__ == "cupy"
    assert block_types(result) == {"cupy"}
    np.testing.assert_allclose(as_numpy(result.compute()), STEPS[name](VALUES.astype("f8")), rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("client")
def test_persist_and_rechunk(folder):
    x = from_zarr(folder / "v2.zarr", options=OPTIONS).persist()
    assert block_types(x) == {"cupy"}
    columns = x.rechunk((-1, 60, 120), method="tasks")
    assert block_types(columns) == {"cupy"}
    np.testing.assert_array_equal(as_numpy(columns.compute()), VALUES)


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("chunks", [{}, "auto", {"time": 24}])
def test_the_engine_needs_no_argument(folder, chunks):
    ds = xr.open_dataset(folder / "group.zarr", engine="gpuzarr", chunks=chunks, consolidated=False)
    assert type(ds.t.data._meta).__module__ == "cupy"
    assert block_types(ds.t.data) == {"cupy"}
    np.testing.assert_array_equal(as_numpy(ds.t.compute().data), VALUES)


@pytest.mark.usefixtures("client")
def test_groupby(folder):
    ds = xr.open_dataset(folder / "group.zarr", engine="gpuzarr", chunks={}, consolidated=False, options=OPTIONS)
    on_host = xr.DataArray(VALUES.astype("f8"), dims=("time", "lat", "lon"), coords={"time": TIME})
    with xr.set_options(use_flox=False):  # flox groups NumPy arrays only
        monthly = ds.t.groupby("time.month").mean()
    assert block_types(monthly.data) == {"cupy"}
    expected = on_host.groupby("time.month").mean()
    np.testing.assert_allclose(as_numpy(monthly.compute().data), expected.data, rtol=2e-5)


def count_copies_to_host() -> None:
    """Have `cupy.ndarray.get`, through which every conversion to NumPy goes, note its bytes in this process."""
    import cupy

    get = cupy.ndarray.get

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        cupy.copied_nbytes.append(self.nbytes)
        return get(self, *args, **kwargs)

    if not hasattr(cupy, "copied_nbytes"):
        cupy.copied_nbytes = []
        cupy.ndarray.get = counted


def copied_nbytes() -> list[int]:
    import cupy

    copied, cupy.copied_nbytes = cupy.copied_nbytes, []
    return copied


def test_nothing_is_copied_to_the_host_on_the_way(client, folder):
    client.run(count_copies_to_host)
    client.run(copied_nbytes)
    client.submit(lambda: __import__("cupy").ones(1000).get(), pure=False).result()
    assert list(client.run(copied_nbytes).values()) == [[8000]]
    x = from_zarr(folder / "group.zarr", "t", options=OPTIONS)
    columns = ((x - x.mean(axis=0)) ** 2).rechunk((-1, 60, 120), method="tasks")
    columns.sum(axis=0).persist().map_blocks(lambda b: b * 2).sum().compute()
    # What remains are statuses of decoded chunks and the like.
    assert sum(sum(copied) for copied in client.run(copied_nbytes).values()) < BLOCK_NBYTES // 100


def test_blocks_above_the_memory_limit_spill_and_come_back(folder):
    dask_cuda = pytest.importorskip("dask_cuda")
    from distributed import Client

    with (
        dask_cuda.LocalCUDACluster(
            CUDA_VISIBLE_DEVICES="0", device_memory_limit=2 * BLOCK_NBYTES, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        x = from_zarr(folder / "v2.zarr", options=OPTIONS).persist()
        np.testing.assert_allclose(as_numpy((x - x.mean()).std().compute()), VALUES.astype("f8").std(), rtol=2e-5)
        np.testing.assert_array_equal(as_numpy(x.compute()), VALUES)


@pytest.mark.usefixtures("sharing_client")
@pytest.mark.parametrize("name", STEPS)
def test_two_workers_share_a_gpu(folder, name):
    x = from_zarr(folder / "group.zarr", "t", options=OPTIONS)
    result = STEPS[name](x)
    assert block_types(result) == {"cupy"}
    np.testing.assert_allclose(as_numpy(result.compute()), STEPS[name](VALUES.astype("f8")), rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("sharing_client")
def test_two_workers_exchange_blocks(folder):
    x = from_zarr(folder / "v2.zarr", options=OPTIONS).persist()
    columns = x.rechunk((-1, 60, 120), method="tasks")
    assert block_types(columns) == {"cupy"}
    np.testing.assert_array_equal(as_numpy(columns.compute()), VALUES)


@pytest.mark.parametrize("n_threads", [1, 4])
def test_threads_of_this_process(folder, n_threads):
    x = from_zarr(folder / "group.zarr", "t", options=OPTIONS)
    with dask.config.set(scheduler="threads", num_workers=n_threads):
        np.testing.assert_array_equal(as_numpy(x.compute()), VALUES)
        np.testing.assert_allclose(as_numpy(x.mean().compute()), VALUES.astype("f8").mean(), rtol=2e-5)
