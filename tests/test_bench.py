"""The benchmark runs, writes what its results depend on, and refuses to report a wrong read."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest

from xgpuzarr import bench, system
from xgpuzarr.cli import main
from xgpuzarr.errors import CorruptChunkError

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.fixture
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "make_fields", Mock(side_effect=AssertionError("the run has begun")))


@pytest.mark.usefixtures("_nothing_is_measured")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "FILE/x/r.json"], "--json FILE/x/r.json: Not a directory; give a file to write to"),
        (["--json", "."], "--json .: Is a directory; give a file to write to"),
        (["--folder", "nowhere"], "--folder nowhere: not a folder that can be written to; give one"),
        (["--folder", "FILE"], "--folder FILE: not a folder that can be written to; give one"),
        (["--route", "device"], "--route device needs a device, and the run is on the host; leave out --route"),
        (["--encodings", "none", "surprise"], "gzip, got surprise"),
        (["--fields", "99999999"], "--fields 99999999 takes 1.25 PB of memory, got 10 GB; give fewer"),
        (["--fields", "400"], "--fields 400 takes 1.66 GB of disk at FOLDER, got 1 GB; give fewer"),
    ],
)
def test_what_cannot_be_met_is_said_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    monkeypatch.setattr(bench, "_available_nbytes", lambda: 10**10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    assert run(tmp_path, *arguments) == 1
    assert capsys.readouterr().err.replace(str(tmp_path), "FOLDER").endswith(f"{message}\n")


@pytest.mark.usefixtures("_nothing_is_measured")
def test_fields_that_the_device_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system, "device_problem", lambda: "")
    monkeypatch.setattr(bench, "probe", lambda: SimpleNamespace(gpus=(SimpleNamespace(memory_nbytes=10**7),)))
    assert run(tmp_path, "--device", "cuda") == 1
    assert "--fields 8 takes 33.2 MB of device memory, got 10 MB; give fewer\n" in capsys.readouterr().err


def test_available_memory_is_some_of_this_machine_s() -> None:
    assert 1 << 20 < bench._available_nbytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
