"""How does reading scale with the number of GPUs, and with workers and threads that share one?

Each store is read whole with `xgpuzarr.open_array`, without dask, as the unit that a GPU can be compared with. Then,
for each number of GPUs, a `LocalCUDACluster` with one worker a GPU takes (a) the mean of an array, for which workers
exchange next to nothing, (b) the means of 12 groups along time, and (c) means of blocks changed from maps to time
series. For (b) and (c) they exchange everything: xarray brings the fields of a group together before it takes their
mean. ``--workers-per-gpu`` runs as many workers on the one GPU instead. Rates are decoded bytes over seconds;
`efficiency` is the rate over the number of GPUs, as a part of the first number's. Every result is compared with that of
NumPy.

Run ``python benchmarks/scaling.py --gpus 1 2 --json benchmarks/results/scaling.json``. Data is written to a temporary
folder, which every worker must see.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from harness import Store, add_common_arguments, add_store_arguments, timed, write_report, write_store

from xgpuzarr import ReadOptions, open_array
from xgpuzarr.system import block_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

N_GROUPS = 12


def main() -> None:
    """Run every case, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    add_store_arguments(parser, encodings=["blosc-lz4", "shards"], decoded_gb=16.0)
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs to try, the first as the unit"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of each worker")
    parser.add_argument("--workers-per-gpu", type=int, default=1, help="more than 1 needs --gpus 1")
    parser.add_argument("--protocol", default="tcp", choices=["tcp", "ucx"], help="how workers exchange blocks")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--target-mib", type=int, default=block_bytes(ReadOptions(), "cuda") >> 20)
    arguments = parser.parse_args()
    if arguments.workers_per_gpu > 1 and arguments.gpus != [1]:
        parser.error("several workers can share one GPU only: --gpus 1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for encoding in arguments.encodings:
            store = write_store(Path(folder), encoding, arguments.decoded_gb)
            rows.append(plain_reading(store, arguments))
            for n_gpus in arguments.gpus:
                for n_threads in arguments.threads:
                    rows += on_gpus(store, n_gpus, n_threads, arguments)
            add_efficiency(rows, arguments.gpus[0])
            write_report("scaling", arguments, rows)


def plain_reading(store: Store, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read parts as large as a worker's blocks in turn, on one GPU, in one thread."""
    import cupy

    array = open_array(store.path, path="t", device="cuda")
    step = max(1, (arguments.target_mib << 20) // (array.nbytes // len(array)))

    def read() -> None:
        for start in range(0, len(array), step):
            array[start : start + step]
        cupy.cuda.get_current_stream().synchronize()

    row = {"encoding": store.encoding, "case": "open_array", "gpus": 1, "workers": 0, "threads": 1}
    row |= timed(read, store.decoded_nbytes, arguments.repeats)
    del row["result"]
    cupy.get_default_memory_pool().free_all_blocks()
    print(f"{store.encoding:10} {'open_array':12} {row['gb_per_s']:7.2f} GB/s", flush=True)
    return row


def on_gpus(store: Store, n_gpus: int, n_threads: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every case with workers on each of the first `n_gpus` GPUs."""
    rows = []
    n_workers = n_gpus * arguments.workers_per_gpu
    with workers(n_gpus, n_threads, arguments):
        options = ReadOptions(target_block_bytes=arguments.target_mib << 20)
        opened = xr.open_dataset(
            store.path, engine="gpuzarr", chunks={}, consolidated=False, device="cuda", options=options
        )
        for case in arguments.cases:
            row = {"encoding": store.encoding, "case": case, "gpus": n_gpus, "workers": n_workers, "threads": n_threads}
            row["blocks"] = opened.t.data.npartitions
            times = timed(partial(CASES[case], opened.t, store), store.decoded_nbytes, arguments.repeats)
            del times["result"]
            rows.append(row | times)
            print(
                f"{store.encoding:10} {case:12} {n_gpus:2} GPUs {n_workers:2} workers {n_threads:2} threads "
                f"{times['gb_per_s']:7.2f} GB/s",
                flush=True,
            )
    return rows


@contextlib.contextmanager
def workers(n_gpus: int, n_threads: int, arguments: argparse.Namespace) -> Iterator[None]:
    """Run a cluster of one worker a GPU, or of several on the first."""
    from distributed import Client, LocalCluster

    settings = {"threads_per_worker": n_threads, "protocol": arguments.protocol, "dashboard_address": ":0"}
    if arguments.workers_per_gpu > 1:
        cluster = LocalCluster(n_workers=arguments.workers_per_gpu, memory_limit=0, **settings)
    else:
        from dask_cuda import LocalCUDACluster

        cluster = LocalCUDACluster(CUDA_VISIBLE_DEVICES=",".join(map(str, range(n_gpus))), **settings)
    with cluster, Client(cluster) as client:
        client.wait_for_workers(n_gpus * arguments.workers_per_gpu)
        yield


def mean(values: xr.DataArray, store: Store) -> None:
    """Mean of everything."""
    expect(float(values.data.mean(dtype="f8").compute()), store.mean)


def group_means(values: xr.DataArray, store: Store) -> None:
    """Means of every twelfth field, as months of a climatology are."""
    blocks = values.data
    labels = np.arange(len(values)) % N_GROUPS
    groups = xr.DataArray(labels, dims=values.dims[0], name="group")
    with xr.set_options(use_flox=False):  # flox groups NumPy arrays only
        means = xr.DataArray(blocks.astype("f8"), dims=values.dims).groupby(groups).mean().data.compute().get()
    n_of = np.zeros((N_GROUPS, len(store.source)))
    np.add.at(n_of, (labels, np.arange(len(values)) % len(store.source)), 1)
    row = blocks.shape[1] // 2
    expect(means[:, row], n_of @ store.source[:, row].astype("f8") / n_of.sum(axis=1)[:, None])


def time_series(values: xr.DataArray, store: Store) -> None:
    """Mean over time of blocks that span all of it, and the mean of that; blocks stay on the devices."""
    blocks = values.data
    n_columns = max(1, blocks.shape[2] // blocks.npartitions)
    series = blocks.rechunk((-1, -1, n_columns), method="tasks")
    expect(float(series.mean(axis=0, dtype="f8").mean().compute()), store.mean)


CASES = {"groups": group_means, "mean": mean, "time series": time_series}


def expect(result: Any, expected: Any) -> None:
    """Refuse a wrong result; sums in another order differ in their last bits."""
    np.testing.assert_allclose(result, expected, rtol=1e-9)


def add_efficiency(rows: list[dict[str, Any]], unit: int) -> None:
    """Compare each rate with that of the first number of GPUs."""
    names = ("encoding", "case", "threads")
    rate = {tuple(row[name] for name in names): row["gb_per_s"] for row in rows if row["gpus"] == unit}
    for row in rows:
        unit_rate = rate[tuple(row[name] for name in names)]
        row["efficiency"] = round(row["gb_per_s"] * unit / row["gpus"] / unit_rate, 3)


if __name__ == "__main__":
    main()
