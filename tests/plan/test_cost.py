"""The choice between device and host: by streams, sizes and threads, unless it is forced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xgpuzarr.plan.codec_chain import build_codec_chain
from xgpuzarr.plan.cost import Decision, decide

KB, MB = 1 << 10, 1 << 20


def route(
    codec: str, n_chunks: int, chunk_nbytes: int, config: dict[str, Any] | None = None, **options: Any
) -> Decision:
    chain = build_codec_chain(
        [(codec, config or {})], zarr_format=2, dtype=np.dtype("f4"), chunk_shape=(chunk_nbytes // 4,)
    )
    known: dict[str, Any] = {"n_threads": 16, "inflate_gbps": 0.5} | options
    return decide(chain, n_chunks=n_chunks, chunk_nbytes=chunk_nbytes, itemsize=4, **known)


@pytest.mark.parametrize("codec", ["gzip", "zlib"])
def test_few_large_chunks_inflate_on_the_host_and_many_small_ones_on_the_device(codec: str) -> None:
    assert route(codec, 64, 4 * MB).route == "host"
    assert route(codec, 24_000, 64 * KB).route == "device"
    assert route(codec, 384, 4 * MB).route == "host"
    assert route(codec, 384, 4 * MB, n_threads=4).route == "device"
    assert route(codec, 1, 4 * MB, n_threads=1).route == "host"


def test_a_slower_inflate_leaves_more_to_the_device() -> None:
    assert route("gzip", 1600, MB, n_threads=12).route == "host"
    assert route("gzip", 1600, MB, n_threads=12, inflate_gbps=0.25).route == "device"


def test_blosc_is_weighed_only_where_it_deflates() -> None:
    assert route("blosc", 4, 4 * MB, {"cname": "zlib"}).route == "host"
    assert route("blosc", 4000, MB, {"cname": "zlib"}).route == "device"
    assert route("blosc", 4000, MB, {"cname": "zlib", "blocksize": 64 * KB}).route == "device"
    assert route("blosc", 1, 4 * MB, {"cname": "lz4"}) == Decision("device")


def test_other_codecs_are_not_weighed() -> None:
    for codec in ("zstd", "lz4"):
        assert route(codec, 1, 64 * MB) == Decision("device")


def test_nothing_to_read() -> None:
    assert route("gzip", 0, MB) == Decision("device")


def test_forced() -> None:
    assert route("gzip", 1, MB, wanted="device") == Decision("device", "route='device' was asked for")
    assert route("zstd", 9000, MB, wanted="host") == Decision("host", "route='host' was asked for")


def test_no_choice() -> None:
    assert route("bz2", 1, MB, wanted="device") == Decision("host", "codec 'bz2' has no GPU decoder")


def test_reasons_say_what_was_weighed() -> None:
    assert route("gzip", 64, 4 * MB).reason == (
        "64 chunks of 4194304 bytes inflate at about 0.8 GB/s on the device, 8 GB/s on 16 host threads"
    )
