"""Does a worker keep the memory of freed arrays, and does everybody else keep what they have set?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

import xgpuzarr
from tests.fake_device import fake_device  # noqa: F401  # a fixture
from xgpuzarr import freed_memory

if TYPE_CHECKING:
    from pathlib import Path

IN_A_PROCESS = """
import json, os, resource, threading
import numpy as np
from xgpuzarr.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.ones(1 << 17)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def kept(n_arrays, nbytes):
    before = resident()
    arrays = [np.ones(nbytes, np.uint8) for _ in range(n_arrays)]
    arrays.clear()
    return resident() - before

def in_thread():
    faults()
    found["faults in a thread"] = faults()

found = {"faults before": faults(), "is set": keep_freed_memory()}
faults()
found["faults"] = faults()
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
found["kept of columns"] = kept(200, 1 << 20)
found["kept of chunks"] = kept(10, 16 << 20)
print(json.dumps(found))
"""
N_PAGES = 100 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")
"""Pages of the arrays that `faults` makes."""


def in_a_process(**environ: str) -> dict[str, int]:
    """What a process with these settings finds: page faults of 100 arrays, and bytes that it keeps of freed ones."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        env=inherited | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, int] = json.loads(run.stdout)
    return found


def test_a_worker_of_dask_reuses_the_memory_of_columns_and_gives_back_the_rest() -> None:
    found = in_a_process(MALLOC_TRIM_THRESHOLD_=freed_memory.SET_BY_DASK)
    assert found["faults before"] > N_PAGES * 0.9
    assert found["is set"]
    assert found["faults"] < N_PAGES * 0.1
    assert found["faults in a thread"] < N_PAGES * 0.1
    assert found["kept of columns"] < freed_memory.KEPT_NBYTES + (1 << 20)
    assert found["kept of chunks"] < 1 << 20


@pytest.mark.parametrize(
    "settings",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": freed_memory.SET_BY_DASK, "MALLOC_MMAP_THRESHOLD_": "131072"},
        {
            "MALLOC_TRIM_THRESHOLD_": freed_memory.SET_BY_DASK,
            "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=65536",
        },
    ],
    ids=str,
)
def test_what_the_user_has_set_stays(settings: dict[str, str]) -> None:
    found = in_a_process(**settings)
    assert not found["is set"]
    assert found["faults"] > N_PAGES * 0.9


def test_a_process_without_the_setting_is_left_alone() -> None:
    assert not in_a_process()["is set"]


def test_the_value_is_the_one_that_distributed_sets() -> None:
    import dask.config
    import distributed  # noqa: F401  # brings its configuration

    environ = dask.config.get("distributed.nanny.pre-spawn-environ")
    assert str(environ[freed_memory.VARIABLE]) == freed_memory.SET_BY_DASK


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(freed_memory.VARIABLE, freed_memory.SET_BY_DASK)
    monkeypatch.delattr(os, "confstr")
    assert not freed_memory.keep_freed_memory.__wrapped__()


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("device", "n_asked"), [("cpu", 0), ("cuda", 2)])
def test_blocks_of_the_host_ask_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any, n_asked: int
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("xgpuzarr.dask_arrays.keep_freed_memory", lambda: asked.append(True))
    zarr.create_array(tmp_path / "a", data=np.arange(8), chunks=(4,))
    blocks = xgpuzarr.from_zarr(tmp_path / "a", chunks=4, device=device)
    assert blocks.sum().compute(scheduler="sync").item() == 28
    assert len(asked) == n_asked
