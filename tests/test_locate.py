"""Chunks are found in shards of any store, and no index leads to bytes that are no chunk."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

import xgpuzarr
from xgpuzarr.errors import CorruptChunkError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import Store

VALUES = np.arange(1, 65, dtype="<f4").reshape(8, 8)
CHUNK_NBYTES = 64
INDEX_NBYTES = 4 * 16 + 4


@pytest.fixture(params=["local", "zip", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store to write to."""
    if request.param == "local":
        return LocalStore(tmp_path / "s")
    return MemoryStore() if request.param == "memory" else ZipStore(tmp_path / "s.zip", mode="w")


def written(*, is_nested: bool = False) -> dict[str, bytes]:
    """Objects of an array of one shard, which holds 2 x 2 chunks: its metadata and the shard."""
    inner = [ShardingCodec(chunk_shape=(4, 4), codecs=[BytesCodec()])] if is_nested else [BytesCodec()]
    array = zarr.create_array(
        stored := MemoryStore(),
        shape=(8, 8),
        chunks=(8, 8),
        dtype="<f4",
        serializer=ShardingCodec(chunk_shape=(4, 4), codecs=inner),
        compressors=None,
    )
    array[:] = VALUES
    return {key: value.to_bytes() for key, value in stored._store_dict.items()}


def with_entry(shard: bytes, number: int, offset: int, nbytes: int) -> bytes:
    """The shard with another entry in the index at its end."""
    index = bytearray(shard[-INDEX_NBYTES:-4])
    index[16 * number : 16 * number + 16] = struct.pack("<QQ", offset, nbytes)
    return shard[:-INDEX_NBYTES] + index + struct.pack("<I", google_crc32c.value(bytes(index)))


def opened(store: Store, objects: dict[str, bytes]) -> xgpuzarr.ZarrArray:
    for key, value in objects.items():
        sync(store.set(key, default_buffer_prototype().buffer.from_bytes(value)))
    if isinstance(store, ZipStore):
        store.close()
        return xgpuzarr.open_array(store.path, device="cpu")
    return xgpuzarr.open_array(store, device="cpu")


@pytest.mark.parametrize("is_nested", [False, True])
def test_chunks_of_a_shard_are_found(store: Store, is_nested: bool) -> None:
    array = opened(store, written(is_nested=is_nested))
    for key in (..., np.s_[:4, 4:], np.s_[7, ::5]):
        np.testing.assert_array_equal(array[key], VALUES[key])


@pytest.mark.parametrize("key", [..., np.s_[:4, 4:]], ids=["all", "one chunk"])
@pytest.mark.parametrize("offset", [4 * CHUNK_NBYTES - 6, 4 * CHUNK_NBYTES, 4 * CHUNK_NBYTES + INDEX_NBYTES - 64])
def test_an_index_that_leads_into_itself(store: Store, key: object, offset: int) -> None:
    objects = written()
    array = opened(store, objects | {"c/0/0": with_entry(objects["c/0/0"], 1, offset, CHUNK_NBYTES)})
    with pytest.raises(CorruptChunkError, match=r"'c/0/0'.* index "):
        array[key]
    np.testing.assert_array_equal(array[4:], VALUES[4:])


@pytest.mark.parametrize("offset", [4 * CHUNK_NBYTES - 6, 4 * CHUNK_NBYTES + INDEX_NBYTES, 1 << 40])
@pytest.mark.parametrize("number", range(4))
def test_the_chunk_with_the_wrong_entry_is_named(store: Store, number: int, offset: int) -> None:
    objects = written()
    array = opened(store, objects | {"c/0/0": with_entry(objects["c/0/0"], number, offset, CHUNK_NBYTES)})
    with pytest.raises(CorruptChunkError, match=rf"^array '', chunk \({number // 2}, {number % 2}\)"):
        array[:]


def test_an_inner_shard_that_lies_in_the_outer_index() -> None:
    objects = written(is_nested=True)
    inner_nbytes = CHUNK_NBYTES + 16 + 4
    shard = with_entry(objects["c/0/0"], 3, 4 * inner_nbytes - CHUNK_NBYTES, inner_nbytes)
    array = opened(MemoryStore(), objects | {"c/0/0": shard})
    with pytest.raises(CorruptChunkError, match="48 bytes follow, the shard index takes 68"):
        array[:]


@pytest.mark.parametrize("n_chunks", [2 * 10**12, 2**61 - 1])
def test_shards_of_more_chunks_than_an_index_may_have(store: Store, n_chunks: int) -> None:
    metadata = json.loads(written()["zarr.json"])
    metadata |= {"shape": [n_chunks], "fill_value": 1.5}
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = [n_chunks]
    metadata["codecs"][0]["configuration"]["chunk_shape"] = [1]
    objects = {"zarr.json": json.dumps(metadata).encode()}
    if not isinstance(store, ZipStore):
        assert opened(store, objects)[:3].tolist() == [1.5, 1.5, 1.5]
    array = opened(store, objects | {"c/0": bytes(100)})
    problem = rf"array '' .*key 'c/0'.* index of {16 * n_chunks + 4} bytes"
    with pytest.raises((CorruptChunkError, UnsupportedError), match=problem):
        array[:3]
