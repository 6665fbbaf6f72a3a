"""The benchmark runs, writes what its results depend on, and refuses to report a wrong read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr import bench
from xgpuzarr.cli import main
from xgpuzarr.errors import CorruptChunkError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def run(tmp_path: Path, *arguments: str) -> int:
    common = ["--device", "cpu", "--fields", "8", "--repeats", "1", "--folder", str(tmp_path), "--threads", "2"]
    return main(["bench", *common, *arguments])


def test_results_say_what_they_depend_on(tmp_path: Path) -> None:
    assert run(tmp_path, "--encodings", "zstd", "shards", "--json", str(tmp_path / "r.json"), "--commit", "abc") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["commit"] == "abc"
    assert report["machine"]["versions"]["zarr"]
    assert all(report["machine"]["versions"][peer] for peer in ("zarrs", "tensorstore", "isal"))
    assert report["cache"] == "page cache warm"
    readers = {"xgpuzarr", "zarr", "zarr-fused", "zarrs", "tensorstore"}
    assert {(row["encoding"], row["reader"]) for row in report["results"]} == {
        (encoding, reader) for encoding in ("zstd", "shards") for reader in readers
    }
    assert all(row["equal"] for row in report["results"])
    assert not list(tmp_path.glob("tmp*"))


def test_wrong_results_are_not_reported_as_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "readers_of", lambda *_, **__: {"liar": lambda: np.zeros((8, 721, 1440), "f4")})
    assert run(tmp_path, "--encodings", "none") == 1
    assert "liar of none" in capsys.readouterr().err


def test_an_encoding_that_another_reader_does_not_know_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise ValueError("no decoder for it\nand more")

    readers = {"other": refuse, "equal": lambda: bench.make_fields(8)}
    monkeypatch.setattr(bench, "readers_of", lambda *_, **__: readers)
    assert run(tmp_path, "--encodings", "none", "--json", str(tmp_path / "r.json")) == 0
    other, equal = json.loads((tmp_path / "r.json").read_text())["results"]
    assert other == {
        "encoding": "none",
        "reader": "other",
        "stored_bytes": equal["stored_bytes"],
        "reason": "no decoder for it",
    }
    assert equal["equal"]
    assert "other            not read: no decoder for it\n" in capsys.readouterr().out


def test_an_encoding_that_we_do_not_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CorruptChunkError("broken")

    monkeypatch.setattr(bench, "readers_of", lambda *_, **__: {"xgpuzarr": fail})
    assert run(tmp_path, "--encodings", "none") == 1


def test_readers_without_lz4_do_not_end_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "--encodings", "lz4", "--json", str(tmp_path / "r.json")) == 0
    rows = {row["reader"]: row for row in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert all("lz4" in rows[peer]["reason"] for peer in ("tensorstore", "zarrs"))
    assert rows["xgpuzarr"]["equal"]


def test_unknown_encodings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--encodings", "surprise") == 1
    assert "got surprise" in capsys.readouterr().err
