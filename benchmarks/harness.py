"""What the benchmarks share: stores of a real size, timing, and reports that say where their numbers come from."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from xgpuzarr.bench import ENCODINGS, GRID, machine, make_fields
from xgpuzarr.options import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Store", "add_common_arguments", "add_store_arguments", "timed", "write_report", "write_store"]

N_DISTINCT_FIELDS = 128
"""Fields that are made and encoded; a store repeats their encoded bytes in objects of their own."""

DIMENSIONS = ("time", "latitude", "longitude")


@dataclass(frozen=True, slots=True)
class Store:
    """A group with the array `t`, and what a benchmark has to know of it.

    Attributes
    ----------
    path
        Its folder.
    encoding
        Name in `xgpuzarr.bench.ENCODINGS`.
    decoded_nbytes
        Decoded size of `t`, in bytes.
    mean
        Mean of `t`, summed in float64.
    source
        The first fields; all that follow repeat them.
    """

    path: Path
    encoding: str
    decoded_nbytes: int
    mean: float
    source: NDArray[np.float32] = field(repr=False)

    def n_fields(self, decoded_gb: float) -> int:
        """Length of a part of the first axis with about `decoded_gb` GB, and with the mean of the whole."""
        nbytes = N_DISTINCT_FIELDS * GRID[0] * GRID[1] * 4
        return max(1, round(decoded_gb * 1e9 / nbytes)) * N_DISTINCT_FIELDS


def write_store(folder: Path, encoding: str, decoded_gb: float) -> Store:
    """Write a group whose array `t` holds at least `decoded_gb` GB of fields like a reanalysis'.

    Afterwards the store is in the page cache as far as memory allows.
    """
    source = make_fields(N_DISTINCT_FIELDS)
    n_copies = max(1, -(-int(decoded_gb * 1e9) // source.nbytes))
    path = folder / f"{encoding}.zarr"
    array = ENCODINGS[encoding](str(path / "t"), (n_copies * len(source), *GRID))
    zarr.create_group(path, zarr_format=array.metadata.zarr_format)
    _name_dimensions(path / "t", array)
    depth = (array.shards or array.chunks)[0]
    n_objects = len(source) // depth

    def write(number: int) -> None:
        array[number * depth : (number + 1) * depth] = source[number * depth : (number + 1) * depth]
        for copy in range(1, n_copies):
            target = _object(path / "t", array, copy * n_objects + number)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_object(path / "t", array, number), target)

    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(write, range(n_objects)))
    return Store(path, encoding, n_copies * source.nbytes, float(source.mean(dtype="f8")), source)


def timed(call: Callable[[], Any], nbytes: int, n_repeats: int) -> dict[str, Any]:
    """Run once to warm caches, pools and compilers, then `n_repeats` times; `call` must return when all is done."""
    result = call()
    seconds = []
    for _ in range(n_repeats):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    median_s = statistics.median(seconds)
    return {
        "median_s": round(median_s, 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "gb_per_s": round(nbytes / median_s / 1e9, 2),
        "result": result,
    }


def add_store_arguments(parser: argparse.ArgumentParser, *, encodings: Iterable[str], decoded_gb: float = 8.0) -> None:
    """Add the options of benchmarks that write stores."""
    parser.add_argument("--encodings", nargs="+", choices=sorted(ENCODINGS), default=list(encodings))
    parser.add_argument("--decoded-gb", type=float, default=decoded_gb, help="decoded size of each store, in GB")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the stores; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--commit", default="", help="version control commit to record; asked of git by default")


def write_report(name: str, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write results as JSON, if a file was named, with the machine, the versions and the state of the page cache."""
    if arguments.json is None:
        return
    settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "folder", "commit")}
    report = {"benchmark": name, "settings": settings, "cache": "page cache warm", "machine": machine(arguments.commit)}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report | {"results": rows}, indent=1) + "\n")


def _name_dimensions(folder: Path, array: zarr.Array[Any]) -> None:
    if array.metadata.zarr_format == 2:
        (folder / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": DIMENSIONS}))
    else:
        document = json.loads((folder / "zarr.json").read_text())
        (folder / "zarr.json").write_text(json.dumps(document | {"dimension_names": DIMENSIONS}))


def _object(folder: Path, array: zarr.Array[Any], number: int) -> Path:
    """File of an object along the first axis; it is the only one across the others."""
    return folder / (f"{number}.0.0" if array.metadata.zarr_format == 2 else f"c/{number}/0/0")
