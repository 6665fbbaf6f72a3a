"""Codec chains as decode steps: sizes between them, the four parts of a chain, routes and reasons."""

from __future__ import annotations

import math
from typing import Any, Literal

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.checksum32 import CRC32, CRC32C

from xgpuzarr.plan.codec_chain import CodecChain, build_codec_chain

F4 = np.dtype("<f4")


def v2(
    filters: list[Any], compressor: str | None = "zstd", *, dtype: Any = F4, order: Literal["C", "F"] = "C"
) -> CodecChain:
    codecs = [(config.pop("id"), config) for config in (codec.get_config() for codec in filters)]
    codecs += [(compressor, {})] if compressor else []
    return build_codec_chain(codecs, zarr_format=2, dtype=np.dtype(dtype), chunk_shape=(4, 6), order=order)


def v3(*codecs: tuple[str, dict[str, Any]] | str, dtype: Any = F4, chunk_shape: tuple[int, ...] = (4, 6)) -> CodecChain:
    pairs = [(codec, {}) if isinstance(codec, str) else codec for codec in codecs]
    return build_codec_chain(pairs, zarr_format=3, dtype=np.dtype(dtype), chunk_shape=chunk_shape)


BYTES = ("bytes", {"endian": "little"})


def names(steps: Any) -> list[str]:
    return [step.codec for step in steps]


def test_the_four_parts_of_a_v2_chain() -> None:
    chain = v2([numcodecs.Delta("<i4", "<i2"), numcodecs.Shuffle(2), CRC32()], "zlib", dtype="<i4", order="F")
    assert names(chain) == ["zlib", "crc32", "shuffle", "delta", "bytes", "transpose"]
    assert names(chain.checks) == []
    assert chain.compressor is chain.steps[0]
    assert names(chain.filters) == ["crc32", "shuffle", "delta"]
    assert names(chain.settled) == ["bytes", "transpose"]
    assert [(step.encoded_nbytes, step.decoded_nbytes) for step in chain] == [
        (None, 52), (52, 48), (48, 48), (48, 96), (96, 96), (96, 96),
    ]  # fmt: skip
    assert chain.unfiltered_nbytes == 52
    assert chain.stored_dtype == np.dtype("<i4")
    assert chain.axes(2) == (1, 0)
    assert chain.route == "device"


def test_the_four_parts_of_a_v3_chain() -> None:
    chain = v3(
        ("transpose", {"order": (1, 0)}),
        ("numcodecs.fixedscaleoffset", {"offset": 0, "scale": 10, "dtype": "<f4", "astype": "|u1"}),
        ("bytes", {}),
        ("numcodecs.crc32", {"location": "end"}),
        ("zstd", {"level": 1, "checksum": True}),
        "crc32c",
    )
    assert names(chain.checks) == ["crc32c"]
    assert names([chain.compressor]) == ["zstd"]
    assert names(chain.filters) == ["crc32", "bytes", "fixedscaleoffset"]
    assert names(chain.settled) == ["transpose"]
    assert chain.unfiltered_nbytes == 24 + 4
    assert chain.stored_dtype == F4
    assert chain.axes(2) == (1, 0)
    assert chain.route == "device"
    assert str(chain) == "crc32c | zstd | crc32 | bytes[|u1] | fixedscaleoffset | transpose[1, 0]"


def test_byte_order_is_settled_last_unless_filters_need_it() -> None:
    big = ("bytes", {"endian": "big"})
    assert v3(big, "zstd").stored_dtype == np.dtype(">f4")
    assert v3(("scale_offset", {"scale": 2}), big, "zstd").stored_dtype == F4
    assert names(v3(("scale_offset", {"scale": 2}), big, "zstd").filters) == ["bytes", "scale_offset"]


def test_nothing_to_undo() -> None:
    chain = v2([], None)
    assert chain.is_plain
    assert chain.compressor is None
    assert chain.unfiltered_nbytes == 96
    assert not v2([], "lz4").is_plain
    assert not v2([CRC32C()], None).is_plain
    assert not v2([], "bz2").is_plain


def test_a_transpose_before_a_filter_is_undone_with_it() -> None:
    chain = v3("numcodecs.bitround", ("transpose", {"order": (1, 0)}), BYTES)
    assert names(chain.filters) == ["bytes", "transpose", "bitround"]
    assert chain.filters[1].config["shape"] == (6, 4)
    assert chain.axes(2) == (0, 1)


