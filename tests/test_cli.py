"""Does the command line do what it says, and fail with one line and the right exit code?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import zarr

import xgpuzarr
from xgpuzarr import cli, system

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "store.zarr")
    zarr.create_group(path).create_array("g/v", shape=(4, 2), chunks=(2, 2), dtype="f4")[:] = 1
    return path


def test_inspect_writes_the_tree(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", store]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        store,
        "  g/",
        "    v  float32 (4, 2), chunks (2, 2), Zarr v3",
    ]


def test_inspect_writes_json(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--json", store]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["store"] == store
    (array,) = document["arrays"]
    assert array["path"] == "g/v"
    assert array["shape"] == [4, 2]
    assert array["decoded_nbytes"] == 32
    assert array["route"] == "device"
    assert array["reason"] == ""


def test_doctor_writes_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == system.format_report(system.probe()) + "\n"


def test_demo_passes_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("xgpuzarr.demo.run_demo", lambda output, *, device: calls.append((output, device)))
    assert cli.main(["demo", "--output", str(tmp_path), "--device", "cpu"]) == 0
    assert calls == [(tmp_path, "cpu")]


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("xgpuzarr: no Zarr store at ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["nothing"], ["inspect"], ["demo", "--device", "tpu"]])
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: xgpuzarr" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"xgpuzarr {xgpuzarr.__version__}\n"
