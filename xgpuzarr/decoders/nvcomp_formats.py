"""What does nvCOMP take, algorithm by algorithm? Limits on sizes, types of data, and the option structs.

Sources: the headers ``nvcomp/{lz4,zstd,...}.h`` and ``nvcomp/shared_types.h`` of nvCOMP 6.0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from xgpuzarr.decoders.nvcomp_library import OPTIONS_NBYTES, Options, pack_options
from xgpuzarr.errors import UnsupportedError

__all__ = ["ALGORITHMS", "FORMATS", "Format", "decode_options", "encode_options", "encode_struct", "format_of"]

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
class Format:
    """Facts of one algorithm.

    Attributes
    ----------
    symbol
        Its name in entry points.
    max_decoded_nbytes
        Most bytes that a frame to decode may hold.
    max_encode_nbytes
        Most bytes of a chunk to encode. For zstd the header gives 2^31 - 1 and 16 MiB; the lower one stands here.
    decode_words
        Start of the decoder's option struct, as little-endian uint32 words.
    levels
        What the encoder's level or algorithm option takes; None if there is none.
    data_types
        What its encoder takes.
    frame_alignment
        Of a frame's address, in bytes, where the library asks for less than it needs.
    """

    symbol: str
    max_decoded_nbytes: int
    max_encode_nbytes: int
    decode_words: tuple[int, ...]
    levels: range | None
    data_types: frozenset[str]
    frame_alignment: int = 1


_BYTES = frozenset({"uint8"})
_INTEGERS = frozenset(name for name in _DATA_TYPES if "int" in name)
_FLOATS = frozenset({"float16", "float32", "float64"})

FORMATS: dict[str, Format] = {
    "ans": Format(
        "ANS", 1 << 25, 1 << 24, (_BACKEND_CUDA, _TYPE_FROM_STREAM), None, frozenset({"uint8", "float16", "float32"})
    ),
    "bitcomp": Format("Bitcomp", 1 << 25, 1 << 24, (_BACKEND_CUDA,), range(2), _INTEGERS | _FLOATS),
    # nvCOMP asks for frames at multiples of 4. But in a frame of 8-byte values these lie at addresses that are
    # multiples of 8, not at such distances from its start: encoded at one kind of address, it does not decode at the
    # other.
    "cascaded": Format(
        "Cascaded", (1 << 24) + 8, 1 << 24, (_BACKEND_CUDA, 0, _TYPE_FROM_STREAM), range(8), _INTEGERS, 8
    ),
    "deflate": Format("Deflate", (1 << 32) - 1, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "gdeflate": Format("Gdeflate", (1 << 32) + 288, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "gzip": Format("Gzip", (1 << 32) - 1, 1 << 31, (_BACKEND_CUDA,), range(6), _BYTES),
    "lz4": Format("LZ4", (1 << 32) - 1, 1 << 24, (_BACKEND_CUDA,), None, _INTEGERS - {"int64", "uint64"}),
    "snappy": Format("Snappy", (1 << 31) - 1, 1 << 24, (_BACKEND_CUDA,), None, _BYTES),
    "zstd": Format("Zstd", (1 << 31) - 1, 1 << 24, (_BACKEND_CUDA,), None, _BYTES),
}

ALGORITHMS: frozenset[str] = frozenset(FORMATS)
"""What nvCOMP decodes and encodes, by the names used here."""


def format_of(algorithm: str) -> Format:
    """Facts of an algorithm.

    Raises
    ------
    UnsupportedError
        nvCOMP has no such algorithm.
    """
    if algorithm not in FORMATS:
        raise UnsupportedError(f"nvCOMP has no algorithm {algorithm!r}; it has {', '.join(sorted(FORMATS))}")
    return FORMATS[algorithm]


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
    form = format_of(algorithm)
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


def decode_options(form: Format) -> Options:
    """Option struct of a decoder."""
    return Options.from_buffer_copy(pack_options(form.decode_words))


def encode_struct(algorithm: str, options: bytes | None) -> Options:
    """Option struct of an encoder, from what `encode_options` gave; None means its defaults."""
    packed = encode_options(algorithm) if options is None else options
    if len(packed) != OPTIONS_NBYTES:
        raise ValueError(f"{algorithm}: options must have {OPTIONS_NBYTES} bytes, got {len(packed)}")
    return Options.from_buffer_copy(packed)
