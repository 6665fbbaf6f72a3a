"""How does a batch of Blosc chunks become decoded bytes on the device?

1. Headers, block offsets and stream sizes of all chunks are read and checked: a list of streams for the whole batch.
2. Every stream goes to its slot in a scratch buffer: BloscLZ streams by our own kernel, which cannot leave its buffers;
   the others by nvCOMP, one call an algorithm, with a guard zone behind each; raw streams by a copy. Our kernel takes
   LZ4 and Snappy too, if asked to.
3. The shuffle of every block is undone on its way from scratch to the output.

Chunks of one batch may differ in codec, shuffle, blocksize and typesize.

Source: c-blosc's ``README_CHUNK_FORMAT.rst``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from xgpuzarr.kernels import launch, launch_blosc, launch_checksums
from xgpuzarr.kernels.arguments import check_bytes, device_column
from xgpuzarr.kernels.launch_blosc import GUARD_NBYTES, HeaderRow, Kind, StreamRow
from xgpuzarr.plan.blosc_header import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = ["DecodeFrames", "FrameBatch", "decode_blosc"]

_INPUT_ALIGNMENT = 8  # a multiple of what nvCOMP asks of deflate's input


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames of one algorithm that lie in one buffer, and their places in another; all on the device, in bytes.

    Attributes
    ----------
    source, out
        Contiguous bytes, uint8.
    source_offset, source_nbytes, out_offset, out_nbytes
        int64 ``(n_frames,)``.
    max_frame_nbytes, total_nbytes
        At least the largest decoded size, and the sum of all.
    """

    algorithm: Literal["deflate", "lz4", "snappy", "zstd"]
    source: cupy.ndarray
    source_offset: cupy.ndarray
    source_nbytes: cupy.ndarray
    out: cupy.ndarray
    out_offset: cupy.ndarray
    out_nbytes: cupy.ndarray
    max_frame_nbytes: int
    total_nbytes: int


_ALGORITHMS: dict[Kind, Literal["deflate", "lz4", "snappy", "zstd"]] = {
    Kind.LZ4: "lz4",
    Kind.SNAPPY: "snappy",
    Kind.DEFLATE: "deflate",
    Kind.ZSTD: "zstd",
}

type DecodeFrames = Callable[[FrameBatch], tuple[cupy.ndarray, cupy.ndarray]]
"""Decodes frames; returns the decoded size of each, in bytes, and its status, 0 for success."""


