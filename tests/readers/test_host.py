"""Files are read in ranges, and what is in place of a file is told from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALLS: dict[str, Callable[[LocalReader, str], Any]] = {
    "read": lambda reader, key: reader.read([ObjectRead(key, ((0, WHOLE),))])[0],
    "read_into": lambda reader, key: reader.read_into(key, memoryview(bytearray(20))),
    "object_nbytes": lambda reader, key: reader.object_nbytes(key),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[LocalReader, str], Any]:
    """Each way to ask for an object."""
    return CALLS[request.param]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a" / "c").mkdir(parents=True)
    (tmp_path / "a" / "c" / "0").write_bytes(bytes(range(10)))
    return tmp_path


def test_ranges(root: Path) -> None:
    places = ((0, WHOLE), (7, WHOLE), (2, 5), (-3, 3), (4, 0))
    found, missing = LocalReader(root).read([ObjectRead("a/c/0", places), ObjectRead("a/c/1", ((0, WHOLE),))])
    assert [list(part) for part in found] == [list(range(10)), [7, 8, 9], [2, 3, 4, 5, 6], [7, 8, 9], []]
    assert missing is None


@pytest.mark.parametrize("place", [(5, 6), (-11, 11), (20, 1)])
def test_a_range_outside_the_file(root: Path, place: tuple[int, int]) -> None:
    with pytest.raises(CorruptChunkError, match=r"key 'a/c/0': bytes .* are outside the object of 10 bytes"):
        LocalReader(root).read([ObjectRead("a/c/0", (place,))])


def test_an_object_is_read_as_far_as_there_is_room(root: Path) -> None:
    out = bytearray(4)
    assert LocalReader(root).read_into("a/c/0", memoryview(out)) == 10
    assert list(out) == [0, 1, 2, 3]


@pytest.mark.parametrize("key", ["a/c/1", "a/c/7/8/9", "b/0"])
def test_what_does_not_exist_is_missing(root: Path, call: Callable[[LocalReader, str], Any], key: str) -> None:
    assert call(LocalReader(root), key) in (None, MISSING)


def test_links_to_files_and_folders_are_followed(root: Path, call: Callable[[LocalReader, str], Any]) -> None:
    (root / "a" / "c" / "1").symlink_to("0")
    (root / "b").symlink_to(root / "a" / "c")
    reader = LocalReader(root)
    assert [call(reader, key) for key in ("a/c/1", "b/0")] == [call(reader, "a/c/0")] * 2
    assert call(reader, "b/2") in (None, MISSING)


def test_a_link_that_leads_nowhere_is_not_missing(root: Path, call: Callable[[LocalReader, str], Any]) -> None:
    (root / "a" / "c" / "1").symlink_to("../.git/annex/objects/x")
    with pytest.raises(
        ChunkReadError, match=r"key 'a/c/1': a link to '\.\./\.git/annex/objects/x', which does not exist; fetch"
    ):
        call(LocalReader(root), "a/c/1")


def test_a_folder_that_is_a_link_to_nowhere(root: Path, call: Callable[[LocalReader, str], Any]) -> None:
    (root / "b").symlink_to("/nonexistent/disk")
    with pytest.raises(ChunkReadError, match="key 'b': a link to '/nonexistent/disk', which does not exist"):
        call(LocalReader(root), "b/c/0")


def test_a_link_to_itself(root: Path, call: Callable[[LocalReader, str], Any]) -> None:
    (root / "a" / "c" / "1").symlink_to("1")
    with pytest.raises(ChunkReadError, match=r"key 'a/c/1' .*symbolic links; a link leads back to itself$"):
        call(LocalReader(root), "a/c/1")


def test_a_file_in_place_of_a_folder(root: Path, call: Callable[[LocalReader, str], Any]) -> None:
    with pytest.raises(ChunkReadError, match=r"key 'a/c/0/1' .*; a file is in place of a folder; the store is"):
        call(LocalReader(root), "a/c/0/1")
