"""How fast does a dask mean read, beside plain reading and beside what users write without this package?

Each store is read whole (a) with `xgpuzarr.open_array`, without dask; (b) by ``engine="gpuzarr", chunks={}``; (c) by
``engine="zarr"`` and ``map_blocks(cupy.asarray)``, in stored chunks and in those of ``chunks="auto"``. (b) and (c) take
a mean, under dask's threaded scheduler and in a cluster of one worker; (c), which is slow, with the most threads only.
Rates are decoded bytes over seconds; `of_plain` is a rate as a part of (a)'s, `times_zarr` as a multiple of the best of
(c). A computation costs a cluster some 30 ms, however much it reads: ``--decoded-gb`` says how much.

Run ``python benchmarks/dask_mean.py --json benchmarks/results/dask_mean.json`` on a machine with a GPU, and
``--target-mib 64 128 256 512 1024`` to compare block sizes. ``--device cpu`` reads into NumPy arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import xarray as xr
from harness import Store, add_common_arguments, add_store_arguments, timed, write_report, write_store

from xgpuzarr import ReadOptions, open_array
from xgpuzarr.system import block_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import dask.array as da


def main() -> None:
    """Run every case, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    add_store_arguments(parser, encodings=["blosc-lz4", "shards"], decoded_gb=32.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--schedulers", nargs="+", choices=["threads", "cluster"], default=["threads", "cluster"])
    parser.add_argument("--target-mib", type=int, nargs="+", default=[block_bytes(ReadOptions(), "cuda") >> 20])
    parser.add_argument("--no-peers", action="store_true", help="leave engine='zarr' out")
    parser.add_argument(
        "--peer-blocks", nargs="+", choices=["stored", "auto"], default=["stored", "auto"], help="of engine='zarr'"
    )
    parser.add_argument("--peer-gb", type=float, default=1.0, help="decoded GB that engine='zarr' reads of each store")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        stores = [write_store(Path(folder), encoding, arguments.decoded_gb) for encoding in arguments.encodings]
        for store in stores:
            read = partial(read_plain, store, arguments)
            rows.append(note(store, "open_array", "none", 0, timed(read, store.decoded_nbytes, arguments.repeats)))
        for scheduler, n_threads in itertools.product(arguments.schedulers, arguments.threads):
            peers = not arguments.no_peers and n_threads == max(arguments.threads)
            with scheduler_of(scheduler, n_threads, arguments.device):
                for store in stores:
                    for reader, blocks in readers(store, arguments, peers=peers).items():
                        mean = partial(compute_mean, blocks, store.mean)
                        times = timed(mean, blocks.nbytes, arguments.repeats)
                        rows.append(note(store, reader, scheduler, n_threads, times))
            compare(rows)
            write_report("dask_mean", arguments, rows)


def compare(rows: list[dict[str, Any]]) -> None:
    """Put each rate beside that of plain reading of the same store, and beside the best of engine="zarr" so far."""
    for encoding in {row["encoding"] for row in rows}:
        of_store = [row for row in rows if row["encoding"] == encoding]
        (plain,) = (row["gb_per_s"] for row in of_store if row["reader"] == "open_array")
        zarr = max((row["gb_per_s"] for row in of_store if row["reader"].startswith("zarr")), default=None)
        for row in of_store:
            row["of_plain"] = round(row["gb_per_s"] / plain, 3)
            if zarr is not None:
                row["times_zarr"] = round(row["gb_per_s"] / zarr, 2)


def readers(store: Store, arguments: argparse.Namespace, *, peers: bool) -> dict[str, da.Array]:
    """Make the dask array of each way to read."""
    ways = {}
    for mib in arguments.target_mib:
        options = ReadOptions(target_block_bytes=mib << 20)
        ds = xr.open_dataset(
            store.path, engine="gpuzarr", chunks={}, consolidated=False, device=arguments.device, options=options
        )
        ways[f"gpuzarr, {mib} MiB"] = ds.t.data
    if peers:
        n_fields = store.n_fields(arguments.peer_gb)
        for name in arguments.peer_blocks:
            chunks: Any = {"stored": {}, "auto": "auto"}[name]
            on_host = xr.open_dataset(store.path, engine="zarr", chunks=chunks, consolidated=False).t.data[:n_fields]
            ways[f"zarr, {name} blocks"] = on_host.map_blocks(to_device) if arguments.device == "cuda" else on_host
    return ways


def to_device(block: Any) -> Any:
    """Copy a block to the current device."""
    import cupy

    return cupy.asarray(block)


def compute_mean(blocks: da.Array, expected: float) -> float:
    """Take the mean in float64, on the host when this returns, and compare it."""
    mean = float(blocks.mean(dtype="f8").compute())
    if abs(mean - expected) > 1e-6 * abs(expected):
        raise AssertionError(f"the mean came out as {mean}, but the data's is {expected}")
    return mean


def read_plain(store: Store, arguments: argparse.Namespace) -> float:
    """Read without dask, whole; wait for the device; then take the mean of one field for the record."""
    values = open_array(store.path, path="t", device=arguments.device)[:]
    if arguments.device == "cuda":
        import cupy

        cupy.cuda.get_current_stream().synchronize()
    return float(values[0].mean(dtype="f8"))


@contextlib.contextmanager
def scheduler_of(name: str, n_threads: int, device: str) -> Iterator[None]:
    """Have dask compute in threads of this process, or in a cluster of one worker."""
    if name == "threads":
        with dask.config.set(scheduler="threads", num_workers=n_threads):
            yield
        return
    from distributed import Client, LocalCluster

    if device == "cuda":
        import cupy
        from dask_cuda import LocalCUDACluster

        cupy.get_default_memory_pool().free_all_blocks()  # of the device that the worker is to have
        cluster = LocalCUDACluster(CUDA_VISIBLE_DEVICES="0", threads_per_worker=n_threads, dashboard_address=":0")
    else:
        cluster = LocalCluster(n_workers=1, threads_per_worker=n_threads, dashboard_address=":0")
    with cluster, Client(cluster):
        yield


def note(store: Store, reader: str, scheduler: str, n_threads: int, times: dict[str, Any]) -> dict[str, Any]:
    """Print a case and give its row of the report."""
    print(
        f"{store.encoding:10} {reader:22} {scheduler:8} {n_threads:2} threads {times['gb_per_s']:7.2f} GB/s "
        f"{times['median_s']:8.3f} s",
        flush=True,
    )
    return {"encoding": store.encoding, "reader": reader, "scheduler": scheduler, "threads": n_threads} | times


if __name__ == "__main__":
    main()
