"""How does reading scale with the number of GPUs?

For each number of GPUs, a `LocalCUDACluster` with one worker a GPU (a) takes the mean of an array, for which workers
exchange next to nothing, and (b) changes its blocks from maps to time series, for which they exchange everything.
Rates are decoded bytes over seconds, and `efficiency` is the rate over the number of GPUs times the rate of one.

Run ``python benchmarks/scaling.py --gpus 1 2 4 8 --json benchmarks/results/scaling.json``. Data is written to a
temporary folder, which every worker must see.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Store, add_common_arguments, add_store_arguments, timed, write_report, write_store

from xgpuzarr import ReadOptions, from_zarr

if TYPE_CHECKING:
    import dask.array as da


def main() -> None:
    """Run every case, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    add_store_arguments(parser, encodings=["shards"])
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs to try, the first as the unit"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--protocol", default="tcp", choices=["tcp", "ucx"], help="how workers exchange blocks")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--target-mib", type=int, default=ReadOptions().target_block_bytes >> 20)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for encoding in arguments.encodings:
            store = write_store(Path(folder), encoding, arguments.decoded_gb)
            for n_gpus in arguments.gpus:
                rows += on_gpus(store, n_gpus, arguments)
    add_efficiency(rows, arguments.gpus[0])
    write_report("scaling", arguments, rows)


def on_gpus(store: Store, n_gpus: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every case with one worker on each of the first `n_gpus` GPUs."""
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    rows = []
    with (
        LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=",".join(map(str, range(n_gpus))),
            threads_per_worker=arguments.threads,
            protocol=arguments.protocol,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(n_gpus)
        options = ReadOptions(target_block_bytes=arguments.target_mib << 20)
        blocks = from_zarr(store.path, "t", device="cuda", options=options)
        for case in arguments.cases:
            row = {"encoding": store.encoding, "case": case, "gpus": n_gpus, "blocks": blocks.npartitions}
            row |= timed(partial(CASES[case], blocks), store.decoded_nbytes, arguments.repeats)
            if abs(row["result"] - store.mean) > 1e-6 * abs(store.mean):
                raise AssertionError(f"{case}: mean {row['result']}, but the data's is {store.mean}")
            rows.append(row)
            print(f"{store.encoding:10} {case:12} {n_gpus:2} GPUs {row['gb_per_s']:7.2f} GB/s", flush=True)
    return rows


def mean(blocks: da.Array) -> float:
    """Mean of everything."""
    return float(blocks.mean(dtype="f8").compute())


def time_series(blocks: da.Array) -> float:
    """Mean over time of blocks that span all of it, and the mean of that; blocks stay on the devices."""
    n_columns = max(1, blocks.shape[2] // blocks.npartitions)
    return float(blocks.rechunk((-1, -1, n_columns), method="tasks").mean(axis=0, dtype="f8").mean().compute())


CASES = {"mean": mean, "time series": time_series}


def add_efficiency(rows: list[dict[str, Any]], unit: int) -> None:
    """Compare each rate with that of the first number of GPUs."""
    rate = {(row["encoding"], row["case"]): row["gb_per_s"] for row in rows if row["gpus"] == unit}
    for row in rows:
        row["efficiency"] = round(row["gb_per_s"] * unit / row["gpus"] / rate[row["encoding"], row["case"]], 3)


if __name__ == "__main__":
    main()
