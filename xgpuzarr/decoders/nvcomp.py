"""How does one batch of encoded chunks become decoded bytes on the device? By nvCOMP's batched C API, through ctypes.

The C API rather than NVIDIA's Python bindings, because only it takes arrays of pointers built on the device, returns a
status per chunk, and stays asynchronous. One call handles one algorithm and any number of chunks:

1. `temp_nbytes` says what scratch the call needs, for planning memory.
2. `decompress_batch` allocates it, queues the work on a stream and returns at once.
3. The caller reads the sizes and statuses when the stream has passed, before it hands out any decoded byte.

nvCOMP does not defend itself against corrupt input: it may write past an output, or end the CUDA context, and report
success. Check every encoded chunk first (`xgpuzarr.kernels.launch_frames`), and keep a guard zone behind each output.

What each algorithm takes is in `xgpuzarr.decoders.nvcomp_formats`. Sources: the headers ``nvcomp/{lz4,zstd,...}.h`` and
``nvcomp/shared_types.h`` of nvCOMP 6.0.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xgpuzarr.decoders.nvcomp_formats import ALGORITHMS, decode_options, encode_options, encode_struct, format_of
from xgpuzarr.decoders.nvcomp_library import check, entry_point, library_version, status_text
from xgpuzarr.errors import UnsupportedError

if TYPE_CHECKING:
    import cupy

__all__ = [
    "ALGORITHMS",
    "Alignment",
    "compress_batch",
    "decode_alignment",
    "decompress_batch",
    "decompressed_nbytes",
    "encode_alignment",
    "encode_options",
    "library_version",
    "max_encoded_nbytes",
    "status_text",
    "temp_nbytes",
]

_NOT_RUN = -1  # what a status is until nvCOMP writes it; 0 would read as success


@dataclass(frozen=True, slots=True)
class Alignment:
    """What nvCOMP asks of the addresses it is given, in bytes.

    Attributes
    ----------
    input, output
        Of each source and each destination.
    temp
        Of the scratch.
    """

    input: int
    output: int
    temp: int


class _Alignment(ctypes.Structure):
    _fields_ = [("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t)]


def decompress_batch(
    algorithm: str,
    src_ptrs: cupy.ndarray,
    src_nbytes: cupy.ndarray,
    dst_ptrs: cupy.ndarray,
    dst_nbytes: cupy.ndarray,
    *,
    max_chunk_nbytes: int,
    total_nbytes: int,
    stream: cupy.cuda.Stream,
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Queue the decoding of a batch of frames; return before it has run.

    Parameters
    ----------
    algorithm
        One of `ALGORITHMS`.
    src_ptrs, src_nbytes
        uint64 device arrays of shape (n,): address and size of each frame, in bytes. Addresses are multiples of
        ``decode_alignment(algorithm).input``.
    dst_ptrs, dst_nbytes
        uint64 device arrays of shape (n,): address and room of each output, in bytes. A frame that holds more than its
        room may overrun it: compare sizes before the call.
    max_chunk_nbytes
        At least the largest decoded size, in bytes; at most what nvCOMP takes of the algorithm.
    total_nbytes
        At least the sum of the decoded sizes, in bytes. It sizes the scratch of zstd; a lower value corrupts memory.
    stream
        The stream of the work. Every array above must be ready on it, and must not be reused before it has passed.

    Returns
    -------
    actual_nbytes, statuses
        Device arrays of shape (n,), uint64 and int32: what was decoded of each frame, in bytes, and 0 for success
        (`status_text` tells the rest). Valid when `stream` has passed.

    Notes
    -----
    The scratch comes from CuPy's current allocator on `stream` and is given back on return. That is safe because CuPy's
    pools, and RMM's, are ordered by stream: only later work of the same stream can be given this memory.

    Nothing synchronises, except bitcomp: nvCOMP reads its frame headers on the host and waits for the stream to do so.
    """
    form = format_of(algorithm)
    n = _batch_size(src_ptrs, src_nbytes, dst_ptrs, dst_nbytes)
    if max_chunk_nbytes > form.max_decoded_nbytes:
        raise UnsupportedError(
            f"{algorithm} on the device: a chunk decodes to at most {form.max_decoded_nbytes} bytes, got "
            f"{max_chunk_nbytes}; read this array with device='cpu'"
        )
    import cupy

    scratch_nbytes = temp_nbytes(algorithm, n, max_chunk_nbytes, total_nbytes) if n else 0
    with stream:
        actual_nbytes = cupy.zeros(n, dtype=cupy.uint64)
        statuses = cupy.full(n, _NOT_RUN, dtype=cupy.int32)
        scratch = cupy.empty(max(scratch_nbytes, 1), dtype=cupy.uint8)
        if n:
            status = entry_point(form.symbol, "DecompressAsync")(
                src_ptrs.data.ptr,
                src_nbytes.data.ptr,
                dst_nbytes.data.ptr,
                actual_nbytes.data.ptr,
                n,
                scratch.data.ptr,
                scratch_nbytes,
                dst_ptrs.data.ptr,
                decode_options(form),
                statuses.data.ptr,
                stream.ptr,
            )
            check(status, f"decoding {n} chunks of {algorithm}")
    return actual_nbytes, statuses


