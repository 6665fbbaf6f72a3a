"""Does `inspect_store` find every array of a store, and say of each what is true?"""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numcodecs
import pytest
import zarr
from zarr.storage import MemoryStore, ZipStore

from tests.remote.range_server import RangeServer
from xgpuzarr.errors import ChunkReadError, UnsupportedError
from xgpuzarr.inspection import as_text, inspect_store

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    assert lines.count("    can be decoded on the device") == 1  # of t2m; that of lev is further in
    assert lines[-2].startswith("arrays: 2, 2 can be decoded on the device; ")
    assert lines[-2].endswith(", 202 B decoded")
    assert lines[-1] == 'engine="gpuzarr" leaves coordinates, bounds and scalars on the host: see ds.gpuzarr.routes'


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
    assert as_text("s", [entry]).splitlines()[3:] == [
        f"    decoded on the host: {entry.reason}",
        "",
        f"arrays: 1, 0 can be decoded on the device; {entry.stored_nbytes} B stored, 16 B decoded",
    ]


def test_a_broken_array_does_not_hide_the_others(store: Path) -> None:
    (store / "deep/er/lev/zarr.json").write_text("{")
    lev, t2m = inspect_store(store)
    assert lev.route == ""
    assert "not valid JSON" in lev.reason
    assert lev.shape is None
    assert t2m.route == "device"
    assert "lev  cannot be read" in as_text("s", [lev, t2m])


def test_a_link_to_the_folder_above_ends(store: Path) -> None:
    for name in ("up", "again"):
        (store / "deep" / name).symlink_to(store, target_is_directory=True)
    assert [entry.path for entry in inspect_store(store)] == ["deep/er/lev", "t2m"]


def test_links_to_arrays_are_listed_and_groups_under_their_own_path(store: Path) -> None:
    (store / "a").symlink_to("deep")
    (store / "latest").symlink_to("t2m")
    entries = {entry.path: entry.shape for entry in inspect_store(store)}
    assert entries == {"deep/er/lev": (5,), "t2m": (6, 8), "latest": (6, 8)}


def test_links_that_lead_nowhere_are_listed_with_the_problem(store: Path) -> None:
    (store / "self").symlink_to("self")
    (store / "gone").symlink_to("/nonexistent/t")
    reasons = {entry.path: entry.reason for entry in inspect_store(store) if not entry.route}
    assert reasons == {
        "gone": "a link to '/nonexistent/t', which does not exist",
        "self": "the folder cannot be listed: Too many levels of symbolic links",
    }


def test_a_folder_in_place_of_metadata_is_listed_with_the_problem(store: Path) -> None:
    (store / "deep" / "er" / "zarr.json").unlink()
    (store / "deep" / "er" / "zarr.json").mkdir()
    er, lev, _ = inspect_store(store)
    assert (er.path, er.route, er.reason) == ("deep/er", "", "its zarr.json is not a file that can be read")
    assert lev.shape == (5,)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "s").create_array("a\x1b[31m\nb\u202e", shape=(2,), dtype="i4")
    text = as_text("s\x1b", inspect_store(tmp_path / "s"))
    assert text.splitlines()[:2] == [r"s\x1b", r"  a\x1b[31m\nb\u202e  int32 (2,), chunks (2,), Zarr v3"]


def test_what_the_client_of_a_server_raises_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    class Failing(MemoryStore):
        async def get(self, *_: Any, **__: Any) -> None:
            raise NoCredentialsError("unable to locate credentials\nand more")

    client = SimpleNamespace(BotoCoreError=NoCredentialsError, ClientError=NoCredentialsError)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", client)
    with pytest.raises(ChunkReadError, match=r"^store memory://\d+: unable to locate credentials; look at its name"):
        inspect_store(Failing())


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(UnsupportedError, match="store foo://bar: no file system is known for such a URL"):
        inspect_store("foo://bar")


@pytest.fixture(params=[2, 3])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RangeServer, Path]]:
    """A server that lists no folder, of a group with an array in a group."""
    root = zarr.create_group(tmp_path / "s", zarr_format=request.param)
    root.create_array("g/t", shape=(8,), chunks=(2,), dtype="f4")[:] = 1
    server = RangeServer(tmp_path)
    yield server, tmp_path / "s"
    server.close()


def consolidate(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)  # version 3 of the format has no word on it yet
        zarr.consolidate_metadata(path)


def test_a_store_that_lists_nothing_is_one_clear_error(served: tuple[RangeServer, Path]) -> None:
    url = f"{served[0].url}/s"
    with pytest.raises(UnsupportedError) as caught:
        inspect_store(url)
    assert str(caught.value) == (
        f"store {url}: it lists nothing, and has no consolidated metadata that names its arrays; "
        f"give the path of one array, as in {url}/PATH"
    )
    (entry,) = inspect_store(f"{url}/g/t")
    assert (entry.shape, entry.stored_nbytes) == ((8,), None)


@pytest.mark.parametrize("is_forbidden", [False, True])
def test_a_store_that_lists_nothing_is_listed_by_its_consolidated_metadata(
    served: tuple[RangeServer, Path], is_forbidden: bool
) -> None:
    server, path = served
    url = f"{server.url}/s"
    server.forbidden = "s/" if is_forbidden else ""
    if is_forbidden:
        with pytest.raises(
            UnsupportedError, match=r": it cannot be listed \(403, .*\), and has no consolidated metadata"
        ):
            inspect_store(url)
    consolidate(path)
    (entry,) = inspect_store(url)
    assert (entry.path, entry.shape, entry.stored_nbytes, entry.route) == ("g/t", (8,), None, "device")
    sums = as_text(url, [entry]).splitlines()[-2]
    assert sums == "arrays: 1, 1 can be decoded on the device; ? stored, 32 B decoded"


def test_arrays_that_only_the_consolidated_metadata_names_are_listed(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path, zarr_format=2)
    for name in ("own", "other"):
        root.create_array(name, shape=(8,), chunks=(2,), dtype="f4")
    consolidate(tmp_path)
    (tmp_path / "other" / ".zarray").unlink()
    assert [entry.path for entry in inspect_store(tmp_path)] == ["other", "own"]
    (tmp_path / ".zmetadata").write_text("{")
    assert [entry.path for entry in inspect_store(tmp_path)] == ["own"]


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