@given(data=st.data(), ndim=st.integers(1, 4))
def test_axes_undo_what_transposing_did(data: st.DataObject, ndim: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    orders = data.draw(st.lists(st.permutations(range(ndim)), min_size=1, max_size=3))
    chunk = np.arange(math.prod(shape), dtype=F4).reshape(shape)
    stored = chunk
    for order in orders:
        stored = stored.transpose(order)
    chain = v3(*[("transpose", {"order": tuple(order)}) for order in orders], BYTES, chunk_shape=shape)
    np.testing.assert_array_equal(chunk.transpose(chain.axes(ndim)), stored)


@pytest.mark.parametrize("filters", [
    [numcodecs.Delta("<f4")],
    [numcodecs.FixedScaleOffset(1, 2, "<f4", "|i1")],
    [numcodecs.Quantize(2, "<f4", "<f2")],
    [numcodecs.AsType("<f8", "<f4")],
    [numcodecs.BitRound(3), numcodecs.Shuffle(4)],
    [CRC32(), numcodecs.Fletcher32(), numcodecs.Shuffle(4)],
    [CRC32C(location="start"), numcodecs.Adler32(), numcodecs.AsType("<u2", "|u1")],
], ids=lambda filters: "-".join(f.codec_id for f in filters))  # fmt: skip
def test_sizes_are_those_that_numcodecs_makes(filters: list[Any]) -> None:
    chain = v2(filters, None)
    encoded: Any = np.arange(24, dtype=F4)
    for codec, step in zip(filters, chain.filters[::-1], strict=True):
        assert step.decoded_nbytes == np.asarray(encoded).nbytes
        encoded = np.frombuffer(codec.encode(encoded), np.uint8)
        assert step.encoded_nbytes == encoded.nbytes
    assert chain.unfiltered_nbytes == encoded.nbytes


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_size_of_packed_bits(count: int) -> None:
    config = ("numcodecs.packbits", {})
    chain = v3(config, BYTES, dtype="bool", chunk_shape=(count,))
    assert chain.unfiltered_nbytes == numcodecs.PackBits().encode(np.ones(count, bool)).nbytes
    assert names(chain.filters) == ["bytes", "packbits"]


HOST = {
    "delta of floats": (v2([numcodecs.Delta("<f4")]), "sums floats", False),
    "delta of uint64 and int64": (v2([numcodecs.Delta("<u8", "<i8")], dtype="<u8"), "sums floats", False),
    "to float16": (v2([numcodecs.AsType("<f4", "<f2")], dtype="<f2"), "rounds to float16", False),
    "bz2": (v2([], "bz2"), "codec 'bz2' has no GPU decoder", True),
    "lzma": (v2([], "lzma"), "codec 'lzma' has no GPU decoder", True),
    "jenkins": (v2([], "jenkins_lookup3"), "codec 'jenkins_lookup3' has no GPU decoder", True),
    "zfpy": (v3("numcodecs.zfpy"), "codec 'zfpy' has no GPU decoder", True),
    "strings": (v3("vlen-utf8", "zstd", dtype="T"), "codec 'vlen-utf8' makes objects", True),
    "objects": (v2([numcodecs.JSON()], dtype="O"), "codec 'json2' makes objects", True),
    "unheard of": (v3(BYTES, "brotli"), "codec 'brotli' is decoded by zarr-python", True),
    "two compressors": (v3(BYTES, "zstd", "gzip"), "one compressor behind another", True),
    "shuffled once compressed": (v3(BYTES, "zstd", "numcodecs.shuffle"), "depends on the data", True),
    "unheard of parameter": (v3(("numcodecs.delta", {"dtype": "<f4", "axis": 1}), BYTES), "parameter 'axis'", True),
    "checksum in the middle": (v3(BYTES, ("numcodecs.crc32", {"location": "middle"})), "location 'middle'", True),
    "other dtype": (v3(("numcodecs.delta", {"dtype": "<i4"}), BYTES), "dtype is int32, the elements are float32", True),
    "elements left over": (v2([numcodecs.Shuffle(7)]), "elements of 7 bytes do not make up 96 bytes", True),
    "bits of numbers": (v3("numcodecs.packbits", BYTES), "it packs bool, the elements are float32", True),
    "complex": (v2([numcodecs.FixedScaleOffset(0, 1, "<c8")], dtype="<c8"), "'<c8' is no plain number", True),
    "scale 0": (v3(("scale_offset", {"scale": 0}), BYTES), "scale is 0", True),
    "half a scale": (v3(("scale_offset", {"scale": 1.5}), BYTES, dtype="i4"), "1.5 is no int32", True),
    "too large an offset": (v3(("scale_offset", {"offset": 300}), BYTES, dtype="u1"), "300 is no uint8", True),
    "rounding": (v3(("cast_value", {"data_type": "float64", "rounding": "towards-zero"}), BYTES), "is not done", True),
    "bfloat16": (v3(("cast_value", {"data_type": "bfloat16"}), BYTES), "'bfloat16' is no plain number", True),
}


@pytest.mark.parametrize(("chain", "reason", "by_zarr"), HOST.values(), ids=HOST)
def test_host_routes_and_their_reasons(chain: CodecChain, reason: str, by_zarr: bool) -> None:
    assert chain.route == "host"
    assert reason in "; ".join(chain.reasons)
    assert chain.by_zarr is by_zarr


def test_reasons_are_said_once() -> None:
    chain = v2([numcodecs.Delta("<f4"), numcodecs.Delta("<f4")])
    assert len(chain.reasons) == 1
