"""Whatever is wrong with a store gives one clear error that names it; never a hang, never fill values."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.abc.store import SuffixByteRequest
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

import xgpuzarr
from xgpuzarr.errors import ChunkReadError, CorruptChunkError, MetadataError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(64 * 32, dtype="f4").reshape(64, 32)


@pytest.fixture(params=["v2", "v3", "shards", "none", "vlen"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store with one array 't' of 4 x 2 chunks; `first_object` finds its first object."""
    path = tmp_path / "s.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2 if request.param == "v2" else 3)
    settings: dict[str, Any] = {
        "v2": {"compressors": numcodecs.Blosc("lz4")},
        "v3": {"compressors": ZstdCodec()},
        "shards": {"compressors": ZstdCodec(), "shards": (32, 32)},
        "none": {"compressors": None},
        "vlen": {"compressors": ZstdCodec()},
    }[request.param]
    values = VALUES.astype(str).astype(object) if request.param == "vlen" else VALUES
    dtype = str if request.param == "vlen" else "f4"
    group.create_array("t", shape=VALUES.shape, chunks=(16, 16), dtype=dtype, **settings)[:] = values
    return path


def first_object(store: Path) -> Path:
    found = store / "t" / "0.0"
    return found if found.exists() else store / "t" / "c" / "0" / "0"


def read(store: Path, device: str) -> Any:
    return xgpuzarr.open_array(store, path="t", device=device)[:]


def test_sound_store_reads(store: Path, device: str) -> None:
    got = read(store, device)
    assert (got if isinstance(got, np.ndarray) else got.get()).astype("f4").tolist() == VALUES.tolist()


@pytest.mark.parametrize("kept", [0, 3, 40])
def test_object_cut_short(store: Path, device: str, kept: int) -> None:
    chunk = first_object(store)
    chunk.write_bytes(chunk.read_bytes()[:kept])
    key = str(chunk.relative_to(store))
    with pytest.raises(CorruptChunkError, match=f"'t'.*key {key!r} of store '{re.escape(str(store))}'|'t'.*{key!r}"):
        read(store, device)


def test_object_too_long(store: Path, device: str) -> None:
    chunk = first_object(store)
    chunk.write_bytes(chunk.read_bytes() + b"\1" * 40)
    with pytest.raises(CorruptChunkError, match=f"array 't'.*key '{chunk.relative_to(store)}'"):
        read(store, device)


def test_directory_in_place_of_an_object(store: Path, device: str) -> None:
    chunk = first_object(store)
    chunk.unlink()
    chunk.mkdir()
    where = "array 't'.*" + re.escape(str(chunk.relative_to(store)))
    with pytest.raises(ChunkReadError, match=where + ".*must be a file"):
        read(store, device)


def test_named_pipe_in_place_of_an_object_does_not_hang(store: Path, device: str) -> None:
    chunk = first_object(store)
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(ChunkReadError, match="must be a file"):
        read(store, device)


