"""How do Blosc chunks become bytes on the device? The launchers of ``blosc.cu`` and ``unshuffle.cu``.

==================  ================================================================================================
`read_headers`      what each chunk's header says, checked
`read_streams`      where each stream lies, and where it goes in scratch; checked
`copy_streams`      streams stored as they are, into scratch
`decode_streams`    LZ4, Snappy and BloscLZ streams, into scratch
`select_streams`    which streams another decoder is to take
`unshuffle_chunks`  blocks in scratch, and chunks stored as plain copies, into the output
==================  ================================================================================================

`xgpuzarr.decoders.blosc` runs them in this order. The rules of `xgpuzarr.kernels.launch` hold. Tables are int64 on the
device, one row a field; the enums name the rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import check_bytes, device_columns, launch, launch_items, tiles_of
from xgpuzarr.kernels.compile import kernel_function

if TYPE_CHECKING:
    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = [
    "GUARD_NBYTES",
    "HeaderRow",
    "Kind",
    "StreamRow",
    "Total",
    "copy_streams",
    "decode_streams",
    "read_headers",
    "read_streams",
    "select_streams",
    "unshuffle_chunks",
]

GUARD_NBYTES = 32
"""Bytes behind each stream's output in scratch that no decoder may touch."""

_SOURCE = "blosc.cu"


class HeaderRow(IntEnum):
    """Rows of the header table, one column a chunk."""

    FLAGS = 0
    TYPESIZE = 1
    BLOCKSIZE = 2
    N_BLOCKS = 3  # 0 where a chunk holds no streams
    FIRST_STREAM = 4  # column of the stream table
    SCRATCH = 5  # offset in scratch, in bytes
    SEAMS = 6  # 0 once all blocks are read, if they fill the chunk without gap or overlap


