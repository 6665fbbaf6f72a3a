"""How does a kernel's source become something that can be launched? Compiled at first use, once a device and process.

Constants that launches need are kept likewise.

CuPy compiles with NVRTC and keeps the result on disk, keyed by source, options and architecture. That key does not
cover included files, so the headers are pasted into the source first.
"""

from __future__ import annotations

import re
import threading
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import cupy
    from numpy.typing import NDArray

__all__ = ["COMPILE_OPTIONS", "device_constant", "kernel_function", "kernel_source"]

COMPILE_OPTIONS = ("-std=c++17",)
"""Options of the device compiler (NVRTC)."""

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_lock = threading.Lock()
_modules: dict[tuple[int, str], Any] = {}  # of each device, and constants among them, by name


@cache
def kernel_source(name: str) -> str:
    """Source text of `name` (such as ``"assemble.cu"``), every ``#include "..."`` replaced by the file it names.

    Headers have include guards, so one that is reached twice is harmless.
    """
    text = files("xgpuzarr.kernels").joinpath(name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: kernel_source(match[1]), text)


def kernel_function(source: str, name: str) -> cupy.RawKernel:
    """Kernel `name` of `source`, for the current device; compiled at the first call. Safe to call from many threads."""
    import cupy

    key = (cupy.cuda.Device().id, source)
    with _lock:
        if key not in _modules:
            _modules[key] = cupy.RawModule(code=kernel_source(source), options=COMPILE_OPTIONS, backend="nvrtc")
        return _modules[key].get_function(name)


def device_constant(name: str, make: Callable[[], NDArray[Any]]) -> cupy.ndarray:
    """What `make` returns, on the current device for every stream; made at the first call with `name`."""
    import cupy

    key = (cupy.cuda.Device().id, name)
    with _lock:
        if key not in _modules:
            _modules[key] = cupy.asarray(make())
            cupy.cuda.get_current_stream().synchronize()  # other streams do not wait for the copy
        return _modules[key]