def test_permission_denied(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake, because root may read everything."""
    chunk, real_open = first_object(store), os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path) == str(chunk):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    key = re.escape(str(chunk.relative_to(store)))
    with pytest.raises(ChunkReadError, match=f"{key}.*Permission denied; check the permissions"):
        read(store, "cpu")


def test_a_reader_s_error_names_array_chunk_and_key(store: Path) -> None:
    chunk = first_object(store)
    chunk.unlink()
    chunk.symlink_to("elsewhere")
    is_sharded = any("sharding" in file.read_text() for file in (store / "t").glob("zarr.json"))
    place = "shard index" if is_sharded else r"chunk \(0, 0\)"
    key = re.escape(str(chunk.relative_to(store)))
    with pytest.raises(ChunkReadError, match=f"^array 't', {place}: store .*, key '{key}': a link to 'elsewhere'"):
        read(store, "cpu")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_request_s_error_names_array_chunk_and_key(is_sharded: bool) -> None:
    class Failing(MemoryStore):
        async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
            if key == "t/c/1/0" and not isinstance(args[1], SuffixByteRequest):
                raise PermissionError("no")
            return await super().get(key, *args, **kwargs)

    group = zarr.open_group(failing := Failing(), mode="w")
    shards = (32, 32) if is_sharded else None
    group.create_array("t", shape=VALUES.shape, chunks=(16, 16), shards=shards, dtype="f4")[:] = VALUES
    chunk = r"\(2, 0\)" if is_sharded else r"\(1, 0\)"
    with pytest.raises(ChunkReadError, match=rf"^array 't', chunk {chunk}: store 'memory.*, key 't/c/1/0' \(.*: no$"):
        xgpuzarr.open_array(failing, path="t", device="cpu")[:]


def test_missing_object_is_the_fill_value(store: Path, device: str) -> None:
    chunk = first_object(store)
    chunk.unlink()
    got = read(store, device)
    host = got if isinstance(got, np.ndarray) else got.get()
    assert host[0, 0] == ("" if host.dtype.kind in "TO" else 0)


def test_damaged_bytes_are_not_numbers(store: Path) -> None:
    if (store / "t" / "zarr.json").exists() and "bytes" in (store / "t" / "zarr.json").read_text():
        chunk = first_object(store)
        damaged = bytearray(chunk.read_bytes())
        for at in range(len(damaged)):
            damaged[at] ^= 0xFF
        chunk.write_bytes(damaged)
        compressed = "zstd" in (store / "t" / "zarr.json").read_text()
        if compressed:
            with pytest.raises(CorruptChunkError):
                read(store, "cpu")


class TestNoStore:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no Zarr store at .*nothing\.zarr"):
            xgpuzarr.open_array(tmp_path / "nothing.zarr", device="cpu")

    def test_wrong_path_lists_the_arrays(self, tmp_path: Path) -> None:
        zarr.open_group(tmp_path / "s.zarr", mode="w").create_array("t", shape=(3,), dtype="f4")
        with pytest.raises(FileNotFoundError, match="no array at path 'u'; arrays there: 't'"):
            xgpuzarr.open_array(tmp_path / "s.zarr", path="u", device="cpu")

    def test_a_group_is_not_an_array(self, tmp_path: Path) -> None:
        zarr.open_group(tmp_path / "s.zarr", mode="w").create_array("t", shape=(3,), dtype="f4")
        with pytest.raises(FileNotFoundError, match="arrays there: 't'"):
            xgpuzarr.open_array(tmp_path / "s.zarr", device="cpu")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no array is there"):
            xgpuzarr.open_array(tmp_path, device="cpu")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.nc").write_bytes(b"CDF")
        with pytest.raises(FileNotFoundError, match="is a file and not a Zarr store"):
            xgpuzarr.open_array(tmp_path / "a.nc", device="cpu")

    def test_a_path_out_of_the_store(self, tmp_path: Path) -> None:
        zarr.open_group(tmp_path / "s.zarr", mode="w")
        zarr.create_array(tmp_path / "other", shape=(3,), dtype="f4")
        with pytest.raises((MetadataError, FileNotFoundError)):
            xgpuzarr.open_array(tmp_path / "s.zarr", path="../other", device="cpu")


class TestMetadata:
    @staticmethod
    def v2(tmp_path: Path, **changes: Any) -> Path:
        array = zarr.create_array(tmp_path / "a", shape=(10,), chunks=(5,), dtype="f4", zarr_format=2)
        array[:] = 1
        return TestMetadata.change(tmp_path / "a" / ".zarray", changes)

    @staticmethod
    def v3(tmp_path: Path, **changes: Any) -> Path:
        array = zarr.create_array(tmp_path / "a", shape=(10,), chunks=(5,), dtype="f4")
        array[:] = 1
        return TestMetadata.change(tmp_path / "a" / "zarr.json", changes)

    @staticmethod
    def change(document: Path, changes: dict[str, Any]) -> Path:
        document.write_text(json.dumps(json.loads(document.read_text()) | changes))
        return document.parent

    def test_not_json(self, tmp_path: Path) -> None:
        path = self.v3(tmp_path)
        (path / "zarr.json").write_text("{not json")
        with pytest.raises(MetadataError, match="metadata is not valid JSON"):
            xgpuzarr.open_array(path, device="cpu")

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": [-1]},
            {"shape": "x"},
            {"chunks": [5, 5]},
            {"compressor": {"id": "zstd", "surprise": 3}},
            {"order": "Q"},
            {"dimension_separator": "!"},
        ],
    )
    def test_contradictions_v2(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(MetadataError, match=re.escape(str(tmp_path / "a"))):
            xgpuzarr.open_array(self.v2(tmp_path, **changes), device="cpu")

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": [10, 10]},
            {"codecs": []},
            {"chunk_grid": {"name": "surprise"}},
            {"fill_value": "abc"},
            {"extra": {"name": "x", "must_understand": True}},
            {"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "surprise": 1}}]},
        ],
    )
    def test_contradictions_v3(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(MetadataError, match=re.escape(str(tmp_path / "a"))):
            xgpuzarr.open_array(self.v3(tmp_path, **changes), device="cpu")

    @pytest.mark.parametrize("name", ["surprise", "numcodecs.surprise"])
    def test_unknown_codec(self, tmp_path: Path, name: str) -> None:
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": name, "configuration": {}}]
        with pytest.raises(UnsupportedError, match=f"codec '{name}' has no decoder"):
            xgpuzarr.open_array(self.v3(tmp_path, codecs=codecs), device="cpu")

    def test_unknown_dtype(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="no such data type"):
            xgpuzarr.open_array(self.v3(tmp_path, data_type="float99"), device="cpu")

    def test_pickled_objects_are_refused(self, tmp_path: Path) -> None:
        path = self.v2(tmp_path, dtype="|O", filters=[{"id": "pickle", "protocol": 4}], fill_value=None)
        with pytest.raises(UnsupportedError, match="pickle"):
            xgpuzarr.open_array(path, device="cpu")[:]

    def test_a_size_past_64_bits(self, tmp_path: Path) -> None:
        array = xgpuzarr.open_array(self.v2(tmp_path, shape=[10**30]), device="cpu")
        with pytest.raises(UnsupportedError, match=r"2\*\*63"):
            array[:3]


def test_shard_index_with_a_flipped_bit(tmp_path: Path, device: str) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(64,), chunks=(8,), shards=(32,), dtype="f4")
    array[:] = np.arange(64)
    shard = tmp_path / "a" / "c" / "1"
    damaged = bytearray(shard.read_bytes())
    damaged[-10] ^= 4
    shard.write_bytes(damaged)
    with pytest.raises(CorruptChunkError, match=r"key 'c/1'.*CRC32C"):
        xgpuzarr.open_array(tmp_path / "a", device=device)[:]


def test_store_removed_after_opening_is_not_read_as_missing_chunks(tmp_path: Path, device: str) -> None:
    zarr.create_array(tmp_path / "a", shape=(4,), dtype="f4", fill_value=7)[:] = 1
    array = xgpuzarr.open_array(tmp_path / "a", device=device)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ChunkReadError, match=r"array '' of store .* is gone"):
        array[:]
