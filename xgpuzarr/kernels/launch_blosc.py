"""How do Blosc chunks become bytes on the device? The launchers of ``blosc.cu`` and ``unshuffle.cu``.

==================  ================================================================================================
`read_headers`      what each chunk's header says, checked
`read_streams`      where each stream lies, and where it goes in scratch; checked
`decode_streams`    LZ4, Snappy and BloscLZ streams
`unshuffle_chunks`  blocks in scratch, and chunks stored as plain copies, into the output
==================  ================================================================================================

`xgpuzarr.decoders.blosc` runs them in this order. The rules of `xgpuzarr.kernels.launch` hold. Tables are int64 on the
device, one row a field; the enums name the rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import check_bytes, device_column, launch, tiles_of
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    from collections.abc import Collection

    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = [
    "GUARD_NBYTES",
    "HeaderRow",
    "Kind",
    "StreamRow",
    "decode_streams",
    "read_headers",
    "read_streams",
    "unshuffle_chunks",
]

GUARD_NBYTES = 32
"""Bytes behind each stream's output in scratch that no decoder may touch."""

_SOURCE = "blosc.cu"


class HeaderRow(IntEnum):
    """Rows of the header table, one column a chunk; the last three are 0 where a chunk holds no streams."""

    FLAGS = 0
    TYPESIZE = 1
    BLOCKSIZE = 2
    N_BLOCKS = 3
    N_STREAMS = 4
    SCRATCH = 5  # bytes of scratch


class StreamRow(IntEnum):
    """Rows of the stream table, one column a stream; bytes, from the start of the encoded bytes or of scratch."""

    SOURCE = 0
    ENCODED = 1  # size
    DEST = 2
    DECODED = 3  # size
    CHUNK = 4
    KIND = 5


class Kind(IntEnum):
    """What a stream holds. A zlib stream is listed as the raw deflate stream inside it."""

    BLOSCLZ = 0
    LZ4 = 1
    SNAPPY = 2
    DEFLATE = 3
    ZSTD = 4
    RAW = 5
    BAD = 6


