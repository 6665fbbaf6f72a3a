"""How fast are stores behind a web server read, beside xarray's own Zarr engine?

A server in a process of its own (`file_server.py`) serves the stores on the loopback interface. Each is read by
``engine="gpuzarr"`` and by ``engine="zarr"``, through fsspec and through obstore: metadata is read once, then each read
fetches, decodes and gives one array, in device memory with ``--device cuda``. ``--latency-ms`` holds each answer back,
as a distant store would. Rates are decoded bytes over seconds; `cpu_s` is the processor time of the reading process.
Values are taken as stored (``mask_and_scale=False``): masks and scales cost both engines the same on the host.
Every reader's first result, which is not timed, is compared with zarr-python's from the folder, bit for bit.

With ``--device cuda``, ``gpuzarr`` reads each store twice: its chunks by the store's client, and by KvikIO
(``remote_reader="kvikio"``) where that can be. One more row, ``kvikio.RemoteFile raw``, reads the encoded bytes of the
same objects into device memory and decodes nothing; its rate, too, is in decoded bytes, so that rows compare.

``engine="zarr"`` may read a part only (``--peer-gb``), which gives the same rate sooner. Readers take turns, and the
report is written after every read: a run that is cut off keeps what it has measured.

Run ``python benchmarks/remote.py --device cpu --json benchmarks/results/host-remote.json``, and on a GPU ``python
benchmarks/remote.py --decoded-gb 4 --peer-gb 0.5 --repeats 3 --json benchmarks/results/h200-remote.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore.store
import xarray as xr
import zarr
from harness import Store, add_common_arguments, add_store_arguments, write_report, write_store
from zarr.errors import ZarrUserWarning
from zarr.storage import FsspecStore, ObjectStore

from xgpuzarr.diagnostics import collect, total
from xgpuzarr.errors import UnsupportedError, XGpuZarrError
from xgpuzarr.options import ReadOptions
from xgpuzarr.readers.kvikio import set_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIENTS = {
    "fsspec": f"fsspec {version('fsspec')}, aiohttp {version('aiohttp')}",
    "obstore": f"obstore {version('obstore')}",
}


def main() -> None:
    """Run every case, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    add_store_arguments(parser, encodings=["shards", "zstd", "blosc-lz4"], decoded_gb=0.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0])
    parser.add_argument("--peer-gb", type=float, help="decoded GB that engine='zarr' reads; all by default")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for encoding in arguments.encodings:
            store = write_store(Path(folder), encoding, arguments.decoded_gb)
            consolidate(store)
            for latency_ms in arguments.latency_ms:
                with serving(Path(folder), latency_ms) as url:
                    readers = readers_of(f"{url}/{store.path.name}", store, arguments)
                    new = [{"encoding": encoding, "latency_ms": latency_ms, **reader.row} for reader in readers]
                    for _ in measure(readers, new, arguments.repeats):
                        write_report("remote", arguments, rows + new)
                rows += new
                for row in new:
                    show(row)
            shutil.rmtree(store.path)
    if failed := [row for row in rows if "error" in row]:
        sys.exit(f"{len(failed)} readers failed")


@dataclass(slots=True)
class Reader:
    """One way to read a store.

    Attributes
    ----------
    row
        What is known of it before it has read.
    read
        Gives the result; None if this reader cannot read the store.
    nbytes
        Decoded size of what it reads, in bytes.
    check
        Raises if a result is not what the store holds.
    """

    row: dict[str, Any]
    read: Callable[[], Any] | None = None
    nbytes: int = 0
    check: Callable[[Any], None] = lambda _: None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def show(row: dict[str, Any]) -> None:
    """Print a line for a result."""
    result = f"{row['gb_per_s']:7.3f} GB/s" if "gb_per_s" in row else row.get("error") or row["left_out"]
    reader = " ".join(filter(None, [row["reader"], row.get("remote_reader")]))
    print(f"{row['encoding']:10} {row['latency_ms']:4.0f} ms  {reader:24} {result}", flush=True)


