"""`xgpuzarr bench`: how fast does this machine read, beside other Zarr readers, in one run?

Writes an ERA5-like float32 array (smooth fields with noise, rounded to 1/64) in several encodings, then reads each
whole with this package and with every other reader that is installed. Rates are decoded bytes over seconds, end to
end, into device memory (host memory with ``--device cpu``), median of several runs, page cache warm; every result is
compared with the source, bit for bit. An encoding that another reader does not know is reported with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import zarr
from zarr.codecs import GzipCodec, ZstdCodec

from xgpuzarr.array import open_array, resolve_device
from xgpuzarr.errors import XGpuZarrError
from xgpuzarr.options import ReadOptions, usable_cpus
from xgpuzarr.plan.read_plan import format_nbytes
from xgpuzarr.system import probe

if TYPE_CHECKING:
    import argparse

    from numpy.typing import NDArray

__all__ = ["ENCODINGS", "machine", "run"]

GRID = (721, 1440)

OURS = "xgpuzarr"

PEERS = ("zarrs", "tensorstore", "isal")
"""Packages of other readers, and of zarr-python's where it uses one, that results depend on."""

PEER_ERRORS = (ValueError, TypeError, RuntimeError, UserWarning)
"""What other readers raise for an encoding that they do not know; RuntimeError includes NotImplementedError."""

MAX_REASON_LENGTH = 160

type Write = Callable[[str, tuple[int, ...]], zarr.Array[Any]]


def _v3(compressor: Any, **kwargs: Any) -> Write:
    return lambda path, shape: zarr.create_array(
        path, shape=shape, dtype="f4", compressors=compressor, **{"chunks": (1, *GRID), **kwargs}
    )


def _v2(compressor: Any) -> Write:
    return lambda path, shape: zarr.create_array(
        path, shape=shape, dtype="f4", chunks=(1, *GRID), zarr_format=2, compressors=compressor
    )


ENCODINGS: dict[str, Write] = {
    "none": _v3(None),
    "zstd": _v3(ZstdCodec(level=0)),
    "shards": _v3(ZstdCodec(level=0), chunks=(1, 91, 180), shards=(8, 728, 1440)),
    "blosc-lz4": _v2(numcodecs.Blosc("lz4", clevel=5, shuffle=1)),
    "blosc-zstd": _v2(numcodecs.Blosc("zstd", clevel=5, shuffle=1)),
    "blosc-zlib": _v2(numcodecs.Blosc("zlib", clevel=5, shuffle=1)),
    "lz4": _v2(numcodecs.LZ4()),
    "gzip": _v3(GzipCodec(level=5)),
}
"""Name of each encoding, and what creates its array: 4 MB chunks, or 65 kB chunks in 33 MB shards."""


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark, print a table, write the JSON.

    Raises
    ------
    XGpuZarrError
        An argument cannot be met, which is found out before anything is measured; or a reader's result differs from
        what was written.
    """
    device = resolve_device(arguments.device)
    _check(arguments, device)
    threads = arguments.threads or usable_cpus()
    source = make_fields(arguments.fields)
    results: list[dict[str, Any]] = []
    report = {"machine": machine(arguments.commit), "device": device, "threads": threads, "route": arguments.route}
    report |= {"cache": "page cache warm", "decoded_bytes": source.nbytes, "repeats": arguments.repeats}
    for name in arguments.encodings or ENCODINGS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            path = os.path.join(folder, name)  # noqa: PTH118  # peers want text
            _write(ENCODINGS[name](path, source.shape), source, threads)
            options = ReadOptions(n_threads=threads, route=arguments.route)
            readers = readers_of(path, device, options, peers=not arguments.no_peers)
            for reader, read in readers.items():
                row = {"encoding": name, "reader": reader, "stored_bytes": _stored_nbytes(Path(path))}
                try:
                    row |= _measure(read, source, arguments.repeats)
                    text = f"{row['gb_per_s']:7.2f} GB/s  {row['median_s']:8.4f} s  {row['equal']}"
                except PEER_ERRORS as error:
                    if reader == OURS:
                        raise
                    row["reason"] = _first_line(error)
                    text = f"not read: {row['reason']}"
                results.append(row)
                print(f"{name:11} {reader:16} {text}")
                if arguments.json:  # after every row: slow readers may outlast the time there is
                    arguments.json.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")
    wrong = [f"{row['reader']} of {row['encoding']}" for row in results if not row.get("equal", True)]
    if wrong:
        raise XGpuZarrError(f"results differ from what was written: {', '.join(wrong)}")


def _check(arguments: argparse.Namespace, device: str) -> None:
    """Refuse what would end the run only after minutes of it."""
    unknown = [name for name in arguments.encodings or () if name not in ENCODINGS]
    if unknown:
        raise XGpuZarrError(f"encodings must be of {', '.join(ENCODINGS)}, got {', '.join(unknown)}")
    if arguments.route == "device" and device == "cpu":
        raise XGpuZarrError("--route device needs a device, and the run is on the host; leave out --route")
    folder = Path(arguments.folder or tempfile.gettempdir())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise XGpuZarrError(f"--folder {folder}: not a folder that can be written to; give one")
    nbytes = arguments.fields * math.prod(GRID) * np.dtype(np.float32).itemsize
    # In host memory: what is written, what is read, and a copy of that, which readers or the comparison make.
    room = {"memory": (3 * nbytes, _available_nbytes()), f"disk at {folder}": (nbytes, shutil.disk_usage(folder).free)}
    if device == "cuda":
        room["device memory"] = (nbytes, max((gpu.memory_nbytes for gpu in probe().gpus), default=0))
    for what, (needed, free) in room.items():
        if needed > free:
            raise XGpuZarrError(
                f"--fields {arguments.fields} takes {format_nbytes(needed)} of {what}, got {format_nbytes(free)}; "
                "give fewer"
            )
    if arguments.json:
        try:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.open("a").close()
        except OSError as error:
            raise XGpuZarrError(f"--json {arguments.json}: {error.strerror}; give a file to write to") from error


def _available_nbytes() -> int:
    """Host memory that can be had without swapping, in bytes: MemAvailable of Linux's /proc/meminfo (proc(5))."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].removesuffix("kB")) << 10


