"""How does one batch of encoded chunks become decoded bytes on the device? By nvCOMP's batched C API, through ctypes.

The C API rather than NVIDIA's Python bindings, because only it takes arrays of pointers built on the device, returns a
status per chunk, and stays asynchronous. One call handles one algorithm and any number of chunks:

1. `temp_nbytes` says what scratch the call needs, for planning memory.
2. `decompress_batch` allocates it, queues the work on a stream and returns at once.
3. The caller reads the sizes and statuses when the stream has passed, before it hands out any decoded byte.

nvCOMP does not defend itself against corrupt input: it may write past an output, or end the CUDA context, and report
success. Check every encoded chunk first (`xgpuzarr.kernels.launch_frames`), and keep a guard zone behind each output.

Sources: the headers ``nvcomp/{lz4,zstd,...}.h`` and ``nvcomp/shared_types.h`` of nvCOMP 6.0.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xgpuzarr.decoders.nvcomp_library import (
    OPTIONS_NBYTES,
    Options,
    check,
    entry_point,
    library_version,
    pack_options,
    status_text,
)
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
    "max_decoded_nbytes",
    "max_encoded_nbytes",
    "status_text",
    "temp_nbytes",
]

_NOT_RUN = -1  # what a status is until nvCOMP writes it; 0 would read as success

# nvcompDecompressBackend_t. The CUDA kernels always, never "default": then a call stays asynchronous and means the same
# on every GPU. The hardware engine of newer GPUs wants specially allocated buffers and has its own limits on size.
_BACKEND_CUDA = 2

# nvcompType_t, by NumPy's names. Only the width and signedness matter to the lossless algorithms.
_DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int16": 2,
    "uint16": 3,
    "int32": 4,
    "uint32": 5,
    "int64": 6,
    "uint64": 7,
    "float16": 10,
    "float32": 11,
    "float64": 12,
}
_TYPE_FROM_STREAM = 0xFF  # NVCOMP_TYPE_BITS: the decoder reads the type from the stream


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


@dataclass(frozen=True, slots=True)
class _Format:
    """Facts of one algorithm: its name in entry points, its limits in bytes, and what its options hold.

    For zstd the header gives two limits of the encoder, 2^31 - 1 and 16 MiB; the lower one stands here.
    """

    symbol: str
    max_decoded_nbytes: int
    max_encode_nbytes: int
    decode_words: tuple[int, ...]  # the option struct as little-endian uint32 words
    levels: range | None  # what the encoder's level or algorithm option takes
    data_types: frozenset[str]  # what its encoder takes
    frame_alignment: int = 1  # of a frame's address, where the library asks for less than it needs


_BYTES = frozenset({"uint8"})
_INTEGERS = frozenset(name for name in _DATA_TYPES if "int" in name)
_FLOATS = frozenset({"float16", "float32", "float64"})

_FORMATS: dict[str, _Format] = {
    "ans": _Format(
        "ANS", 1 << 25, 1 << 24, (_BACKEND_CUDA, _TYPE_FROM_STREAM), None, frozenset({"uint8", "float16", "float32"})
    ),
    "bitcomp": _Format("Bitcomp", 1 << 25, 1 << 24, (_BACKEND_CUDA,), range(2), _INTEGERS | _FLOATS),
    # nvCOMP asks for frames at multiples of 4. But in a frame of 8-byte values these lie at addresses that are
    # multiples of 8, not at such distances from its start: encoded at one kind of address, it does not decode at the
    # other.
    "cascaded": _Format(
        "Cascaded", (1 << 24) + 8, 1 << 24, (_BACKEND_CUDA, 0, _TYPE_FROM_STREAM), range(8), _INTEGERS, 8
    ),
    "deflate": _Format("Deflate", (1 << 32) - 1, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "gdeflate": _Format("Gdeflate", (1 << 32) + 288, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "gzip": _Format("Gzip", (1 << 32) - 1, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "lz4": _Format("LZ4", (1 << 32) - 1, 1 << 24, (_BACKEND_CUDA,), None, _INTEGERS - {"int64", "uint64"}),
    "snappy": _Format("Snappy", (1 << 31) - 1, 1 << 24, (_BACKEND_CUDA,), None, _BYTES),
    "zstd": _Format("Zstd", (1 << 31) - 1, 1 << 24, (_BACKEND_CUDA,), None, _BYTES),
}

ALGORITHMS: frozenset[str] = frozenset(_FORMATS)
"""What nvCOMP decodes and encodes, by the names used here."""


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
        At least the largest decoded size, in bytes; at most ``max_decoded_nbytes(algorithm)``.
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
    form = _format(algorithm)
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
                _decode_options(form),
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
    form = _format(algorithm)
    n = _batch_size(src_ptrs, src_nbytes, dst_ptrs)
    struct = _encode_struct(algorithm, options)
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
    form = _format(algorithm)
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
    form = _format(algorithm)
    needed = ctypes.c_size_t()
    status = entry_point(form.symbol, "DecompressGetTempSize")(
        n, max_chunk_nbytes, _decode_options(form), ctypes.byref(needed), total_nbytes, None
    )
    check(status, f"sizing the scratch of {n} chunks of {algorithm}, largest {max_chunk_nbytes} bytes")
    return needed.value


def max_encoded_nbytes(algorithm: str, chunk_nbytes: int, options: bytes | None = None) -> int:
    """Room that the encoded form of a chunk of `chunk_nbytes` bytes needs at most, in bytes. Needs no GPU."""
    struct = _encode_struct(algorithm, options)
    needed = ctypes.c_size_t()
    entry = entry_point(_format(algorithm).symbol, "CompressGetMaxOutputChunkSize")
    status = entry(chunk_nbytes, struct, ctypes.byref(needed))
    check(status, f"sizing the output of {algorithm}")
    return needed.value


def max_decoded_nbytes(algorithm: str) -> int:
    """Largest decoded size of one frame that nvCOMP accepts, in bytes."""
    return _format(algorithm).max_decoded_nbytes


@functools.cache
def decode_alignment(algorithm: str) -> Alignment:
    """Return what `decompress_batch` asks of addresses, in bytes. Needs no GPU."""
    form = _format(algorithm)
    result = _Alignment()
    check(
        entry_point(form.symbol, "DecompressGetRequiredAlignments")(_decode_options(form), ctypes.byref(result)),
        algorithm,
    )
    return Alignment(max(result.input, form.frame_alignment), result.output, result.temp)


@functools.cache
def encode_alignment(algorithm: str, options: bytes | None = None) -> Alignment:
    """Return what `compress_batch` asks of addresses, in bytes. Needs no GPU."""
    form = _format(algorithm)
    result = _Alignment()
    entry = entry_point(form.symbol, "CompressGetRequiredAlignments")
    check(entry(_encode_struct(algorithm, options), ctypes.byref(result)), algorithm)
    return Alignment(result.input, max(result.output, form.frame_alignment), result.temp)


def encode_options(algorithm: str, *, data_type: str = "uint8", level: int | None = None) -> bytes:
    """Options of an encoder, as nvCOMP's 64-byte struct.

    Parameters
    ----------
    data_type
        What the bytes are, by NumPy's name: for ans, bitcomp, cascaded and lz4. A chunk's size must be a multiple of
        its width.
    level
        deflate, gdeflate, gzip: 0 (fastest) to 5 (smallest). cascaded: 0 to 7. bitcomp: 0, or 1 for sparse data.
        ``None`` is nvCOMP's default.
    """
    form = _format(algorithm)
    if data_type not in form.data_types:
        raise UnsupportedError(f"{algorithm}: data_type must be one of {sorted(form.data_types)}, got {data_type!r}")
    if level is not None and (form.levels is None or level not in form.levels):
        allowed = "None" if form.levels is None else f"{form.levels[0]} to {form.levels[-1]}"
        raise UnsupportedError(f"{algorithm}: level must be {allowed}, got {level!r}")
    type_code = _DATA_TYPES[data_type]
    words: tuple[int, ...] = ()
    match algorithm:
        case "lz4":
            words = (type_code,)
        case "ans":
            words = (0, type_code)
        case "bitcomp":
            words = (level or 0, type_code)
        case "deflate" | "gdeflate" | "gzip":
            words = (1 if level is None else level,)
        case "cascaded":
            # common_opts: type, asymmetric mode, bit packing, no coarse encoding; then all fine encodings and the level
            words = (type_code, 1, 1, 0, 0, 0, 7, 0, 3 if level is None else level)
    return pack_options(words)


def _format(algorithm: str) -> _Format:
    if algorithm not in _FORMATS:
        raise UnsupportedError(f"nvCOMP has no algorithm {algorithm!r}; it has {', '.join(sorted(_FORMATS))}")
    return _FORMATS[algorithm]


def _batch_size(*columns: cupy.ndarray) -> int:
    """Length of the columns, which nvCOMP reads as bare uint64 memory: refuse anything else."""
    n = columns[0].size
    for column in columns:
        if column.dtype != "uint64" or column.shape != (n,) or not column.flags.c_contiguous:
            raise ValueError(
                f"nvCOMP columns must be contiguous uint64 arrays of shape ({n},), got {column.dtype} {column.shape}"
            )
    return int(n)


def _decode_options(form: _Format) -> Options:
    return Options.from_buffer_copy(pack_options(form.decode_words))


def _encode_struct(algorithm: str, options: bytes | None) -> Options:
    packed = encode_options(algorithm) if options is None else options
    if len(packed) != OPTIONS_NBYTES:
        raise ValueError(f"{algorithm}: options must have {OPTIONS_NBYTES} bytes, got {len(packed)}")
    return Options.from_buffer_copy(packed)