def read_headers(
    encoded: cupy.ndarray, offset: cupy.ndarray, nbytes: cupy.ndarray, chunk_nbytes: int
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Parse and check the header of every chunk.

    Parameters
    ----------
    encoded
        Contiguous bytes, uint8.
    offset, nbytes
        int64 ``(n_chunks,)``: where each encoded chunk lies in `encoded`, in bytes.
    chunk_nbytes
        Decoded size of every chunk that the metadata promises, in bytes.

    Returns
    -------
    headers
        int64 ``(len(HeaderRow), n_chunks)``.
    problem
        int32 ``(n_chunks,)``: numbers of `xgpuzarr.plan.blosc_header.Problem`.
    """
    import cupy

    check_bytes(encoded, "encoded")
    n_chunks = len(offset)
    headers = cupy.zeros((len(HeaderRow), n_chunks), dtype=np.int64)
    problem = cupy.zeros(n_chunks, dtype=np.int32)
    launch(
        kernel_function(_SOURCE, "read_headers"),
        -(-n_chunks // 64),
        64,
        encoded,
        np.int64(encoded.nbytes),
        device_column(offset, (n_chunks,)),
        device_column(nbytes, (n_chunks,)),
        np.int64(n_chunks),
        np.int64(chunk_nbytes),
        headers,
        problem,
    )
    return headers, problem


def read_streams(
    encoded: cupy.ndarray,
    offset: cupy.ndarray,
    nbytes: cupy.ndarray,
    *,
    headers: cupy.ndarray,
    firsts: cupy.ndarray,
    n_blocks: int,
    n_streams: int,
    problem: cupy.ndarray,
) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    """List the streams of every chunk whose header is sound.

    Parameters
    ----------
    encoded, offset, nbytes
        As in `read_headers`.
    headers
        From `read_headers`.
    firsts
        int64 ``(3, n_chunks)``: sums of the rows N_BLOCKS, N_STREAMS and SCRATCH over all chunks before.
    n_blocks, n_streams
        Sums over all chunks.
    problem
        From `read_headers`; problems found here are added.

    Returns
    -------
    streams
        int64 ``(len(StreamRow), n_streams)``.
    block_start, block_end
        int64 ``(n_blocks,)``: chunk number in the upper 32 bits, offset in the chunk in the lower.
    """
    import cupy

    n_chunks = len(offset)
    streams = cupy.zeros((len(StreamRow), n_streams), dtype=np.int64)
    block_start, block_end = cupy.zeros((2, n_blocks), dtype=np.int64)
    launch(
        kernel_function(_SOURCE, "read_streams"),
        n_chunks,
        32,
        encoded,
        np.int64(encoded.nbytes),
        device_column(offset, (n_chunks,)),
        device_column(nbytes, (n_chunks,)),
        np.int64(n_chunks),
        headers,
        *(device_column(row, (n_chunks,)) for row in firsts),
        streams,
        np.int64(n_streams),
        block_start,
        block_end,
        np.int64(n_blocks),
        problem,
    )
    return streams, block_start, block_end


def decode_streams(
    encoded: cupy.ndarray,
    out: cupy.ndarray,
    streams: cupy.ndarray,
    problem: cupy.ndarray,
    *,
    kinds: Collection[Kind] = (Kind.BLOSCLZ, Kind.LZ4, Kind.SNAPPY),
) -> None:
    """Decode the LZ4, Snappy and BloscLZ streams of a table into `out`; streams of other kinds are left alone.

    Parameters
    ----------
    encoded, out
        Contiguous bytes, uint8. Corrupt streams write nothing outside their part of `out`.
    streams
        int64 ``(len(StreamRow), n_streams)``. Streams decode to less than 2^31 bytes each.
    problem
        int32, one a chunk (row CHUNK of the table); `Problem.STREAM` is stored where a stream does not decode to its
        size.
    kinds
        Which of the three to decode.
    """
    check_bytes(encoded, "encoded")
    check_bytes(out, "out")
    n_streams = streams.shape[1]
    launch(
        kernel_function(_SOURCE, "decode_streams"),
        -(-n_streams // 2),
        64,
        encoded,
        np.int64(encoded.nbytes),
        out,
        np.int64(out.nbytes),
        streams,
        np.int64(n_streams),
        np.int32(sum(1 << kind for kind in kinds)),
        problem,
        np.int64(problem.size),
    )


def unshuffle_chunks(
    encoded: cupy.ndarray,
    offset: cupy.ndarray,
    *,
    scratch: cupy.ndarray,
    scratch_offset: cupy.ndarray,
    headers: cupy.ndarray,
    out: cupy.ndarray,
    chunk_nbytes: int,
    problem: cupy.ndarray,
    status: cupy.ndarray,
    out_offset: Column | None = None,
) -> None:
    """Put every chunk that has no problem in its place, from scratch or, for plain copies, from the encoded bytes.

    Parameters
    ----------
    encoded, offset
        As in `read_headers`.
    scratch, scratch_offset
        Decoded streams, uint8; where each chunk's begin, int64 ``(n_chunks,)``, in bytes.
    headers
        From `read_headers`.
    out
        Contiguous bytes, uint8.
    chunk_nbytes
        Decoded size of a chunk, in bytes.
    problem
        int32 ``(n_chunks,)``; chunks with one are left out.
    status
        From `xgpuzarr.kernels.launch.new_status`.
    out_offset
        int64 ``(n_chunks,)``: where each chunk goes in `out`, in bytes; by default chunk c to ``c * chunk_nbytes``.
    """
    check_bytes(out, "out")
    n_chunks = len(offset)
    tiles = tiles_of(chunk_nbytes)
    launch(
        kernel_function("unshuffle.cu", "unshuffle_chunks"),
        n_chunks * tiles,
        256,
        encoded,
        np.int64(encoded.nbytes),
        device_column(offset, (n_chunks,)),
        scratch,
        np.int64(scratch.nbytes),
        device_column(scratch_offset, (n_chunks,)),
        headers,
        np.int64(n_chunks),
        out,
        np.int64(out.nbytes),
        None if out_offset is None else device_column(out_offset, (n_chunks,)),
        np.int64(chunk_nbytes),
        np.int64(tiles),
        problem,
        status,
    )
