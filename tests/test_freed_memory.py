"""Does a worker keep the memory of freed arrays, and does everybody else keep what they have set?"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from xgpuzarr import freed_memory

COUNT_FAULTS = """
import json, resource, threading
import numpy as np
from xgpuzarr.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.ones(1 << 17)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

counts = [faults(), keep_freed_memory(), faults(), faults()]
thread = threading.Thread(target=lambda: counts.append((faults(), faults())[1]))
thread.start()
thread.join()
print(json.dumps(counts))
"""
N_PAGES = 100 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")


def counts(value: str | None) -> list[int]:
    """Page faults of 100 arrays of 1 MiB: before, after a first round in this thread, and in another thread."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    if value is not None:
        environ["MALLOC_TRIM_THRESHOLD_"] = value
    run = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(run.stdout)


def test_a_worker_of_dask_reuses_the_memory_of_freed_arrays() -> None:
    before, is_set, _, after, in_thread = counts(freed_memory.SET_BY_DASK)
    assert before > N_PAGES * 0.9
    assert is_set
    assert after < N_PAGES * 0.1
    assert in_thread < N_PAGES * 0.1


@pytest.mark.parametrize("value", [None, "131072"])
def test_what_the_user_has_set_stays(value: str | None) -> None:
    _, is_set, *_, after, _ = counts(value)
    assert not is_set
    if value is not None:
        assert after > N_PAGES * 0.9


def test_the_value_is_the_one_that_distributed_sets() -> None:
    import dask.config
    import distributed  # noqa: F401  # brings its configuration

    environ = dask.config.get("distributed.nanny.pre-spawn-environ")
    assert str(environ[freed_memory.VARIABLE]) == freed_memory.SET_BY_DASK


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(freed_memory.VARIABLE, freed_memory.SET_BY_DASK)
    monkeypatch.delattr(os, "confstr")
    assert not freed_memory.keep_freed_memory.__wrapped__()
