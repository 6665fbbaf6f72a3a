"""Does `inspect_store` find every array of a store, and say of each what is true?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numcodecs
import pytest
import zarr
from zarr.storage import MemoryStore, ZipStore

from xgpuzarr.inspection import as_text, inspect_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A group with a sharded array, and a group in it with a v2-style chain, for the host."""
    path = tmp_path / "store.zarr"
    root = zarr.create_group(path)
    sharded = root.create_array(
        "t2m", shape=(6, 8), chunks=(1, 4), shards=(3, 8), dtype="f4", compressors=zarr.codecs.ZstdCodec()
    )
    sharded[:] = 1
    host = root.create_array("deep/er/lev", shape=(5,), chunks=(2,), dtype="i2", compressors=zarr.codecs.BloscCodec())
    host[:] = 7
    return path


def test_facts_of_each_array(store: Path) -> None:
    lev, t2m = inspect_store(store)
    assert (lev.path, t2m.path) == ("deep/er/lev", "t2m")
    assert (t2m.zarr_format, t2m.shape, t2m.dtype) == (3, (6, 8), "float32")
    assert (t2m.chunks, t2m.shards) == ((1, 4), (3, 8))
    assert t2m.codec_chain == "zstd | bytes[<f4]"
    assert t2m.decoded_nbytes == 6 * 8 * 4
    assert t2m.stored_nbytes == sum(f.stat().st_size for f in (store / "t2m").rglob("*") if f.is_file())
    assert (t2m.route, t2m.reason) == ("device", "")
    assert (lev.chunks, lev.shards) == ((2,), None)


def test_text_is_a_tree_with_sums(store: Path) -> None:
    lines = as_text("store.zarr", inspect_store(store)).splitlines()
    assert lines[:4] == ["store.zarr", "  deep/", "    er/", "      lev  int16 (5,), chunks (2,), Zarr v3"]
    assert "  t2m  float32 (6, 8), chunks (1, 4), shards (3, 8), Zarr v3" in lines
    assert lines[-1].startswith("arrays: 2, ")
    assert lines[-1].endswith(", 202 B decoded")


def test_groups_that_share_a_parent_name_it_once() -> None:
    root = zarr.create_group(MemoryStore())
    for path in ("a/b/x", "a/c/x", "a/c/y", "d/c/x"):
        root.create_array(path, shape=(1,), dtype="u1")
    lines = as_text("s", inspect_store(root.store)).splitlines()
    tree = [line.split("  uint8")[0] for line in lines if line.endswith("/") or "uint8 (1,)" in line]
    assert tree == ["  a/", "    b/", "      x", "    c/", "      x", "      y", "  d/", "    c/", "      x"]


def test_a_host_route_has_its_reason(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "s.zarr", zarr_format=2)
    root.create_array("v", shape=(4,), dtype="f4", compressors=numcodecs.BZ2())
    (entry,) = inspect_store(tmp_path / "s.zarr")
    assert entry.route == "host"
    assert "bz2" in entry.reason


def test_a_broken_array_does_not_hide_the_others(store: Path) -> None:
    (store / "deep/er/lev/zarr.json").write_text("{")
    lev, t2m = inspect_store(store)
    assert lev.route == ""
    assert "not valid JSON" in lev.reason
    assert lev.shape is None
    assert t2m.route == "device"
    assert "lev  cannot be read" in as_text("s", [lev, t2m])


def test_a_link_to_the_folder_above_ends(store: Path) -> None:
    (store / "deep" / "up").symlink_to(store, target_is_directory=True)
    assert {entry.path.rsplit("/", 1)[-1] for entry in inspect_store(store)} == {"lev", "t2m"}


def test_one_array_is_a_store(store: Path) -> None:
    (entry,) = inspect_store(store / "t2m")
    assert entry.path == ""
    assert entry.shape == (6, 8)
    assert "(root)" in as_text("t2m", [entry])


def test_zip_files(tmp_path: Path) -> None:
    with ZipStore(tmp_path / "s.zip", mode="w") as zipped:
        zarr.create_group(zipped).create_array("g/v", shape=(2,), dtype="f8")
    assert [entry.path for entry in inspect_store(tmp_path / "s.zip")] == ["g/v"]


def test_no_store_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no Zarr store at .*nowhere"):
        inspect_store(tmp_path / "nowhere")