class Total(IntEnum):
    """Sums over a batch; from FIRST_CODEC on, the streams of the chunks of each codec, in the order of `Kind`."""

    STREAMS = 0
    SCRATCH = 1  # bytes
    MAX_STREAM = 2  # largest decoded size of a stream, in bytes
    FIRST_CODEC = 3


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
) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
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
    totals
        uint64: numbers of `Total`, then one for each of the codecs, the first members of `Kind`.
    problem
        int32 ``(n_chunks,)``: numbers of `xgpuzarr.plan.blosc_header.Problem`.
    """
    import cupy

    check_bytes(encoded, "encoded")
    n_chunks = len(offset)
    headers = cupy.empty((len(HeaderRow), n_chunks), dtype=np.int64)
    totals = cupy.zeros(Total.FIRST_CODEC + Kind.RAW, dtype=np.uint64)
    problem = cupy.empty(n_chunks, dtype=np.int32)
    launch_items(
        _SOURCE,
        "read_headers",
        n_chunks,
        64,
        encoded,
        encoded.nbytes,
        *device_columns(n_chunks, offset, nbytes),
        n_chunks,
        chunk_nbytes,
        headers,
        totals,
        problem,
    )
    return headers, totals, problem


def read_streams(
    encoded: cupy.ndarray,
    offset: cupy.ndarray,
    nbytes: cupy.ndarray,
    *,
    headers: cupy.ndarray,
    n_streams: int,
    problem: cupy.ndarray,
) -> cupy.ndarray:
    """List the streams of every chunk whose header is sound.

    Parameters
    ----------
    encoded, offset, nbytes
        As in `read_headers`.
    headers
        From `read_headers`; the row SEAMS is changed.
    n_streams
        Sum over all chunks.
    problem
        From `read_headers`; problems found here are added. A chunk whose blocks leave a gap has `Problem.OVERLAP` too,
        though that breaks no rule of the format: nothing writes such chunks.

    Returns
    -------
    cupy.ndarray
        int64 ``(len(StreamRow), n_streams)``.
    """
    import cupy

    n_chunks = len(offset)
    streams = cupy.empty((len(StreamRow), n_streams), dtype=np.int64)
    launch(
        kernel_function(_SOURCE, "read_streams"),
        n_chunks,
        32,
        encoded,
        encoded.nbytes,
        *device_columns(n_chunks, offset, nbytes),
        n_chunks,
        headers,
        streams,
        n_streams,
        problem,
    )
    launch_items(_SOURCE, "check_seams", n_chunks, 64, headers, n_chunks, problem)
    return streams


def copy_streams(encoded: cupy.ndarray, out: cupy.ndarray, streams: cupy.ndarray) -> None:
    """Copy the streams of a table that were stored as they are into `out`; others are left alone.

    Parameters
    ----------
    encoded, out
        Contiguous bytes, uint8.
    streams
        int64 ``(len(StreamRow), n_streams)``.
    """
    check_bytes(encoded, "encoded")
    check_bytes(out, "out")
    n_streams = streams.shape[1]
    tiles = tiles_of(out.nbytes // n_streams)
    launch(
        kernel_function(_SOURCE, "copy_streams"),
        n_streams * tiles,
        256,
        encoded,
        encoded.nbytes,
        out,
        out.nbytes,
        streams,
        n_streams,
        tiles,
    )


def select_streams(streams: cupy.ndarray, kind: Kind, problem: cupy.ndarray) -> cupy.ndarray:
    """Mark the streams that a decoder of `kind` must leave out: other kinds, and those of chunks with a problem.

    Returns
    -------
    cupy.ndarray
        int32 ``(n_streams,)``: 1 to leave out, else 0.
    """
    import cupy

    n_streams = streams.shape[1]
    skip = cupy.empty(n_streams, dtype=np.int32)
    launch_items(
        _SOURCE,
        "select_streams",
        n_streams,
        256,
        streams,
        n_streams,
        np.int32(kind),
        problem,
        problem.size,
        skip,
    )
    return skip


def decode_streams(
    encoded: cupy.ndarray, out: cupy.ndarray, streams: cupy.ndarray, kind: Kind, problem: cupy.ndarray
) -> None:
    """Decode the streams of one kind of a table into `out`; others, and those of chunks with a problem, are left alone.

    Parameters
    ----------
    encoded, out
        Contiguous bytes, uint8. Corrupt streams write nothing outside their part of `out`.
    streams
        int64 ``(len(StreamRow), n_streams)``. A stream of 1 GiB or more is taken as one that does not decode.
    kind
        BLOSCLZ, LZ4 or SNAPPY.
    problem
        int32, one a chunk (row CHUNK of the table); `Problem.STREAM` is stored where a stream does not decode to its
        size.
    """
    check_bytes(encoded, "encoded")
    check_bytes(out, "out")
    n_streams = streams.shape[1]
    launch_items(
        _SOURCE,
        f"decode_{kind.name.lower()}",
        32 * n_streams,  # a warp a stream
        64,
        encoded,
        encoded.nbytes,
        out,
        out.nbytes,
        streams,
        n_streams,
        problem,
        problem.size,
    )


def unshuffle_chunks(
    encoded: cupy.ndarray,
    offset: cupy.ndarray,
    *,
    scratch: cupy.ndarray,
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
    scratch
        Decoded streams, uint8.
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
    if out_offset is None:
        out_offset = np.arange(n_chunks, dtype=np.int64) * chunk_nbytes
    tiles = tiles_of(chunk_nbytes)
    launch(
        kernel_function("unshuffle.cu", "unshuffle_chunks"),
        n_chunks * tiles,
        256,
        encoded,
        encoded.nbytes,
        *device_columns(n_chunks, offset),
        scratch,
        scratch.nbytes,
        headers,
        n_chunks,
        out,
        out.nbytes,
        *device_columns(n_chunks, out_offset),
        chunk_nbytes,
        tiles,
        problem,
        status,
    )
