"""nvCOMP's option structs, byte by byte, and what is refused before they are made."""

from __future__ import annotations

import struct

import pytest

from xgpuzarr.decoders.nvcomp_formats import decode_options, encode_options, encode_struct, format_of
from xgpuzarr.errors import UnsupportedError


@pytest.mark.parametrize(
    ("algorithm", "keywords", "layout", "fields"),
    [
        # the structs of nvcomp/<algorithm>.h, field by field
        ("lz4", {}, "<ii56x", (1, 0)),
        ("lz4", {"data_type": "uint32"}, "<ii56x", (5, 0)),
        ("zstd", {}, "<64x", ()),
        ("snappy", {}, "<64x", ()),
        ("gzip", {}, "<i60x", (1,)),
        ("deflate", {"level": 0}, "<i60x", (0,)),
        ("gdeflate", {"level": 5}, "<i60x", (5,)),
        ("ans", {"data_type": "float32"}, "<iiBBB53x", (0, 11, 0, 0, 0)),
        ("bitcomp", {"data_type": "float64", "level": 1}, "<iidi44x", (1, 12, 0.0, 0)),
        ("cascaded", {"data_type": "int64"}, "<IIQQQB31x", (6, 1, 1, 0, 7, 3)),
        ("cascaded", {"data_type": "uint8", "level": 0}, "<IIQQQB31x", (1, 1, 1, 0, 7, 0)),
    ],
)
def test_encode_options_are_the_library_s_structs(algorithm, keywords, layout, fields):
    assert struct.calcsize(layout) == 64
    assert encode_options(algorithm, **keywords) == struct.pack(layout, *fields)


@pytest.mark.parametrize(
    ("algorithm", "layout", "fields"),
    [
        *((name, "<i60x", (2,)) for name in ("bitcomp", "deflate", "gdeflate", "gzip", "lz4", "snappy", "zstd")),
        ("ans", "<iiBBB53x", (2, 0xFF, 0, 0, 0)),
        ("cascaded", "<i4xIIQQ32x", (2, 0xFF, 0, 0, 0)),
    ],
)
def test_decode_options_read_types_from_the_stream_and_use_the_cuda_kernels(algorithm, layout, fields):
    assert struct.calcsize(layout) == 64
    assert bytes(decode_options(format_of(algorithm))) == struct.pack(layout, *fields)


@pytest.mark.parametrize(
    ("algorithm", "keywords", "message"),
    [
        ("zstd", {"level": 3}, "zstd: level must be None, got 3"),
        ("gzip", {"level": 6}, "gzip: level must be 0 to 5, got 6"),
        ("bitcomp", {"level": -1}, "bitcomp: level must be 0 to 1, got -1"),
        (
            "ans",
            {"data_type": "int16"},
            r"ans: data_type must be one of \['float16', 'float32', 'uint8'\], got 'int16'",
        ),
        ("cascaded", {"data_type": "float32"}, "cascaded: data_type must be one of"),
        ("brotli", {}, "nvCOMP has no algorithm 'brotli'; it has ans, bitcomp, cascaded"),
    ],
)
def test_unknown_options_are_refused(algorithm, keywords, message):
    with pytest.raises(UnsupportedError, match=message):
        encode_options(algorithm, **keywords)


def test_options_of_another_size_are_refused():
    with pytest.raises(ValueError, match="lz4: options must have 64 bytes, got 3"):
        encode_struct("lz4", b"abc")
