"""How fast is each kernel, and how fast do LZ4 streams decode: our kernel beside nvCOMP?

Fields like a reanalysis, encoded by Blosc with LZ4 and byte shuffle, are repeated on the device until there are enough
streams. Times are taken by CUDA events around the launches of one case, median of several; rates are decoded bytes
(bytes written, for copies and fills) over that time. What is decoded is compared with the source.

Run ``python benchmarks/kernels.py --json benchmarks/results/kernels.json``; it needs a GPU and takes half a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numcodecs import Blosc

from xgpuzarr.bench import machine, make_fields
from xgpuzarr.decoders import nvcomp
from xgpuzarr.decoders.blosc import decode_blosc
from xgpuzarr.kernels import launch, launch_blosc, launch_frames
from xgpuzarr.kernels.launch_blosc import GUARD_NBYTES, Kind, StreamRow, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

type Row = dict[str, Any]

STREAM_KIB = (16, 64, 128)
N_STREAMS = (2048, 8192, 24576)
MAX_DECODED_GB = 3.5


def main() -> None:
    """Run every case, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--commit", default="", help="version control commit to record; asked of git by default")
    arguments = parser.parse_args()
    timer = functools.partial(milliseconds, repeats=arguments.repeats)
    rows = []
    for row in cases(make_fields(16), timer):
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        report = {"benchmark": "kernels", "repeats": arguments.repeats, "machine": machine(arguments.commit)}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report | {"results": rows}, indent=1) + "\n")


def cases(fields: NDArray[np.float32], timer: Callable[[Callable[[], object]], float]) -> Iterator[Row]:
    """Every case in turn: what was timed, for how many bytes, and how long it took."""
    yield from copies(timer)
    for codec in ("lz4", "blosclz", "zstd", "zlib"):
        for stream_kib in STREAM_KIB if codec == "lz4" else (64,):
            for n_streams in N_STREAMS if codec == "lz4" else (2048,):
                if n_streams * stream_kib * 1024 < MAX_DECODED_GB * 1e9:
                    yield from streams(Batch.make(fields, codec, stream_kib, n_streams), timer)
    yield from streams(Batch.make(fields.astype(np.float64), "lz4", 64, 2048), timer)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of `call` on the current stream; the first call, which compiles and allocates, is not counted."""
    call()
    times = []
    for _ in range(repeats):
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(cupy.cuda.get_elapsed_time(began, ended))
    return statistics.median(times)


def result(kernel: str, nbytes: int, time_ms: float, **details: object) -> Row:
    """One row of the report."""
    return {"kernel": kernel, **details, "ms": round(time_ms, 3), "gb_per_s": round(nbytes / time_ms / 1e6, 1)}


def copies(timer: Callable[[Callable[[], object]], float]) -> Iterator[Row]:
    """Placing 384 chunks of 721 x 1440 float32, filling as many, and guard zones behind 24576 outputs."""
    n_chunks, shape = 384, (1, 721, 1440)
    out = cupy.empty((n_chunks, *shape[1:]), dtype=np.float32)
    batch = cupy.zeros((n_chunks, out.nbytes // n_chunks), dtype=np.uint8)
    out_start = cupy.asarray(np.arange(n_chunks)[:, None] * [1, 0, 0])
    whole = cupy.asarray(np.broadcast_to(np.array(shape), (n_chunks, 3)).copy())
    part = cupy.asarray(np.broadcast_to(np.array([1, 700, 1001]), (n_chunks, 3)).copy())
    status = launch.new_status()
    for name, count, inner in (("whole chunks", whole, [0, 0, 0]), ("odd regions", part, [0, 21, 439])):
        place = functools.partial(
            launch.scatter_slices,
            batch,
            out,
            out_start=out_start,
            count=count,
            inner_start=cupy.asarray(np.broadcast_to(np.array(inner), (n_chunks, 3)).copy()),
            step=[1, 1, 1],
            chunk_shape=shape,
            chunk_strides=[shape[1] * shape[2], shape[2], 1],
            status=status,
        )
        yield result("scatter_slices", int(count[0].prod()) * n_chunks * 4, timer(place), case=name)
    fill = functools.partial(
        launch.fill_slices, out, np.float32(np.nan), out_start=out_start, count=whole, status=status
    )
    yield result("fill_slices", out.nbytes, timer(fill))
    offset = cupy.arange(24576, dtype=np.int64) * 65600 + 65536
    flat = batch.reshape(-1)
    offset = offset[offset + GUARD_NBYTES <= flat.nbytes]
    guards = {"buffer": flat, "offset": offset, "guard_nbytes": GUARD_NBYTES}
    guard_nbytes = offset.size * GUARD_NBYTES
    yield result("write_guards", guard_nbytes, timer(lambda: launch.write_guards(**guards, status=status)))
    yield result("check_guards", guard_nbytes, timer(lambda: launch.check_guards(**guards)))
    launch.check_status(status, "copies")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blosc chunks in one buffer on the device.

    Attributes
    ----------
    codec, stream_kib
        Compressor, and decoded size of a stream, in KiB.
    encoded, offset, nbytes
        As `decode_blosc` takes them.
    chunk_nbytes
        Decoded size of a chunk, in bytes.
    typesize
        Bytes of an element.
    source
        Decoded chunks, uint8 ``(n_distinct, chunk_nbytes)``, which repeat.
    """

    codec: str
    stream_kib: int
    encoded: cupy.ndarray
    offset: cupy.ndarray
    nbytes: cupy.ndarray
    chunk_nbytes: int
    typesize: int
    source: cupy.ndarray

    @classmethod
    def make(cls, fields: NDArray[Any], codec: str, stream_kib: int, n_streams: int) -> Batch:
        """About `n_streams` streams: as many chunks, each a field, as that takes."""
        compressor = Blosc(codec, 5, Blosc.SHUFFLE, stream_kib << 10)  # c-blosc multiplies it by the splits
        chunks = [bytes(compressor.encode(field)) for field in fields]
        streams_of_chunk = fields[0].nbytes // (stream_kib << 10)
        n_repeats = max(1, round(n_streams / (streams_of_chunk * len(chunks))))
        nbytes = np.array([len(chunk) for chunk in chunks] * n_repeats)
        one = cupy.asarray(np.frombuffer(b"".join(chunks), np.uint8))
        return cls(
            codec,
            stream_kib,
            cupy.tile(one, n_repeats),
            cupy.asarray(np.cumsum(nbytes) - nbytes),
            cupy.asarray(nbytes),
            fields[0].nbytes,
            fields.itemsize,
            cupy.asarray(fields).view(np.uint8).reshape(len(fields), -1),
        )