def decode_blosc(
    encoded: cupy.ndarray,
    offset: Column,
    nbytes: Column,
    *,
    chunk_nbytes: int,
    out: cupy.ndarray,
    status: cupy.ndarray,
    out_offset: Column | None = None,
    lz_decoder: Literal["nvcomp", "own"] = "nvcomp",
    decode_frames: DecodeFrames | None = None,
) -> cupy.ndarray:
    """Decode a batch of Blosc chunks on the current stream.

    Returns before the decoding has run, but waits for the headers, and once more for each algorithm of nvCOMP.

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
    lz_decoder
        Who decodes LZ4 and Snappy streams: nvCOMP, or the kernel that decodes BloscLZ.
    decode_frames
        What stands in for nvCOMP.

    Returns
    -------
    cupy.ndarray
        int32 ``(n_chunks,)``: a `xgpuzarr.plan.blosc_header.Problem` for each chunk, valid when the stream has passed.
        What `out` holds of a chunk with a problem means nothing.
    """
    import cupy

    check_bytes(encoded, "encoded")
    check_bytes(out, "out")
    n_chunks = len(offset)
    if n_chunks == 0:
        return cupy.zeros(0, dtype=np.int32)
    offset, nbytes = device_column(offset, (n_chunks,)), device_column(nbytes, (n_chunks,))
    headers, problem = launch_blosc.read_headers(encoded, offset, nbytes, chunk_nbytes)
    if chunk_nbytes == 0:
        return problem
    batch = _Batch(encoded, offset, nbytes, headers, problem, status)
    own = {Kind.BLOSCLZ} if lz_decoder == "nvcomp" else {Kind.BLOSCLZ, Kind.LZ4, Kind.SNAPPY}
    scratch, scratch_offset = batch.decode_streams(own, decode_frames or _decode_with_nvcomp)
    launch_blosc.unshuffle_chunks(
        encoded,
        offset,
        scratch=scratch,
        scratch_offset=scratch_offset,
        headers=headers,
        out=out,
        chunk_nbytes=chunk_nbytes,
        out_offset=out_offset,
        problem=problem,
        status=status,
    )
    return problem


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Chunks with their headers read, and what is found wrong with them on the way."""

    encoded: cupy.ndarray
    offset: cupy.ndarray
    nbytes: cupy.ndarray
    headers: cupy.ndarray
    problem: cupy.ndarray
    status: cupy.ndarray

    def decode_streams(self, own: set[Kind], decode: DecodeFrames) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Decode every stream of every chunk, those of kinds in `own` by our kernel.

        Returns scratch, and where each chunk's part of it starts.
        """
        import cupy

        sizes = self.headers[HeaderRow.N_BLOCKS :]
        sums = cupy.cumsum(sizes, axis=1)
        has_streams = self.headers[HeaderRow.N_STREAMS] > 0
        max_blocksize = cupy.where(has_streams, self.headers[HeaderRow.BLOCKSIZE], 0).max()
        numbers = cupy.concatenate([sums[:, -1], max_blocksize[None]]).tolist()
        n_blocks, n_streams, scratch_nbytes, max_stream_nbytes = (int(number) for number in numbers)
        scratch = cupy.empty(scratch_nbytes, dtype=np.uint8)
        if n_streams:
            table, block_start, block_end = launch_blosc.read_streams(
                self.encoded,
                self.offset,
                self.nbytes,
                headers=self.headers,
                firsts=sums - sizes,
                n_blocks=n_blocks,
                n_streams=n_streams,
                problem=self.problem,
            )
            _find_overlaps(block_start, block_end, self.problem)
            streams = _Streams(self.encoded, table, scratch, max_stream_nbytes, self.problem, self.status)
            streams.copy_raw()
            launch_blosc.decode_streams(self.encoded, scratch, table, self.problem, kinds=own)
            for kind in _ALGORITHMS.keys() - own:
                streams.decode_frames(kind, decode)
        return scratch, (sums - sizes)[-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """All streams of a batch, on their way to scratch."""

    encoded: cupy.ndarray
    table: cupy.ndarray
    scratch: cupy.ndarray
    max_stream_nbytes: int
    problem: cupy.ndarray
    status: cupy.ndarray

    def copy_raw(self) -> None:
        """Copy the streams that were stored as they are."""
        import cupy

        is_raw = self.table[StreamRow.KIND] == int(Kind.RAW)
        launch.copy_bytes(
            self.encoded,
            self.scratch,
            source_offset=cupy.where(is_raw, self.table[StreamRow.SOURCE], 0),
            out_offset=self.table[StreamRow.DEST],
            nbytes=cupy.where(is_raw, self.table[StreamRow.DECODED], 0),
            mean_nbytes=self.scratch.nbytes // self.table.shape[1],
            status=self.status,
        )

    def decode_frames(self, kind: Kind, decode: DecodeFrames) -> None:
        """Decode the streams of one kind, of chunks without a problem so far, and look for damage around them."""
        import cupy

        is_sound = self.problem[self.table[StreamRow.CHUNK]] == 0
        columns = cupy.flatnonzero((self.table[StreamRow.KIND] == int(kind)) & is_sound)
        if columns.size == 0:
            return
        source_offset, source_nbytes, dest, decoded_nbytes, chunk, _ = self.table[:, columns]
        encoded = self.encoded
        if kind == Kind.DEFLATE:
            encoded, source_offset = self._aligned(source_offset, source_nbytes)
        guard = dest + decoded_nbytes
        launch.write_guards(self.scratch, guard, GUARD_NBYTES, status=self.status)
        actual_nbytes, statuses = decode(
            FrameBatch(
                _ALGORITHMS[kind],
                encoded,
                source_offset,
                source_nbytes,
                self.scratch,
                dest,
                decoded_nbytes,
                self.max_stream_nbytes,
                self.scratch.nbytes,
            )
        )
        broken = launch.check_guards(self.scratch, guard, GUARD_NBYTES)
        failed = (statuses != 0) | (actual_nbytes.astype(np.int64) != decoded_nbytes) | (broken != 0)
        if kind == Kind.DEFLATE:
            trailer = self.table[StreamRow.SOURCE, columns] + source_nbytes
            found = launch_checksums.adler32(self.scratch, dest, decoded_nbytes, status=self.status)
            failed |= found != _big_endian_uint32(self.encoded, trailer)
        _mark(self.problem, chunk, failed, Problem.STREAM)

    def _aligned(self, offset: cupy.ndarray, nbytes: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Copy streams to where each starts at a multiple of `_INPUT_ALIGNMENT`; the buffer and the new offsets."""
        import cupy

        room = (nbytes + _INPUT_ALIGNMENT - 1) // _INPUT_ALIGNMENT * _INPUT_ALIGNMENT
        ends = cupy.cumsum(room)
        aligned = cupy.empty(int(ends[-1]), dtype=np.uint8)
        launch.copy_bytes(
            self.encoded,
            aligned,
            source_offset=offset,
            out_offset=ends - room,
            nbytes=nbytes,
            mean_nbytes=aligned.nbytes // len(nbytes),
            status=self.status,
        )
        return aligned, ends - room


def _big_endian_uint32(buffer: cupy.ndarray, offset: cupy.ndarray) -> cupy.ndarray:
    import cupy

    data = buffer[offset[:, None] + cupy.arange(4)].astype(np.uint32)
    return data[:, 0] << 24 | data[:, 1] << 16 | data[:, 2] << 8 | data[:, 3]


def _find_overlaps(block_start: cupy.ndarray, block_end: cupy.ndarray, problem: cupy.ndarray) -> None:
    """Blocks of a chunk may come in any order (c-blosc's threads write them so), but share no byte."""
    import cupy

    order = cupy.argsort(block_start)
    start, end = block_start[order][1:], block_end[order][:-1]
    chunk = start >> 32
    _mark(problem, chunk, (end > start) & (problem[chunk] == 0), Problem.OVERLAP)


def _mark(problem: cupy.ndarray, chunk: cupy.ndarray, is_wrong: cupy.ndarray, what: Problem) -> None:
    """Note a problem of chunks: ``is_wrong`` says it of streams or blocks, ``chunk`` whose they are."""
    import cupy

    cupy.maximum.at(problem, chunk, is_wrong.astype(np.int32) * int(what))  # cupy takes no subclass of int


def _decode_with_nvcomp(frames: FrameBatch) -> tuple[cupy.ndarray, cupy.ndarray]:
    import cupy

    from xgpuzarr.decoders import nvcomp

    return nvcomp.decompress_batch(
        frames.algorithm,
        frames.source_offset.astype(np.uint64) + np.uint64(frames.source.data.ptr),
        frames.source_nbytes.astype(np.uint64),
        frames.out_offset.astype(np.uint64) + np.uint64(frames.out.data.ptr),
        frames.out_nbytes.astype(np.uint64),
        max_chunk_nbytes=frames.max_frame_nbytes,
        total_nbytes=frames.total_nbytes,
        stream=cupy.cuda.get_current_stream(),
    )
