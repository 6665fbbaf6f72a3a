"""Decoding chunks on the host: chains that are known here straight into place, all others through zarr-python's codecs.

`decode_chunk` serves the former, with the filters that the device runs; `ChunkDecoder.decode_array` any chain that
zarr-python can decode (`CodecChain.by_zarr`). Both are safe to call from several threads, and the compressors release
the interpreter lock.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs import blosc, lz4, zstd
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.config import config as zarr_config
from zarr.core.sync import sync
from zarr.registry import get_pipeline_class

from xgpuzarr.decoders.checksums import check_on_host
from xgpuzarr.decoders.filters import refusal, undo
from xgpuzarr.errors import UnsupportedError
from xgpuzarr.plan.blosc_header import HEADER_NBYTES, BloscHeader, check_chunk, describe
from xgpuzarr.plan.codec_facts import CHECKSUMS, DEVICE_ONLY
from xgpuzarr.plan.zstd import zstd_content_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zarr
    from numpy.typing import NDArray

    from xgpuzarr.plan.codec_chain import CodecChain
    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["DECODE_ERRORS", "INFLATE_GBPS", "ChunkDecoder", "decode_chunk", "decode_into"]

DECODE_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    RuntimeError,
    TypeError,
    OSError,
    EOFError,
    LookupError,
    ArithmeticError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)
"""What the codecs of numcodecs and zarr-python raise on bytes they cannot decode."""


def _fast_zlib() -> Any:
    """Give isal's zlib where it is installed (2-3 times as fast), the standard library's elsewhere."""
    try:
        from isal import isal_zlib  # an optional package
    except ImportError:
        return zlib
    return isal_zlib


_ZLIB = _fast_zlib()

INFLATE_GBPS = 0.25 if _ZLIB is zlib else 0.5
"""Decoded GB/s of gzip or zlib on one core, of the Xeon that `xgpuzarr.plan.cost` is measured on."""

_INFLATE_ERRORS: tuple[type[Exception], ...] = (zlib.error, _ZLIB.error)


def decode_chunk(chain: CodecChain, encoded: memoryview, out: NDArray[np.uint8]) -> str:
    """Undo a chain, all but axes and byte order (`CodecChain.settled`), filling `out` exactly.

    Parameters
    ----------
    chain
        One that is not `by_zarr`.
    encoded
        Encoded bytes of one chunk, host memory.
    out
        uint8, 1-D, contiguous, writable; as long as the chunk's elements.

    Returns
    -------
    str
        "" if `out` is filled; otherwise what is wrong with the bytes, and `out` holds nothing of use.
    """
    for step in chain.checks:
        payload, problem = check_on_host(step, encoded)
        if problem:
            return problem
        encoded = memoryview(payload)
    if not chain.filters:
        return _unpack(chain, encoded, out)
    batch = np.empty(chain.unfiltered_nbytes, np.uint8)
    problem = _unpack(chain, encoded, batch)
    for step in chain.filters if not problem else ():
        if step.codec in CHECKSUMS:
            batch, problem = check_on_host(step, batch)
        else:
            rows, is_bad = undo(step, batch[None], np)
            batch, problem = rows[0], refusal(step) if is_bad is not None and is_bad[0] else ""
        if problem:
            break
    if not problem:
        out[:] = batch
    return problem


def _unpack(chain: CodecChain, encoded: memoryview, out: NDArray[np.uint8]) -> str:
    if chain.compressor is not None:
        return decode_into(chain.compressor.codec, encoded, out)
    if len(encoded) != out.nbytes:
        return f"{len(encoded)} bytes are stored, the chunk shape needs {out.nbytes}"
    out[:] = encoded
    return ""


def decode_into(codec: str, encoded: memoryview, out: NDArray[np.uint8]) -> str:
    """Undo one compressor, filling `out` exactly.

    Parameters
    ----------
    codec
        One of `xgpuzarr.plan.codec_facts.COMPRESSORS`; "lz4" and "nvcomp.*" put the decoded size before one block.
    encoded
        Encoded bytes of one chunk, host memory.
    out
        1-D, contiguous, writable; as long as the chunk's decoded bytes.

    Returns
    -------
    str
        "" if `out` is filled; otherwise what is wrong with the bytes, and `out` holds nothing of use.
    """
    if codec in DEVICE_ONLY:
        return f"codec {codec!r} has no decoder on the host, and the device did not decode it"
    return _DECODERS[codec](encoded, out)


def _decode_zstd(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    # numcodecs leaves the rest of `out` as it was when a frame holds less
    content = out.nbytes if _is_one_zstd_frame_of(out.nbytes, encoded) else zstd_content_nbytes(encoded)
    if content is not None and content != out.nbytes:
        return f"zstd frame says {content} bytes, the chunk shape needs {out.nbytes}"
    return _run(zstd.decompress, "zstd", encoded, out)


def _is_one_zstd_frame_of(nbytes: int, encoded: memoryview) -> bool:
    """Say whether the first frame header (RFC 8878, section 3.1.1.1) states this content size, in a microsecond."""
    if len(encoded) < 18 or bytes(encoded[:4]) != b"\x28\xb5\x2f\xfd":
        return False
    descriptor = encoded[4]
    is_single_segment = descriptor >> 5 & 1
    size_nbytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    at = 6 - is_single_segment + (0, 1, 2, 4)[descriptor & 3]
    stated = int.from_bytes(encoded[at : at + size_nbytes], "little") + (256 if size_nbytes == 2 else 0)
    return size_nbytes > 0 and stated == nbytes


def _decode_lz4(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    if len(encoded) < 4:
        return f"lz4 needs a 4-byte size before its block, got {len(encoded)} bytes"
    (content,) = struct.unpack_from("<I", encoded)
    if content != out.nbytes:
        return f"lz4 size prefix says {content} bytes, the chunk shape needs {out.nbytes}"
    return _run(lz4.decompress, "lz4", encoded, out)


def _decode_blosc(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    problem = check_chunk(encoded, out.nbytes)  # c-blosc trusts the header and the offsets, and reads where they point
    if problem:
        return describe(problem, bytes(encoded[:HEADER_NBYTES]), nbytes=len(encoded), expected_nbytes=out.nbytes)
    if BloscHeader.parse(encoded).is_snappy and "snappy" not in blosc.list_compressors():
        raise UnsupportedError(
            "a Blosc chunk is compressed with snappy, which the c-blosc of numcodecs is built without; read the array "
            "on a GPU, with device='cuda'"
        )
    return _run(blosc.decompress, "blosc", encoded, out)


def _run(decompress: Callable[..., Any], name: str, encoded: memoryview, out: NDArray[np.uint8]) -> str:
    if out.nbytes == 0:  # numcodecs refuses empty destinations
        return ""
    try:
        decompress(encoded, out)
    except DECODE_ERRORS as error:
        return f"{name}: {error}"
    return ""


def _decode_deflate(encoded: memoryview, out: NDArray[np.uint8], wbits: int) -> str:
    """Undo zlib (RFC 1950) or gzip (RFC 1952, several members) without ever making more than `out` holds."""
    done = 0
    rest = encoded
    while len(rest):
        member = _ZLIB.decompressobj(wbits=wbits)
        try:
            # one byte more than fits shows a chunk that is too long
            part = member.decompress(rest, out.nbytes - done + 1)
        except _INFLATE_ERRORS as error:
            return f"deflate: {error}"
        if done + len(part) > out.nbytes:
            return f"deflate stream makes more than the {out.nbytes} bytes that the chunk shape needs"
        if not member.eof:
            return "deflate stream ends early"
        out[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
        rest = memoryview(member.unused_data)
        if wbits <= zlib.MAX_WBITS and rest:
            return f"{'zlib' if wbits > 0 else 'deflate'} stream is followed by {len(rest)} stray bytes"
        if not bytes(rest).strip(b"\0"):  # gzip allows zero padding
            break
    if done != out.nbytes:
        return f"deflate stream makes {done} bytes, the chunk shape needs {out.nbytes}"
    return ""


def _decode_gzip(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    return _decode_deflate(encoded, out, zlib.MAX_WBITS | 16)


def _decode_zlib(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    return _decode_deflate(encoded, out, zlib.MAX_WBITS)


def _decode_raw_deflate(encoded: memoryview, out: NDArray[np.uint8]) -> str:
    return _decode_deflate(encoded, out, -zlib.MAX_WBITS)


def _decode_behind_size(
    decode: Callable[[memoryview, NDArray[np.uint8]], str], encoded: memoryview, out: NDArray[np.uint8]
) -> str:
    """Undo a codec behind the decoded size, 4 bytes, little-endian."""
    content = int.from_bytes(encoded[:4], "little")
    if len(encoded) < 5 or content != out.nbytes:
        return f"size prefix says {content} bytes, the chunk shape needs {out.nbytes}"
    return decode(encoded[4:], out)


_DECODERS: dict[str, Callable[[memoryview, NDArray[np.uint8]], str]] = {
    "zstd": _decode_zstd,
    "lz4": _decode_lz4,
    "blosc": _decode_blosc,
    "gzip": _decode_gzip,
    "zlib": _decode_zlib,
    "nvcomp.deflate": lambda encoded, out: _decode_behind_size(_decode_raw_deflate, encoded, out),
    "nvcomp.lz4": _decode_lz4,
    "nvcomp.zstd": lambda encoded, out: _decode_behind_size(_decode_zstd, encoded, out),
}


class ChunkDecoder:
    """Decodes single chunks of one array with zarr-python's codecs.

    Parameters
    ----------
    array
        The open array; its metadata gives the codecs.
    codecs
        Codec objects of the smallest decodable unit, in encode order (`plan.layout.chunk_codecs`).
    layout
        Its layout.

    Raises
    ------
    UnsupportedError
        The chain unpickles, and zarr-python's configuration does not allow that.
    """

    __slots__ = ("_pipeline", "_spec")

    def __init__(self, array: zarr.Array[Any], codecs: Sequence[Any], layout: ArrayLayout) -> None:
        _refuse_pickle(layout)
        metadata = array.metadata
        order = metadata.order if metadata.zarr_format == 2 else "C"
        self._spec = ArraySpec(
            shape=layout.chunk_shape,
            dtype=metadata.dtype if metadata.zarr_format == 2 else metadata.data_type,
            fill_value=layout.fill_value,
            config=ArrayConfig.from_dict({"order": order}),
            prototype=default_buffer_prototype(),
        )
        if metadata.zarr_format == 2:
            self._pipeline = array.async_array.codec_pipeline
        else:
            self._pipeline = get_pipeline_class().from_codecs(codecs).evolve_from_array_spec(self._spec)

    def decode_array(self, encoded: memoryview) -> NDArray[Any]:
        """Elements of one chunk, in the shape of the chunk.

        Raises
        ------
        ValueError
            The bytes do not decode to one chunk (any of `DECODE_ERRORS` is turned into it).
        """
        buffer = self._spec.prototype.buffer.from_bytes(encoded)
        try:
            (decoded,) = sync(self._pipeline.decode([(buffer, self._spec)]))
        except DECODE_ERRORS as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        array: NDArray[Any] = np.empty(0) if decoded is None else decoded.as_numpy_array()
        if array.shape != self._spec.shape:
            raise ValueError(f"codecs made shape {array.shape}, the chunk shape is {self._spec.shape}")
        return array


def _refuse_pickle(layout: ArrayLayout) -> None:
    allowed = zarr_config.get("array.allow_unsafe_pickle_decode", False) is True
    if not allowed and any(step.codec == "pickle" for step in layout.codec_chain):
        raise UnsupportedError(
            f"array {layout.path!r}: codec 'pickle' can run any code, so it is refused; if the store is trusted, "
            "set zarr.config 'array.allow_unsafe_pickle_decode' to True"
        )
