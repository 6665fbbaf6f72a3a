"""How long does it take to make a dask array of 10**5 blocks, and to plan a mean of it?

The target for making it is 50 ms. Nothing is read. What dask itself takes to write out its tasks, which it does once
something is computed, stands beside it.

Run ``python benchmarks/dask_graph.py --json benchmarks/results/dask_graph.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr
import zarr
from harness import add_common_arguments, timed, write_report

from xgpuzarr import ReadOptions, from_zarr

if TYPE_CHECKING:
    from collections.abc import Callable

N_BLOCKS = 100_000


def cases(folder: Path) -> dict[str, Callable[[], object]]:
    """Make each case: opening by either interface, a selection, and what dask does later."""
    group = zarr.create_group(folder / "group.zarr")
    group.create_array(
        "t",
        shape=(N_BLOCKS, 73, 144),
        chunks=(1, 73, 144),
        dtype="f4",
        dimension_names=["time", "latitude", "longitude"],
    )
    options = ReadOptions(target_block_bytes=1)

    def by_engine() -> xr.Dataset:
        return xr.open_dataset(
            folder / "group.zarr", engine="gpuzarr", chunks={}, consolidated=False, device="cpu", options=options
        )

    def by_from_zarr() -> object:
        return from_zarr(folder / "group.zarr", "t", device="cpu", options=options)

    ds, blocks = by_engine(), by_from_zarr()
    return {
        "xarray.open_dataset": by_engine,
        "from_zarr": by_from_zarr,
        "selection of a column": lambda: ds.t.isel(longitude=7),
        "dask: graph of a mean": blocks.mean,
        "dask: write out all tasks": lambda: len(dict(by_from_zarr().__dask_graph__())),
    }


def main() -> None:
    """Time every case and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = []
        for name, call in cases(Path(folder)).items():
            times = timed(call, 0, arguments.repeats)
            rows.append({"case": name, "n_blocks": N_BLOCKS} | {k: times[k] for k in ("median_s", "min_s", "max_s")})
            print(f"{name:28} {times['median_s'] * 1e3:9.1f} ms", flush=True)
    write_report("dask_graph", arguments, rows)


if __name__ == "__main__":
    main()