def make_fields(n_fields: int) -> NDArray[np.float32]:
    """Fields like a reanalysis: smooth structure that drifts, plus noise, rounded to 1/64."""
    random = np.random.default_rng(0)
    latitude = np.linspace(-np.pi / 2, np.pi / 2, GRID[0])[:, None]
    longitude = np.linspace(0, 2 * np.pi, GRID[1], endpoint=False)[None]
    fields = np.empty((n_fields, *GRID), np.float32)
    noise = random.standard_normal((GRID[0] * 2, GRID[1] * 2)).astype(np.float32)
    for number in range(n_fields):
        smooth = 273 + 30 * np.cos(latitude) + 5 * np.sin(3 * longitude + number / 50) * np.cos(2 * latitude)
        row, column = random.integers(0, GRID[0]), random.integers(0, GRID[1])
        field = smooth + 0.5 * noise[row : row + GRID[0], column : column + GRID[1]]
        fields[number] = np.round(field.astype(np.float32) * 64) / np.float32(64)
    return fields


def readers_of(path: str, device: str, options: ReadOptions, *, peers: bool) -> dict[str, Callable[[], Any]]:
    """Make a function that reads the whole array, for each reader; peers copy to the device where there is one."""
    to_device: Callable[[Any], Any] = lambda result: result  # noqa: E731
    if device == "cuda":
        import cupy

        to_device = cupy.asarray
    ours = open_array(path, device=device, options=options)  # type: ignore[arg-type]
    readers: dict[str, Callable[[], Any]] = {OURS: lambda: ours[:]}
    if not peers:
        return readers
    threads = options.threads
    pipelines = {"zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline"}
    pipelines["zarr-fused"] = "zarr.core.codec_pipeline.FusedCodecPipeline"
    if find_spec("zarrs"):
        pipelines["zarrs"] = "zarrs.ZarrsCodecPipeline"
    for name, pipeline in pipelines.items():
        settings = {"codec_pipeline.path": pipeline, "threading.max_workers": threads}
        settings["codec_pipeline.max_workers"] = threads

        def read(settings: dict[str, Any] = settings) -> Any:
            with zarr.config.set(settings), warnings.catch_warnings():
                # zarrs leaves to zarr-python what it cannot read, which then would be measured in its name
                warnings.filterwarnings("error", "Array is unsupported by ZarrsCodecPipeline")
                return to_device(zarr.open_array(path, mode="r")[:])

        readers[name] = read
    if find_spec("tensorstore"):
        readers["tensorstore"] = _tensorstore(path, threads, to_device)
    return readers


def _tensorstore(path: str, threads: int, to_device: Callable[[Any], Any]) -> Callable[[], Any]:
    import tensorstore

    driver = "zarr3" if Path(path, "zarr.json").exists() else "zarr"
    context = {"data_copy_concurrency": {"limit": threads}, "file_io_concurrency": {"limit": threads}}
    spec = {"driver": driver, "kvstore": f"file://{path}", "context": context}
    return lambda: to_device(tensorstore.open(spec).result().read().result())


def machine(commit: str = "") -> dict[str, Any]:
    """Collect what a result depends on: processor, GPU, versions, commit."""
    report = dataclasses.asdict(probe())
    report.pop("problems", None)
    if not commit:
        here = Path(__file__).parent
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)  # noqa: S607
        commit = asked.stdout.strip() or "unknown"
    report["versions"] = {**report["versions"], **{name: metadata.version(name) for name in PEERS if find_spec(name)}}
    return {"python": platform.python_version(), "cpus": usable_cpus(), "commit": commit, **report}


def _measure(read: Callable[[], Any], source: NDArray[Any], repeats: int) -> dict[str, Any]:
    equal = _equal(read(), source)  # also warms caches, pools and compilers
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = read()
        _wait(result)
        seconds.append(time.perf_counter() - began)
        del result
    median = statistics.median(seconds)
    return {"median_s": median, "min_s": min(seconds), "gb_per_s": source.nbytes / median / 1e9, "equal": equal}


def _first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[:MAX_REASON_LENGTH]}..."


def _wait(result: Any) -> None:
    if not isinstance(result, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def _equal(result: Any, source: NDArray[Any]) -> bool:
    host = result if isinstance(result, np.ndarray) else result.get()
    return host.dtype == source.dtype and host.shape == source.shape and bool(np.array_equal(host, source))


def _write(array: zarr.Array[Any], source: NDArray[Any], threads: int) -> None:
    depth = (array.shards or array.chunks)[0]

    def write(start: int) -> None:
        array[start : start + depth] = source[start : start + depth]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(0, len(source), depth)))


def _stored_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
