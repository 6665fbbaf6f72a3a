"""`xp`, the array namespace of a kernel test: cupy on a CUDA machine (``-m gpu``), else its stand-in on the host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.host_cuda import HostCuda
from xgpuzarr.kernels import compile as kernel_compiler
from xgpuzarr.kernels import launch_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def host_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCuda]:
    cuda = HostCuda(tmp_path_factory.mktemp("kernels"))
    yield cuda
    cuda.close()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "cuda":
        import cupy

        return cupy
    cuda = request.getfixturevalue("host_cuda")
    monkeypatch.setitem(sys.modules, "cupy", cuda)
    monkeypatch.setattr(kernel_compiler, "_modules", {})
    monkeypatch.setattr(launch_frames, "device_address", lambda array: np.uint64(array.ctypes.data))
    return cuda


@pytest.fixture
def to_numpy(xp: Any) -> Callable[[Any], np.ndarray[Any, Any]]:
    """A device array as a NumPy array."""
    return lambda array: array if isinstance(array, np.ndarray) else xp.asnumpy(array)