def compress_batch(
    algorithm: str,
    src_ptrs: cupy.ndarray,
    src_nbytes: cupy.ndarray,
    dst_ptrs: cupy.ndarray,
    *,
    max_chunk_nbytes: int,
    total_nbytes: int,
    stream: cupy.cuda.Stream,
    options: bytes | None = None,
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Queue the encoding of a batch of chunks; return before it has run.

    Parameters
    ----------
    algorithm
        One of `ALGORITHMS`.
    src_ptrs, src_nbytes
        uint64 device arrays of shape (n,): address and size of each chunk, in bytes. Addresses are multiples of
        ``encode_alignment(algorithm).input``, sizes are multiples of the width of the options' data type.
    dst_ptrs
        uint64 device array of shape (n,): address of each output, which has room for
        ``max_encoded_nbytes(algorithm, max_chunk_nbytes)`` bytes.
    max_chunk_nbytes, total_nbytes
        At least the largest chunk and the sum of all, in bytes.
    stream
        The stream of the work; as in `decompress_batch`.
    options
        From `encode_options`; ``None`` means its defaults.

    Returns
    -------
    encoded_nbytes, statuses
        Device arrays of shape (n,), uint64 and int32, valid when `stream` has passed.
    """
    form = format_of(algorithm)
    n = _batch_size(src_ptrs, src_nbytes, dst_ptrs)
    struct = encode_struct(algorithm, options)
    if max_chunk_nbytes > form.max_encode_nbytes:
        raise UnsupportedError(
            f"{algorithm} on the device: a chunk to encode has at most {form.max_encode_nbytes} bytes, got "
            f"{max_chunk_nbytes}; write smaller chunks"
        )
    import cupy

    with stream:
        encoded_nbytes = cupy.zeros(n, dtype=cupy.uint64)
        statuses = cupy.full(n, _NOT_RUN, dtype=cupy.int32)
        if n:
            needed = ctypes.c_size_t()
            status = entry_point(form.symbol, "CompressGetTempSize")(
                n, max_chunk_nbytes, struct, ctypes.byref(needed), total_nbytes, stream.ptr
            )
            check(status, f"sizing the scratch of {algorithm}")
            scratch = cupy.empty(max(needed.value, 1), dtype=cupy.uint8)
            status = entry_point(form.symbol, "CompressAsync")(
                src_ptrs.data.ptr,
                src_nbytes.data.ptr,
                max_chunk_nbytes,
                n,
                scratch.data.ptr,
                needed.value,
                dst_ptrs.data.ptr,
                encoded_nbytes.data.ptr,
                struct,
                statuses.data.ptr,
                stream.ptr,
            )
            check(status, f"encoding {n} chunks of {algorithm}")
    return encoded_nbytes, statuses


def decompressed_nbytes(
    algorithm: str, src_ptrs: cupy.ndarray, src_nbytes: cupy.ndarray, *, stream: cupy.cuda.Stream
) -> cupy.ndarray:
    """Queue the reading of the decoded size that each frame states.

    For ans, bitcomp and cascaded, whose headers only nvCOMP knows, this is the one way to learn it before decoding.

    Returns
    -------
    cupy.ndarray
        uint64 device array of shape (n,), valid when `stream` has passed. For corrupt frames it can be anything.
    """
    form = format_of(algorithm)
    n = _batch_size(src_ptrs, src_nbytes)
    import cupy

    with stream:
        nbytes = cupy.zeros(n, dtype=cupy.uint64)
        if n:
            status = entry_point(form.symbol, "GetDecompressSizeAsync")(
                src_ptrs.data.ptr, src_nbytes.data.ptr, nbytes.data.ptr, n, stream.ptr
            )
            check(status, f"reading the sizes of {n} chunks of {algorithm}")
    return nbytes


def temp_nbytes(algorithm: str, n: int, max_chunk_nbytes: int, total_nbytes: int) -> int:
    """Scratch that `decompress_batch` will allocate for `n` frames, in bytes. Computed on the host; needs no GPU.

    For zstd about 3 x `total_nbytes` (more for frames below 64 kB), for all other algorithms next to nothing.
    """
    form = format_of(algorithm)
    needed = ctypes.c_size_t()
    status = entry_point(form.symbol, "DecompressGetTempSize")(
        n, max_chunk_nbytes, decode_options(form), ctypes.byref(needed), total_nbytes, None
    )
    check(status, f"sizing the scratch of {n} chunks of {algorithm}, largest {max_chunk_nbytes} bytes")
    return needed.value


def max_encoded_nbytes(algorithm: str, chunk_nbytes: int, options: bytes | None = None) -> int:
    """Room that the encoded form of a chunk of `chunk_nbytes` bytes needs at most, in bytes. Needs no GPU."""
    struct = encode_struct(algorithm, options)
    needed = ctypes.c_size_t()
    entry = entry_point(format_of(algorithm).symbol, "CompressGetMaxOutputChunkSize")
    status = entry(chunk_nbytes, struct, ctypes.byref(needed))
    check(status, f"sizing the output of {algorithm}")
    return needed.value


@functools.cache
def decode_alignment(algorithm: str) -> Alignment:
    """Return what `decompress_batch` asks of addresses, in bytes. Needs no GPU."""
    form = format_of(algorithm)
    result = _Alignment()
    check(
        entry_point(form.symbol, "DecompressGetRequiredAlignments")(decode_options(form), ctypes.byref(result)),
        algorithm,
    )
    return Alignment(max(result.input, form.frame_alignment), result.output, result.temp)


@functools.cache
def encode_alignment(algorithm: str, options: bytes | None = None) -> Alignment:
    """Return what `compress_batch` asks of addresses, in bytes. Needs no GPU."""
    form = format_of(algorithm)
    result = _Alignment()
    entry = entry_point(form.symbol, "CompressGetRequiredAlignments")
    check(entry(encode_struct(algorithm, options), ctypes.byref(result)), algorithm)
    return Alignment(result.input, max(result.output, form.frame_alignment), result.temp)


def _batch_size(*columns: cupy.ndarray) -> int:
    """Length of the columns, which nvCOMP reads as bare uint64 memory: refuse anything else."""
    n = columns[0].size
    for column in columns:
        if column.dtype != "uint64" or column.shape != (n,) or not column.flags.c_contiguous:
            raise ValueError(
                f"nvCOMP columns must be contiguous uint64 arrays of shape ({n},), got {column.dtype} {column.shape}"
            )
    return int(n)
