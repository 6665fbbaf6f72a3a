"""Stores written by other implementations at test time read as they were meant: tensorstore (C++) and zarrs (Rust)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import zarr

import xgpuzarr

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (29, 17, 33)
KEYS: list[Any] = [..., np.s_[::-2, 3, 5:], np.s_[[0, 28, 3], :, [1, 2, 32]], np.s_[4:4]]


def values(dtype: str) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(3)
    if dtype == "bool":
        return random.random(SHAPE) < 0.5
    return (random.standard_normal(SHAPE) * 50).astype(dtype)


def check(path: Path, expected: np.ndarray[Any, Any], device: str) -> None:
    array = xgpuzarr.open_array(path, device=device)
    for key in KEYS:
        got = array[key]
        host = got if isinstance(got, np.ndarray) else got.get()
        np.testing.assert_array_equal(host, expected[key])
        assert host.dtype == expected.dtype


V2_COMPRESSORS: list[Any] = [
    None,
    {"id": "zstd", "level": 3},
    {"id": "zlib", "level": 3},
    {"id": "bz2", "level": 3},
    *({"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": shuffle, "blocksize": 0} for shuffle in (0, 1, 2)),
    *({"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": shuffle, "blocksize": 0} for shuffle in (0, 1, 2)),
    {"id": "blosc", "cname": "blosclz", "clevel": 9, "shuffle": 1, "blocksize": 256},
    {"id": "blosc", "cname": "zlib", "clevel": 5, "shuffle": 2, "blocksize": 0},
    {"id": "blosc", "cname": "snappy", "clevel": 5, "shuffle": 1, "blocksize": 0},
]


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "|u1", "|b1", "<c8", "<f8"])
@pytest.mark.parametrize("compressor", V2_COMPRESSORS, ids=str)
def test_tensorstore_v2(tmp_path: Path, compressor: Any, dtype: str, device: str) -> None:
    data = values("bool" if dtype == "|b1" else dtype[1:])
    metadata = {"shape": SHAPE, "chunks": (8, 17, 10), "dtype": dtype, "compressor": compressor, "order": "F"}
    _tensorstore("zarr", tmp_path / "a", metadata, data)
    compressed_by_snappy = compressor and compressor.get("cname") == "snappy" and data.itemsize > 1
    if compressed_by_snappy and device == "cpu":  # numcodecs is built without it
        with pytest.raises(xgpuzarr.UnsupportedError, match=r"array .*key .*compressed with snappy"):
            xgpuzarr.open_array(tmp_path / "a", device=device)[...]
        return
    check(tmp_path / "a", data, device)


V3_COMPRESSORS: dict[str, list[Any]] = {
    "none": [],
    "zstd": [{"name": "zstd", "configuration": {"level": 3}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "blosc": [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}}],
    "bitshuffle": [{"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "bitshuffle"}}],
    "crc32c": [{"name": "crc32c"}],
    "zstd-crc32c": [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
}


@pytest.mark.parametrize("sharding", ["plain", "end", "start", "nested"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("compressor", V3_COMPRESSORS)
def test_tensorstore_v3(tmp_path: Path, compressor: str, endian: str, sharding: str, device: str) -> None:
    data = values("f4")
    codecs: list[Any] = [
        {"name": "transpose", "configuration": {"order": [1, 2, 0]}},
        {"name": "bytes", "configuration": {"endian": endian}},
        *V3_COMPRESSORS[compressor],
    ]
    if sharding != "plain":
        codecs = [_sharded((4, 17, 5), codecs, "end" if sharding == "nested" else sharding)]
    if sharding == "nested":
        codecs = [_sharded((8, 17, 10), codecs, "start")]
    metadata = {
        "shape": SHAPE,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (16, 17, 20)}},
        "codecs": codecs,
    }
    _tensorstore("zarr3", tmp_path / "a", metadata, data)
    check(tmp_path / "a", data, device)


def _sharded(chunk_shape: tuple[int, ...], codecs: list[Any], index_location: str) -> dict[str, Any]:
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": chunk_shape,
            "codecs": codecs,
            "index_codecs": index_codecs,
            "index_location": index_location,
        },
    }


def _tensorstore(driver: str, path: Path, metadata: dict[str, Any], data: np.ndarray[Any, Any]) -> None:
    spec = {"driver": driver, "kvstore": f"file://{path}", "metadata": metadata, "create": True}
    tensorstore.open(spec).result().write(data).result()


@pytest.mark.parametrize("shards", [None, (16, 17, 20)])
@pytest.mark.parametrize("compressor", ["zstd", "gzip", "blosc"])
def test_zarrs(tmp_path: Path, compressor: str, shards: Any, device: str) -> None:
    data = values("f8")
    codec = {
        "zstd": zarr.codecs.ZstdCodec(level=3, checksum=True),
        "gzip": zarr.codecs.GzipCodec(level=4),
        "blosc": zarr.codecs.BloscCodec(cname="zstd", shuffle="shuffle"),
    }[compressor]
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = zarr.create_array(
            tmp_path / "a", shape=SHAPE, chunks=(8, 17, 10), shards=shards, dtype="f8", compressors=codec
        )
        array[:] = data
    check(tmp_path / "a", data, device)