def streams(batch: Batch, timer: Callable[[Callable[[], object]], float]) -> Iterator[Row]:
    """Each step of decoding a batch on its own, then all of them."""
    places = (batch.encoded, batch.offset, batch.nbytes)
    headers, totals, problem = launch_blosc.read_headers(*places, batch.chunk_nbytes)
    counts = totals.tolist()
    n_streams, kind = counts[Total.STREAMS], Kind(int(np.argmax(counts[Total.FIRST_CODEC :])))
    details = {"codec": batch.codec, "stream_kib": batch.stream_kib, "streams": n_streams, "typesize": batch.typesize}
    table = launch_blosc.read_streams(*places, headers=headers, n_streams=n_streams, problem=problem)
    is_kind = table[StreamRow.KIND] == int(kind)
    details["compressed"] = int(is_kind.sum())
    kind_nbytes = int(table[StreamRow.DECODED][is_kind].sum())
    scratch = cupy.zeros(counts[Total.SCRATCH], dtype=np.uint8)
    out = cupy.empty(len(batch.offset) * batch.chunk_nbytes, dtype=np.uint8)
    status = launch.new_status()

    def read() -> None:
        headers, _, problem = launch_blosc.read_headers(*places, batch.chunk_nbytes)
        launch_blosc.read_streams(*places, headers=headers, n_streams=n_streams, problem=problem)

    def unshuffle() -> None:
        launch_blosc.unshuffle_chunks(
            batch.encoded,
            batch.offset,
            scratch=scratch,
            headers=headers,
            out=out,
            chunk_nbytes=batch.chunk_nbytes,
            problem=problem,
            status=status,
        )

    def whole() -> None:
        decode_blosc(*places, chunk_nbytes=batch.chunk_nbytes, out=out, status=status)

    yield result("read_headers + read_streams", out.nbytes, timer(read), **details)
    copy = functools.partial(launch_blosc.copy_streams, batch.encoded, scratch, table)
    yield result("copy_streams", out.nbytes - kind_nbytes, timer(copy), **details)
    if kind in (Kind.BLOSCLZ, Kind.LZ4):
        own = functools.partial(launch_blosc.decode_streams, batch.encoded, scratch, table, kind, problem)
        yield result("decode_streams", kind_nbytes, timer(own), **details)
    if kind in (Kind.LZ4, Kind.ZSTD):
        call = nvcomp_call(batch, table, kind, problem, scratch, counts[Total.MAX_STREAM])
        yield result("nvcomp", kind_nbytes, timer(call), **details)
    yield result("unshuffle_chunks", out.nbytes, timer(unshuffle), **details)
    out[:] = 0
    time_ms = timer(whole)
    same = bool((out.reshape(-1, *batch.source.shape) == batch.source).all())
    yield result("decode_blosc", out.nbytes, time_ms, **details, equal=same)
    launch.check_status(status, "streams")


def nvcomp_call(
    batch: Batch, table: cupy.ndarray, kind: Kind, problem: cupy.ndarray, scratch: cupy.ndarray, max_stream_nbytes: int
) -> Callable[[], object]:
    """Decoding of the streams of one kind, and of dummies in the place of the others, by nvCOMP alone."""
    algorithm = {Kind.LZ4: "lz4", Kind.ZSTD: "zstd"}[kind]
    columns = launch_frames.point_frames(
        algorithm,
        batch.encoded,
        table[StreamRow.SOURCE],
        table[StreamRow.ENCODED],
        out=scratch,
        out_offset=table[StreamRow.DEST],
        out_nbytes=table[StreamRow.DECODED],
        skip=launch_blosc.select_streams(table, kind, problem),
        guard_nbytes=GUARD_NBYTES,
        status=launch.new_status(),
    )

    def call() -> None:
        nvcomp.decompress_batch(
            algorithm,
            *columns,
            max_chunk_nbytes=max_stream_nbytes,
            total_nbytes=scratch.nbytes,
            stream=cupy.cuda.get_current_stream(),
        )

    return call


if __name__ == "__main__":
    main()
