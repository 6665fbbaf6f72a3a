"""How fast are stores behind a web server read, beside xarray's own Zarr engine?

A server in a process of its own (`file_server.py`) serves the stores on the loopback interface. Each is read whole by
``engine="gpuzarr"`` and by ``engine="zarr"``, through fsspec and through obstore: metadata is read once, then each read
fetches, decodes and gives one array, in device memory with ``--device cuda``. ``--latency-ms`` holds each answer back,
as a distant store would. Rates are decoded bytes over seconds; `cpu_s` is the processor time of the reading process.
Values are taken as stored (``mask_and_scale=False``): masks and scales cost both engines the same on the host.
Every reader's result is compared with zarr-python's from the folder, bit for bit.

With ``--device cuda`` one more row, ``kvikio.RemoteFile raw``, reads the encoded bytes of the same objects into device
memory by KvikIO and decodes nothing. Its rate, too, is in decoded bytes, so that rows compare: where it is not well
above ``gpuzarr``'s, reading by KvikIO would not make that faster.

Run ``python benchmarks/remote.py --device cpu --json benchmarks/results/host-remote.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
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

from xgpuzarr.options import ReadOptions

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
    add_store_arguments(parser, encodings=["zstd", "blosc-lz4", "shards"])
    parser.set_defaults(decoded_gb=0.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for encoding in arguments.encodings:
            store = write_store(Path(folder), encoding, arguments.decoded_gb)
            consolidate(store)
            source = zarr.open_array(store.path / "t", mode="r")[:]
            for latency_ms in arguments.latency_ms:
                with serving(Path(folder), latency_ms) as url:
                    readers = readers_of(f"{url}/{store.path.name}", arguments.device)
                    for reader, read in readers.items():
                        check(reader, read(), source)
                    case = {"encoding": encoding, "latency_ms": latency_ms}
                    for reader, row in measure(readers, source.nbytes, arguments.repeats).items():
                        rows.append({**case, "reader": reader, "client": CLIENTS[reader.split()[1]], **row})
                        show(rows[-1])
                    if arguments.device == "cuda":
                        row = measure_kvikio(f"{url}/{store.path.name}", store, arguments.repeats)
                        rows.append({**case, "reader": "kvikio.RemoteFile raw", **row})
                        show(rows[-1])
    write_report("remote", arguments, rows)
    if failed := [row for row in rows if "error" in row]:
        sys.exit(f"{len(failed)} readers failed")


def show(row: dict[str, Any]) -> None:
    """Print a line for a result."""
    result = f"{row['gb_per_s']:7.3f} GB/s" if "gb_per_s" in row else row.get("error") or row["left_out"]
    print(f"{row['encoding']:10} {row['latency_ms']:4.0f} ms  {row['reader']:21} {result}", flush=True)


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


def readers_of(url: str, device: str) -> dict[str, Callable[[], Any]]:
    """Make a function that reads all of `t`, for each engine and each kind of store."""
    readers: dict[str, Callable[[], Any]] = {}
    for name, store in {
        "fsspec": FsspecStore.from_url(url, read_only=True),
        "obstore": ObjectStore(obstore.store.from_url(url, client_options={"allow_http": True}), read_only=True),
    }.items():
        ours = xr.open_dataset(store, engine="gpuzarr", device=device, mask_and_scale=False, cache=False).t
        readers[f"gpuzarr {name}"] = lambda ours=ours: ours.data
        theirs = xr.open_dataset(store, engine="zarr", mask_and_scale=False, cache=False).t
        readers[f"zarr {name}"] = lambda theirs=theirs: to_device(theirs.values, device)
    return readers


def to_device(array: Any, device: str) -> Any:
    """Copy a result to the current device, if that is where results are wanted."""
    if device == "cpu":
        return array
    import cupy

    return cupy.asarray(array)


def check(reader: str, result: Any, source: np.ndarray[Any, Any]) -> None:
    """Compare a reader's result."""
    if not np.array_equal(result if isinstance(result, np.ndarray) else result.get(), source):
        raise AssertionError(f"{reader} gives other values than the store holds")


def measure_kvikio(url: str, store: Store, repeats: int) -> dict[str, Any]:
    """Time KvikIO on the encoded bytes of `t`; its error where it fails, which costs the other readers nothing."""
    import kvikio
    import kvikio.defaults

    client = {"client": f"kvikio {kvikio.__version__}"}
    if not kvikio.is_remote_file_available():
        return {**client, "left_out": "this KvikIO was built without support for web servers"}
    files = [file for file in sorted((store.path / "t").rglob("*")) if file.is_file()]
    files = [file for file in files if file.name != "zarr.json" and not file.name.startswith(".")]
    read = kvikio_reader([f"{url}/{file.relative_to(store.path)}" for file in files], files)
    # as many requests at once as the other readers make
    with kvikio.defaults.set({"num_threads": ReadOptions().concurrency}):
        try:
            check("KvikIO", read(), np.concatenate([np.fromfile(file, np.uint8) for file in files]))
            (row,) = measure({"raw": read}, store.decoded_nbytes, repeats).values()
        except RuntimeError as error:
            return {**client, "error": str(error)}
    return {**client, "encoded_nbytes": sum(file.stat().st_size for file in files), **row}


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


def measure(readers: dict[str, Callable[[], Any]], decoded_nbytes: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Time readers in turn, so that what else the machine does falls on all."""
    seconds: dict[str, list[float]] = {reader: [] for reader in readers}
    cpu_seconds: dict[str, list[float]] = {reader: [] for reader in readers}
    for _ in range(repeats):
        for reader, read in readers.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            wait_for(read())
            seconds[reader].append(time.perf_counter() - began)
            cpu_seconds[reader].append(time.process_time() - cpu_began)
    return {
        reader: {
            "median_s": round(statistics.median(times), 4),
            "min_s": round(min(times), 4),
            "max_s": round(max(times), 4),
            "cpu_s": round(statistics.median(cpu_seconds[reader]), 4),
            "gb_per_s": round(decoded_nbytes / statistics.median(times) / 1e9, 3),
        }
        for reader, times in seconds.items()
    }


def wait_for(result: Any) -> None:
    """Return when a result is complete."""
    if not isinstance(result, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    main()