def consolidate(store: Store) -> None:
    """Put all metadata in one document: web servers list no folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZarrUserWarning)  # version 3 of the format has no word on it yet
        zarr.consolidate_metadata(store.path)


@contextlib.contextmanager
def serving(folder: Path, latency_ms: float) -> Iterator[str]:
    """Serve a folder from another process; gives its URL."""
    command = [sys.executable, Path(__file__).with_name("file_server.py"), folder, "--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def readers_of(url: str, store: Store, arguments: argparse.Namespace) -> list[Reader]:
    """Readers of all of `t`, or of as much of it as is enough for a rate."""
    fields = zarr.open_array(store.path / "t", mode="r")[: len(store.source)]

    def check(result: Any) -> None:
        for start in range(0, len(result), len(fields)):
            part = result[start : start + len(fields)]
            if not np.array_equal(part if isinstance(part, np.ndarray) else part.get(), fields):
                raise AssertionError("other values than the store holds")

    def make(name: str, client: str, array: xr.DataArray, read: Callable[[], Any], **facts: Any) -> Reader:
        return Reader({"reader": f"{name} {client}", "client": CLIENTS[client], **facts}, read, array.nbytes, check)

    readers = []
    n_fields = store.n_fields(arguments.peer_gb or store.decoded_nbytes / 1e9)
    for client, remote in {
        "fsspec": FsspecStore.from_url(url, read_only=True),
        "obstore": ObjectStore(obstore.store.from_url(url, client_options={"allow_http": True}), read_only=True),
    }.items():
        for remote_reader in ("client", "kvikio") if arguments.device == "cuda" else ("client",):
            facts = {"remote_reader": remote_reader} if arguments.device == "cuda" else {}
            options = ReadOptions(remote_reader=remote_reader)
            try:
                ours = open_dataset(remote, "gpuzarr", device=arguments.device, options=options).t
            except UnsupportedError as error:
                readers.append(Reader({"reader": f"gpuzarr {client}", **facts, "left_out": str(error)}))
            else:
                readers.append(make("gpuzarr", client, ours, lambda ours=ours: ours.data, **facts))
        theirs = open_dataset(remote, "zarr").t[:n_fields]
        readers.append(make("zarr", client, theirs, lambda t=theirs: to_device(t.values, arguments.device)))
    return readers + ([raw_reader(url, store)] if arguments.device == "cuda" else [])


def open_dataset(remote: Any, engine: str, **kwargs: Any) -> xr.Dataset:
    """Open a store for reads that keep nothing."""
    return xr.open_dataset(remote, engine=engine, mask_and_scale=False, cache=False, **kwargs)


def to_device(array: Any, device: str) -> Any:
    """Copy a result to the current device, if that is where results are wanted."""
    if device == "cpu":
        return array
    import cupy

    return cupy.asarray(array)


def raw_reader(url: str, store: Store) -> Reader:
    """Reader of the encoded bytes of `t`, by KvikIO's remote files."""
    import kvikio

    row = {"reader": "kvikio.RemoteFile raw", "client": f"kvikio {kvikio.__version__}"}
    if not kvikio.is_remote_file_available():
        return Reader({**row, "left_out": "this KvikIO was built without support for web servers"})
    files = [file for file in sorted((store.path / "t").rglob("*")) if file.is_file()]
    files = [file for file in files if file.name != "zarr.json" and not file.name.startswith(".")]
    set_threads(ReadOptions().concurrency)  # as many requests at once as the other readers make

    def check(result: Any) -> None:
        if not np.array_equal(result.get(), np.concatenate([np.fromfile(file, np.uint8) for file in files])):
            raise AssertionError("other bytes than the store holds")

    read = kvikio_reader([f"{url}/{file.relative_to(store.path)}" for file in files], files)
    row["encoded_nbytes"] = sum(file.stat().st_size for file in files)
    return Reader(row, read, store.decoded_nbytes, check)


def kvikio_reader(urls: list[str], files: list[Path]) -> Callable[[], Any]:
    """Make a function that reads objects side by side into one array on the device.

    Sizes are told to KvikIO, which would ask the server for each otherwise: a read by it could not be faster.
    """
    import cupy
    import kvikio

    nbytes = [file.stat().st_size for file in files]
    at = np.cumsum([0, *nbytes]).tolist()

    def read() -> Any:
        slab = cupy.empty(at[-1], np.uint8)
        cupy.cuda.get_current_stream().synchronize()  # KvikIO's streams wait for no other
        remote = [kvikio.RemoteFile.open_http(url, size) for url, size in zip(urls, nbytes, strict=True)]
        futures, errors = [], []
        try:
            for file, start, size in zip(remote, at, nbytes, strict=False):
                futures.append(file.pread(slab[start : start + size], size))
        except RuntimeError as error:
            errors.append(error)
        for future in futures:  # all of them: none may write to the slab once it is let go
            try:
                future.get()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return slab

    return read


def measure(readers: list[Reader], rows: list[dict[str, Any]], repeats: int) -> Iterator[None]:
    """Time readers in turn, so that what else the machine does falls on all; `rows` tell what is known after each read.

    A reader that fails is left out from then on: that costs the others nothing.
    """
    for number in range(repeats + 1):
        for reader, row in zip(readers, rows, strict=True):
            if reader.read is None or "error" in row:
                continue
            with collect() as reports:
                began, cpu_began = time.perf_counter(), time.process_time()
                try:
                    result = reader.read()
                    wait_for(result)
                except (RuntimeError, XGpuZarrError) as error:
                    row["error"] = str(error)
                    yield
                    continue
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
            if number == 0:
                reader.check(result)
                del result
                continue
            reader.seconds.append(seconds)
            reader.cpu_seconds.append(cpu_seconds)
            if "remote_reader" in row:
                row["n_again"] = row.get("n_again", 0) + total(reports).n_again
            row.update(summary(reader))
            del result
            yield


def summary(reader: Reader) -> dict[str, Any]:
    """What a reader has needed so far."""
    median_s = statistics.median(reader.seconds)
    return {
        "read_nbytes": reader.nbytes,
        "median_s": round(median_s, 4),
        "min_s": round(min(reader.seconds), 4),
        "max_s": round(max(reader.seconds), 4),
        "cpu_s": round(statistics.median(reader.cpu_seconds), 4),
        "gb_per_s": round(reader.nbytes / median_s / 1e9, 3),
    }


def wait_for(result: Any) -> None:
    """Return when a result is complete."""
    if not isinstance(result, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    main()
