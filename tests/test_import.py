"""Does the package work without CuPy, KvikIO and NVIDIA's packages, and leave them alone where they are installed?"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import zarr

if TYPE_CHECKING:
    from pathlib import Path

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cupy", "cupyx", "kvikio", "nvidia"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "store.zarr")
    root = zarr.create_group(path)
    root.create_array("v", shape=(6, 4), chunks=(2, 4), dtype="f4", dimension_names=("y", "x"))[:] = 3
    return path


def run(code: str, *argv: str) -> str:
    """Standard output of `code`, in an interpreter of its own in which a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", code, *argv]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_the_blocker_blocks() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(BLOCKED + "import cupy")
    assert "No module named 'cupy'" in failed.value.stderr


def test_plan_and_read(store: str) -> None:
    code = """
import xgpuzarr
array = xgpuzarr.open_array(sys.argv[1], path="v", device="cpu")
print(array.plan((slice(2), 0)).n_chunks, float(array[1, 2]))
"""
    assert run(BLOCKED + code, store) == "1 3.0"


def test_engine(store: str) -> None:
    code = """
import xarray as xr
opened = xr.open_dataset(sys.argv[1], engine="gpuzarr", device="cpu", chunks={}, consolidated=False)
print(float(opened["v"].sum()))
"""
    assert run(BLOCKED + code, store) == "72.0"


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_commands(command: str, store: str) -> None:
    code = "import xgpuzarr.cli; sys.exit(xgpuzarr.cli.main(sys.argv[1:]))"
    printed = run(BLOCKED + code, command, store)
    expected = {"inspect": "v  float32 (6, 4)", "doctor": "pip install 'xgpuzarr[cu13]'"}
    assert expected[command] in printed


def test_auto_device_says_once_why_it_reads_into_host_memory(store: str) -> None:
    code = """
import warnings
import xgpuzarr
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    arrays = [xgpuzarr.open_array(sys.argv[1], path="v") for _ in range(2)]
print(*(array.device for array in arrays), len(caught), caught[0].category.__name__)
"""
    assert run(BLOCKED + code, store) == "cpu cpu 1 UserWarning"


def test_cuda_without_its_packages_is_one_clear_error(store: str) -> None:
    code = """
import xgpuzarr
try:
    xgpuzarr.open_array(sys.argv[1], path="v", device="cuda")[...]
except xgpuzarr.MissingDependencyError as error:
    print(error)
"""
    assert "pip install 'xgpuzarr[cu13]'" in run(BLOCKED + code, store)


def test_importing_loads_no_optional_package() -> None:
    code = """
import sys
import xgpuzarr, xgpuzarr.array, xgpuzarr.xarray_backend, xgpuzarr.cli
print(sorted({"cupy", "kvikio", "nvidia"} & sys.modules.keys()))
"""
    assert run(code) == "[]"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, xgpuzarr; print(sorted({'numpy', 'zarr', 'xarray', 'dask'} & sys.modules.keys()))"
    assert run(code) == "[]"


def test_public_names_are_there() -> None:
    code = "import xgpuzarr; print(all(getattr(xgpuzarr, name) for name in xgpuzarr.__all__))"
    assert run(code) == "True"
