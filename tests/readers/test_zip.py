"""Members of zip files are read as zipfile reads them, in ranges where they lie, and damage is named."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

import xgpuzarr
from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.opening import reader_for
from xgpuzarr.options import ReadOptions
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead
from xgpuzarr.readers.store import StoreReader
from xgpuzarr.readers.zip import ZipReader

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = np.random.default_rng(0).integers(0, 4, 5000).astype("u1").tobytes()
COMPRESSIONS = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED}


@pytest.fixture(params=COMPRESSIONS)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A zip file behind bytes that are not its own, with two members."""
    path = tmp_path / "s.zip"
    path.write_bytes(b"#!/bin/sh\n")
    with zipfile.ZipFile(path, "a", COMPRESSIONS[request.param]) as written:
        written.writestr("a/0", CONTENT)
        written.writestr("empty", b"")
    return path


def test_ranges(archive: Path) -> None:
    places = ((0, WHOLE), (7, WHOLE), (100, 900), (-13, 13), (4999, 1), (40, 0))
    found, empty, missing = ZipReader.of(archive).read(
        [ObjectRead("a/0", places), ObjectRead("empty", ((0, WHOLE),)), ObjectRead("a/1", ((0, WHOLE),))]
    )
    expected = [CONTENT, CONTENT[7:], CONTENT[100:1000], CONTENT[-13:], CONTENT[4999:], b""]
    assert [bytes(part) for part in found] == expected
    assert [bytes(part) for part in empty] == [b""]
    assert missing is None


def test_sizes_are_known_without_reading(archive: Path) -> None:
    reader = ZipReader.of(archive)
    assert [reader.object_nbytes(key) for key in ("a/0", "empty", "a/1")] == [5000, 0, MISSING]


@pytest.mark.parametrize("place", [(4990, 11), (-5001, 5001), (6000, 1)])
def test_a_range_outside_the_member(archive: Path, place: tuple[int, int]) -> None:
    with pytest.raises(CorruptChunkError, match=r"key 'a/0': bytes .* outside the member of 5000 bytes"):
        ZipReader.of(archive).read([ObjectRead("a/0", (place,))])


@pytest.mark.parametrize("at", [10, 2, 200])
def test_a_flipped_bit(archive: Path, at: int) -> None:
    """In the local header's signature (byte 10), before the archive, and in the data."""
    damaged = bytearray(archive.read_bytes())
    damaged[at] ^= 16
    archive.write_bytes(damaged)
    wanted = [ObjectRead("a/0", ((0, WHOLE),))]
    if at == 2:
        assert bytes(ZipReader.of(archive).read(wanted)[0][0]) == CONTENT
        return
    with pytest.raises(CorruptChunkError, match=r"key 'a/0': (no member starts at byte 10|the member)"):
        ZipReader.of(archive).read(wanted)


def test_a_member_longer_than_the_directory_says(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("a", bytes(100_000))
    member = zipfile.ZipFile(tmp_path / "s.zip").getinfo("a")
    member.file_size = 10
    reader = ZipReader.of(tmp_path / "s.zip")
    reader._members = {"a": member}
    with pytest.raises(CorruptChunkError, match="size or CRC-32"):
        reader.read([ObjectRead("a", ((0, WHOLE),))])


def test_a_file_cut_short_or_gone_after_opening(archive: Path) -> None:
    reader = ZipReader.of(archive)
    os.truncate(archive, 60)
    with pytest.raises(ChunkReadError, match=r"s\.zip': it was written anew since it was opened; open it again"):
        reader.read([ObjectRead("a/0", ((0, WHOLE),))])
    archive.unlink()
    with pytest.raises(ChunkReadError, match=r"s\.zip': No such file or directory; was it moved\?"):
        reader.read([ObjectRead("a/0", ((0, WHOLE),))])


def test_a_rewritten_file_is_read_anew(archive: Path) -> None:
    ZipReader.of(archive)
    with zipfile.ZipFile(archive, "a") as written:
        written.writestr("late", b"12")
    assert ZipReader.of(archive).object_nbytes("late") == 2


def write_array(path: Path, value: int) -> None:
    with ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="t", data=np.full(8, value, "f4"), chunks=(4,))


def test_an_open_zip_is_the_file_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the working directory becomes; and another file in its place is refused."""
    for number in (1, 2):
        (tmp_path / f"{number}").mkdir()
        write_array(tmp_path / f"{number}" / "z.zip", number)
    monkeypatch.chdir(tmp_path / "1")
    array = xgpuzarr.open_array(ZipStore("z.zip", mode="r"), path="t", device="cpu")
    monkeypatch.chdir(tmp_path / "2")
    assert array[:].tolist() == [1] * 8
    (tmp_path / "2" / "z.zip").replace(tmp_path / "1" / "z.zip")
    with pytest.raises(ChunkReadError, match="written anew since it was opened"):
        array[:]


@pytest.mark.parametrize("compression", ["bzip2", "own file object"])
def test_other_zips_are_read_by_zarr_python(tmp_path: Path, compression: str) -> None:
    path: Any = tmp_path / "s.zip"
    with ZipStore(path, mode="w", compression=zipfile.ZIP_BZIP2 if compression == "bzip2" else 0) as store:
        zarr.create_array(store, shape=(9,), chunks=(4,), dtype="i4")[:] = np.arange(9)
    with path.open("rb") as file, ZipStore(file if compression != "bzip2" else path, mode="r") as store:
        assert isinstance(reader_for(zarr.open_array(store, mode="r"), ReadOptions()), StoreReader)
        assert xgpuzarr.open_array(store, device="cpu")[::2].tolist() == [0, 2, 4, 6, 8]


def test_a_part_of_a_shard_reads_little_more(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((64, 1000))
    with ZipStore(tmp_path / "s.zip", mode="w") as store:
        zarr.create_array(store, shape=values.shape, chunks=(1, 1000), shards=(64, 1000), dtype="f8")[:] = values
    array = xgpuzarr.open_array(tmp_path / "s.zip", device=device)
    sizes, preadv = [], os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    got = array[7]
    np.testing.assert_array_equal(got if isinstance(got, np.ndarray) else got.get(), values[7])
    assert sum(sizes) < 10_000  # a header twice, an index of 1028 bytes, and a chunk of 8000
