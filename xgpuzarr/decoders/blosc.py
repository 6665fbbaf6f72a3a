"""How does a batch of Blosc chunks become decoded bytes on the device?

1. Headers, block offsets and stream sizes of all chunks are read and checked: a list of streams for the whole batch.
   The host waits once, for the sums of the headers, which size the list and scratch.
2. Every stream goes to its slot in a scratch buffer: LZ4, Snappy and BloscLZ streams by our own kernel, which cannot
   leave its buffers and takes about half of nvCOMP's time for LZ4 (``benchmarks/kernels.py``); zlib and Zstandard
   streams by nvCOMP, one call each, with a guard zone behind every output; raw streams by a copy.
3. The shuffle of every block is undone on its way from scratch to the output.

Chunks of one batch may differ in codec, shuffle, blocksize and typesize. How many streams each algorithm has is known
on the device alone, so nvCOMP is given all of them, with a dummy frame in the place of what is not its own.

Source: c-blosc's ``README_CHUNK_FORMAT.rst``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.kernels import launch, launch_blosc, launch_checksums, launch_frames
from xgpuzarr.kernels.arguments import check_bytes, device_columns
from xgpuzarr.kernels.launch_blosc import GUARD_NBYTES, Kind, StreamRow, Total
from xgpuzarr.plan.blosc_header import Problem

if TYPE_CHECKING:
    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = ["decode_blosc"]

_ALGORITHMS = {Kind.DEFLATE: "deflate", Kind.ZSTD: "zstd"}
"""What nvCOMP decodes, by its names; our kernel takes the others."""

_INPUT_ALIGNMENT = 8  # a multiple of what nvCOMP asks of deflate's input


def decode_blosc(
    encoded: cupy.ndarray,
    offset: Column,
    nbytes: Column,
    *,
    chunk_nbytes: int,
    out: cupy.ndarray,
    status: cupy.ndarray,
    out_offset: Column | None = None,
) -> cupy.ndarray:
    """Decode a batch of Blosc chunks on the current stream.

    Waits once, until the stream has come to the headers; returns before the decoding has run.

    Parameters
    ----------
    encoded
        Contiguous bytes, uint8, on the device.
    offset, nbytes
        int64 ``(n_chunks,)``: where each chunk lies in `encoded`, in bytes.
    chunk_nbytes
        Decoded size of every chunk, in bytes.
    out
        Contiguous bytes, uint8, on the device.
    status
        From `xgpuzarr.kernels.launch.new_status`.
    out_offset
        int64 ``(n_chunks,)``: where each chunk goes in `out`, in bytes; by default chunk c to ``c * chunk_nbytes``.

    Returns
    -------
    cupy.ndarray
        int32 ``(n_chunks,)``: a `xgpuzarr.plan.blosc_header.Problem` for each chunk, valid when the stream has passed.
        What `out` holds of a chunk with a problem means nothing. Not every such chunk is corrupt: decode it on the host
        to tell.
    """
    import cupy

    check_bytes(encoded, "encoded")
    check_bytes(out, "out")
    n_chunks = len(offset)
    if n_chunks == 0:
        return cupy.zeros(0, dtype=np.int32)
    if out_offset is None:
        out_offset = np.arange(n_chunks, dtype=np.int64) * chunk_nbytes
    offset, nbytes, out_offset = device_columns(n_chunks, offset, nbytes, out_offset)
    headers, totals, problem = launch_blosc.read_headers(encoded, offset, nbytes, chunk_nbytes)
    if chunk_nbytes == 0:
        return problem
    counts = [int(count) for count in totals.tolist()]
    scratch = cupy.empty(counts[Total.SCRATCH], dtype=np.uint8)
    if n_streams := counts[Total.STREAMS]:
        table = launch_blosc.read_streams(
            encoded, offset, nbytes, headers=headers, n_streams=n_streams, problem=problem
        )
        streams = _Streams(encoded, table, scratch, counts[Total.MAX_STREAM], problem, status)
        streams.decode({kind for kind in Kind if kind < Kind.RAW and counts[Total.FIRST_CODEC + kind]})
    launch_blosc.unshuffle_chunks(
        encoded,
        offset,
        scratch=scratch,
        headers=headers,
        out=out,
        chunk_nbytes=chunk_nbytes,
        out_offset=out_offset,
        problem=problem,
        status=status,
    )
    return problem


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """All streams of a batch, on their way to scratch, and what is found wrong with their chunks on that way."""

    encoded: cupy.ndarray
    table: cupy.ndarray
    scratch: cupy.ndarray
    max_stream_nbytes: int
    problem: cupy.ndarray
    status: cupy.ndarray

    def decode(self, kinds: set[Kind]) -> None:
        """Decode every stream; `kinds` are those that occur, raw streams aside."""
        import cupy

        launch_blosc.copy_streams(self.encoded, self.scratch, self.table)
        for kind in kinds - _ALGORITHMS.keys():
            launch_blosc.decode_streams(self.encoded, self.scratch, self.table, kind, self.problem)
        if not kinds & _ALGORITHMS.keys():
            return
        overrun = cupy.zeros(1, dtype=np.int32)
        for kind in kinds & _ALGORITHMS.keys():
            self._decode_with_nvcomp(kind, overrun)
        # one broken guard zone, and any output may be overwritten
        cupy.maximum(self.problem, overrun, out=self.problem)

    def _decode_with_nvcomp(self, kind: Kind, overrun: cupy.ndarray) -> None:
        """Decode the streams of one kind, of chunks without a problem so far, and look for damage around them."""
        import cupy

        skip = launch_blosc.select_streams(self.table, kind, self.problem)
        source, source_offset = self._aligned(skip) if kind == Kind.DEFLATE else (self.encoded, self._row("SOURCE"))
        columns = launch_frames.point_frames(
            _ALGORITHMS[kind],
            source,
            source_offset,
            self._row("ENCODED"),
            out=self.scratch,
            out_offset=self._row("DEST"),
            out_nbytes=self._row("DECODED"),
            skip=skip,
            guard_nbytes=GUARD_NBYTES,
            status=self.status,
        )
        actual_nbytes, statuses = nvcomp.decompress_batch(
            _ALGORITHMS[kind],
            *columns,
            max_chunk_nbytes=self.max_stream_nbytes,
            total_nbytes=self.scratch.nbytes,
            stream=cupy.cuda.get_current_stream(),
        )
        launch_frames.judge_frames(
            actual_nbytes,
            statuses,
            out=self.scratch,
            out_offset=self._row("DEST"),
            out_nbytes=self._row("DECODED"),
            skip=skip,
            guard_nbytes=GUARD_NBYTES,
            code=Problem.STREAM,
            problem=self.problem,
            overrun=overrun,
            chunk=self._row("CHUNK"),
        )
        if kind == Kind.DEFLATE:
            self._check_adler32(skip)

    def _aligned(self, skip: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Copy streams to where each starts at a multiple of `_INPUT_ALIGNMENT`; the buffer and the new offsets.

        Each moves up to the next multiple. None runs into the next: at least the 10 bytes of a checksum, a size and a
        zlib header lie between two.
        """
        import cupy

        source, nbytes = self._row("SOURCE"), cupy.where(skip == 0, self._row("ENCODED"), 0)
        aligned = cupy.empty(self.encoded.nbytes + _INPUT_ALIGNMENT, dtype=np.uint8)
        places = (source + _INPUT_ALIGNMENT - 1) & -_INPUT_ALIGNMENT
        launch.copy_bytes(
            self.encoded,
            aligned,
            source_offset=cupy.where(skip == 0, source, 0),
            out_offset=cupy.where(skip == 0, places, 0),
            nbytes=nbytes,
            mean_nbytes=aligned.nbytes // nbytes.size,
            status=self.status,
        )
        return aligned, places

    def _check_adler32(self, skip: cupy.ndarray) -> None:
        """Compare the checksum behind each zlib stream with that of what it decoded to."""
        import cupy

        nbytes = cupy.where(skip == 0, self._row("DECODED"), 0)
        launch_checksums.compare(
            launch_checksums.adler32(self.scratch, self._row("DEST"), nbytes, status=self.status),
            self.encoded,
            self._row("SOURCE") + self._row("ENCODED"),
            is_big_endian=True,
            skip=skip,
            code=Problem.STREAM,
            problem=self.problem,
            chunk=self._row("CHUNK"),
        )

    def _row(self, name: str) -> cupy.ndarray:
        return self.table[StreamRow[name]]
