"""How long does it take to plan a read of 10**6 chunks, and how much memory?

The target is 1 s and 200 MB. Planning reads nothing, so neither the store nor the page cache plays a part.

Run ``python benchmarks/planning.py --output benchmarks/results/planning.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.plan.byte_ranges import ByteRanges, coalesce
from xgpuzarr.plan.codec_chain import CodecChain
from xgpuzarr.plan.layout import ArrayLayout, KeyRule, ShardLevel
from xgpuzarr.plan.read_plan import plan_read
from xgpuzarr.plan.selection import parse_numpy, parse_outer

if TYPE_CHECKING:
    from collections.abc import Callable

N_REPEATS = 5
TARGET_S = 1.0
TARGET_MB = 200.0
SHAPE = (2000, 1000, 1500)
CHUNK_SHAPE = (20, 10, 15)
SHARD_SHAPE = (200, 100, 150)
N_CHUNKS = 10**6
KEYS_AT_ONCE = 10_000
"""Keys are made as objects are read, never all at once."""


def layout(*, sharded: bool) -> ArrayLayout:
    """Make an array of 10**6 chunks."""
    level = ShardLevel(SHARD_SHAPE, CHUNK_SHAPE, index_location="end", index_byteorder="<", index_checksum=True)
    return ArrayLayout(
        path="t2m",
        zarr_format=3,
        shape=SHAPE,
        dtype=np.dtype("f4"),
        chunk_shape=CHUNK_SHAPE,
        object_shape=SHARD_SHAPE if sharded else CHUNK_SHAPE,
        shard_levels=(level,) if sharded else (),
        codec_chain=CodecChain(steps=()),
        fill_value=np.float32(0),
        key_rule=KeyRule("c", "/"),
    )


def cases() -> dict[str, Callable[[], object]]:
    """Everything a read plans before its first byte, from the key on."""
    chunked, sharded = layout(sharded=False), layout(sharded=True)
    rng = np.random.default_rng(0)
    shuffled = tuple(rng.permutation(size) for size in SHAPE)
    sharded_plan = plan_read(sharded, parse_numpy(..., SHAPE))
    encoded_nbytes = rng.integers(5_000, 12_000, N_CHUNKS)
    ranges = ByteRanges(sharded_plan.object_row, sharded_plan.level_index[:, 0] * 12_000, encoded_nbytes)

    def every_column(array: ArrayLayout) -> None:
        plan = plan_read(array, parse_numpy(..., SHAPE))
        plan.slice_columns(slice(None))
        plan.straight_offset(slice(None))

    def every_key(array: ArrayLayout) -> None:
        plan = plan_read(array, parse_numpy(..., SHAPE))
        for start in range(0, plan.n_objects, KEYS_AT_ONCE):
            plan.keys(slice(start, start + KEYS_AT_ONCE))

    return {
        "whole array": lambda: plan_read(chunked, parse_numpy(..., SHAPE)),
        "whole array, in shards": lambda: plan_read(sharded, parse_numpy(..., SHAPE)),
        "whole array, with regions and slabs": lambda: every_column(chunked),
        "whole array, with every key": lambda: every_key(chunked),
        "every third element, backwards": lambda: plan_read(sharded, parse_numpy((slice(None, None, -3),) * 3, SHAPE)),
        "shuffled along every axis": lambda: plan_read(sharded, parse_outer(shuffled, SHAPE)),
        "joining byte ranges in shards": lambda: coalesce(ranges, max_gap_bytes=1 << 16, max_read_bytes=1 << 24),
    }


def measure(call: Callable[[], object]) -> dict[str, float | bool]:
    """Time `call` on its own, then trace its memory, which slows it down."""
    call()
    seconds = []
    for _ in range(N_REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    call()
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    median_s = statistics.median(seconds)
    return {
        "median_s": round(median_s, 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "peak_mb": round(peak_mb, 1),
        "within_target": median_s <= TARGET_S and peak_mb <= TARGET_MB,
    }


def cpu_name() -> str:
    """Name the processor, where the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Run every case and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the results as JSON")
    arguments = parser.parse_args()
    results = {
        "benchmark": "planning",
        "n_chunks": N_CHUNKS,
        "n_repeats": N_REPEATS,
        "target": {"seconds": TARGET_S, "peak_mb": TARGET_MB},
        "machine": {"cpu": cpu_name(), "n_cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "cases": {name: measure(call) for name, call in cases().items()},
    }
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
