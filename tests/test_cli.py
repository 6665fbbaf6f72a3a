"""Does the command line do what it says, and fail with one line and the right exit code?"""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_an_error_about_a_store_holds_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "no\x1b[31m")]) == 1
    error = capsys.readouterr().err
    assert r"no\x1b[31m" in error
    assert "\x1b" not in error


def test_doctor_needs_a_path_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path / "nope")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"xgpuzarr: nothing is at {tmp_path / 'nope'}; give the path of a local store, or none\n"


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_device_that_cannot_be_used_is_one_clear_error(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system, "device_problem", lambda: "no NVIDIA driver is installed")
    assert cli.main([command, "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "xgpuzarr: no device can be used: no NVIDIA driver is installed; leave out --device, or give --device cpu\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["nothing"], ["inspect"], ["demo", "--device", "tpu"]),
        *(["bench", "--fields", "-1"], ["bench", "--repeats", "0"], ["bench", "--threads", "0"]),
        *(["bench", "--fields", "many"], ["bench", "--encodings"], ["bench", "--route", "gpu"]),
    ],
)
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: xgpuzarr" in capsys.readouterr().err


def test_a_number_that_is_none_is_said_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--fields", "many"])
    assert "argument --fields: must be a whole number, got 'many'\n" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"xgpuzarr {xgpuzarr.__version__}\n"


def test_python_runs_the_package_as_the_command(store: str) -> None:
    command = [sys.executable, "-m", "xgpuzarr"]
    done = subprocess.run([*command, "inspect", store], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[0] == store
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: xgpuzarr ")
