"""Arrays of every codec chain that is decoded here, and ways to damage them; for the tests of host and device reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import zarr
import zarr.codecs.numcodecs as n3
from numcodecs.checksum32 import CRC32, CRC32C, Adler32
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.codecs.cast_value import CastValue
from zarr.codecs.scale_offset import ScaleOffset

if TYPE_CHECKING:
    from pathlib import Path

SHAPE, CHUNKS = (23, 31, 40), (4, 31, 16)


@dataclass(frozen=True)
class Case:
    """One array.

    Attributes
    ----------
    options
        For `zarr.create_array`.
    route
        Where its chunks are decoded.
    """

    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    route: str = "device"

    def write(self, path: Path) -> np.ndarray:
        """Write the array; return what zarr-python reads of it."""
        array = zarr.create_array(path, shape=SHAPE, chunks=CHUNKS, dtype=self.dtype, fill_value=None, **self.options)
        array[:] = values(self.dtype)
        return array[:]


def values(dtype: str) -> np.ndarray:
    """Small whole numbers, flags or words."""
    random, size = np.random.default_rng(1), math.prod(SHAPE)
    numbers = random.integers(0, 100, size)
    if np.dtype(dtype).kind == "b":
        return (numbers < 50).reshape(SHAPE)
    if np.dtype(dtype).kind == "S":
        return np.char.add(b"v", numbers.astype("S3")).astype(dtype).reshape(SHAPE)
    return numbers.astype("i8").astype(dtype).reshape(SHAPE)


def v2(dtype: str, filters: list[Any], compressor: Any = None, order: str = "C", route: str = "device") -> Case:
    options = {"zarr_format": 2, "filters": filters, "compressors": compressor, "order": order}
    return Case(dtype, options, route)


def v3(dtype: str, filters: list[Any] | None, compressors: list[Any] | None = None, **options: Any) -> Case:
    route = options.pop("route", "device")
    options["serializer"] = BytesCodec(endian=options.pop("endian", "little"))
    return Case(dtype, {"filters": filters or None, "compressors": compressors, **options}, route)


ZSTD, LZ4, GZIP, ZLIB = numcodecs.Zstd(3), numcodecs.LZ4(), numcodecs.GZip(5), numcodecs.Zlib(5)
BLOSC = numcodecs.Blosc("lz4", 5, 1)

CASES = {
    "v2-delta": v2("<i2", [numcodecs.Delta("<i2")], ZLIB),
    "v2-delta-shuffle": v2("<i2", [numcodecs.Delta("<i2"), numcodecs.Shuffle(2)], ZLIB),
    "v2-delta-narrow": v2("<u4", [numcodecs.Delta("<u4", "|i1")], ZSTD, "F"),
    "v2-delta-big-endian": v2(">i4", [numcodecs.Delta(">i4", ">i2")], LZ4),
    "v2-delta-times": v2("<M8[s]", [numcodecs.Delta("<i8")], GZIP),
    "v2-delta-floats": v2("<f4", [numcodecs.Delta("<f4")], ZSTD, route="host"),
    "v2-fixedscaleoffset": v2("<f4", [numcodecs.FixedScaleOffset(10, 0.5, "<f4", "|u1")], ZSTD),
    "v2-fixedscaleoffset-f": v2(">f8", [numcodecs.FixedScaleOffset(10, 100, ">f8", ">i2")], None, "F"),
    "v2-quantize": v2("<f8", [numcodecs.Quantize(3, "<f8", "<f4")], BLOSC),
    "v2-quantize-to-half": v2("<f2", [numcodecs.Quantize(1, "<f2", "<f8")], BLOSC, route="host"),
    "v2-astype": v2("<f8", [numcodecs.AsType("<i4", "<f8")], LZ4),
    "v2-packbits": v2("|b1", [numcodecs.PackBits()], GZIP, "F"),
    "v2-packbits-alone": v2("|b1", [numcodecs.PackBits()]),
    "v2-bitround": v2("<f4", [numcodecs.BitRound(4)], ZSTD),
    "v2-shuffle-alone": v2("<i4", [numcodecs.Shuffle(4)]),
    "v2-shuffle-words": v2("|S5", [numcodecs.Shuffle(5)], BLOSC),
    "v2-crc32": v2("<i4", [CRC32()], ZSTD),
    "v2-crc32-end": v2("<i4", [CRC32(location="end")]),
    "v2-crc32c": v2("<f8", [CRC32C()], LZ4, "F"),
    "v2-adler32": v2("<i2", [Adler32(location="end"), numcodecs.Shuffle(4)]),
    "v2-fletcher32": v2(">f8", [numcodecs.Shuffle(8), numcodecs.Fletcher32()], ZLIB),
    "v2-bz2": v2("<i4", [], numcodecs.BZ2(), route="host"),
    "v3-crc32c": v3("i4", None, [ZstdCodec(), Crc32cCodec()]),
    "v3-crc32c-alone": v3("i4", None, [Crc32cCodec()], endian="big"),
    "v3-crc32c-twice": v3("f4", None, [Crc32cCodec(), GzipCodec(), Crc32cCodec()]),
    "v3-crc32c-sharded": v3("f4", None, [ZstdCodec(), Crc32cCodec()], shards=(8, 31, 48)),
    "v3-numcodecs-checksums": v3("i2", None, [n3.Adler32(), n3.LZ4(), n3.Fletcher32(), n3.CRC32(location="end")]),
    "v3-blosc-crc32": v3("i2", None, [n3.Blosc(cname="lz4", shuffle=1), n3.CRC32()]),
    "v3-shuffle": v3("f8", None, [n3.Shuffle(elementsize=8), ZstdCodec()], endian="big"),
    "v3-delta": v3("i4", [n3.Delta(dtype="<i4")], [ZstdCodec()], endian="big"),
    "v3-transpose-delta": v3("i4", [TransposeCodec(order=(2, 0, 1)), n3.Delta(dtype="<i4", astype="<i2")], [n3.Zlib()]),
    "v3-fixedscaleoffset": v3("f8", [n3.FixedScaleOffset(offset=1, scale=2, dtype="<f8", astype="<u2")], [n3.LZ4()]),
    "v3-quantize": v3("f4", [n3.Quantize(digits=2, dtype="<f4")], [ZstdCodec()]),
    "v3-astype": v3("i8", [n3.AsType(encode_dtype="<i2", decode_dtype="<i8")], [ZstdCodec()], shards=(8, 31, 48)),
    "v3-bitround": v3("f4", [n3.BitRound(keepbits=3)], None),
    "v3-packbits": v3("bool", [n3.PackBits()], [ZstdCodec()]),
    "v3-scale-offset": v3("i4", [ScaleOffset(offset=-3, scale=7)], [ZstdCodec()]),
    "v3-scale-offset-transpose": v3("f4", [ScaleOffset(scale=0.25), TransposeCodec(order=(1, 2, 0))], [ZstdCodec()]),
    "v3-cast-value": v3("f4", [CastValue(data_type="uint8")], [ZstdCodec()]),
    "v3-scale-offset-cast": v3("f8", [ScaleOffset(offset=10), CastValue(data_type="int16")], None, endian="big"),
    "v3-two-compressors": v3("i4", None, [ZstdCodec(), GzipCodec()], route="host"),
    "v3-bz2": v3("i4", None, [n3.BZ2()], route="host"),
}


def damage(path: Path, at: int) -> None:
    """Turn one byte of the first chunk of an array."""
    chunk = next(file for name in ("0.0.0", "c/0/0/0") if (file := path / name).exists())
    data = bytearray(chunk.read_bytes())
    data[at] ^= 0x40
    chunk.write_bytes(data)


DAMAGE = {
    # name: (case, the byte that is turned, what the error says)
    "checksum of encoded bytes": ("v3-crc32c", 20, "checksum do not match"),
    "stored checksum": ("v3-crc32c", -1, "checksum do not match"),
    "checksum of Blosc bytes": ("v3-blosc-crc32", 30, "checksum do not match"),
    "checksum of plain bytes": ("v3-crc32c-alone", 100, "checksum do not match"),
    "checksum at the start": ("v2-crc32", 1, "zstd|checksum do not match"),
    "fletcher32 within zlib": ("v2-adler32", 7, "checksum do not match"),
    "content of zlib": ("v2-delta", -1, "deflate"),
    "content of gzip": ("v2-delta-times", -6, "deflate"),
    "padding bits": ("v2-packbits-alone", 0, "codec 'packbits': the first byte is not the number of padding bits"),
}
