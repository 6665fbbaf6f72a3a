"""A stand-in for cupy whose kernels run on the host: the same launchers and the same sources, under the sanitizers.

`HostCuda` has the few names of cupy that the launchers use. Arrays are NumPy's; a kernel call goes over a pipe to a
program that g++ made of ``shim.h`` and the kernel's source. A sanitizer report ends that program, and its text becomes
the AssertionError.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import IO, Any

import numpy as np

import xgpuzarr.kernels
from xgpuzarr.kernels.compile import COMPILE_OPTIONS

KERNELS = Path(xgpuzarr.kernels.__file__).parent
SHIM = Path(__file__).parent / "shim.h"
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_DRIVER = """
#include "{shim}"
#include "{source}"
int main() {{
    while (shim::serve([](const std::string& name, const std::vector<shim::Argument>& args) {{
{cases}
        return false;
    }})) {{}}
}}
"""


def entry_points(source: str) -> list[str]:
    """Names of the kernels in a source text."""
    return re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*\)\s+)?(\w+)\(', source)


def build_driver(source: Path, folder: Path) -> Path:
    """Compile the kernels of `source` for the host, sanitizers on."""
    compiler = shutil.which("g++")
    assert compiler is not None, "the kernel tests need g++ with the address and undefined-behaviour sanitizers"
    names = entry_points(source.read_text())
    cases = "\n".join(f'        if (name == "{n}") return shim::call({n}, args), true;' for n in names)
    driver = folder / f"{source.stem}_driver.cpp"
    driver.write_text(_DRIVER.format(shim=SHIM, source=source, cases=cases))
    program = driver.with_suffix("")
    command = [compiler, *FLAGS, *SANITIZERS, str(driver), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


class HostKernels:
    """The kernels of one source, in a process of their own."""

    def __init__(self, program: Path, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)

    def call(self, name: str, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        """Run a kernel; arrays are changed in place, as on a device."""
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        assert all(array.flags.c_contiguous for array in arrays), "kernel arguments must be contiguous"
        message = [_numbers(len(name)), name.encode(), _numbers(grid[0], block[0], len(args))]
        for arg in args:
            if arg is None:
                message.append(_numbers(2, 0))
            elif isinstance(arg, np.ndarray):
                message += [_numbers(1, arg.nbytes), arg.tobytes()]
            else:
                assert isinstance(arg, np.generic), f"{name}: {arg!r} has no fixed width"
                message += [_numbers(0, arg.nbytes), arg.tobytes()]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(b"".join(message))
            self._process.stdin.flush()
            changed = [self._read(self._process.stdout, array.nbytes) for array in arrays]
        except BrokenPipeError:
            changed = [None]
        if any(data is None for data in changed):
            self._process.wait()
            raise AssertionError(f"kernel {name}: {self._errors.read_text()}")
        for array, data in zip(arrays, changed, strict=True):
            if array.flags.writeable and data is not None:
                array.reshape(-1).view(np.uint8)[...] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    @staticmethod
    def _read(stream: IO[bytes], nbytes: int) -> bytes | None:
        data = stream.read(nbytes)
        return data if len(data) == nbytes else None


def _numbers(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


class HostCuda:
    """The part of cupy that `xgpuzarr.kernels` uses, on NumPy arrays and host kernels."""

    ndarray = np.ndarray

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernels: dict[str, HostKernels] = {}
        self.cuda = _Cuda()
        self.launched: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def RawModule(self, *, code: str, options: tuple[str, ...], backend: str) -> _Module:  # noqa: N802
        assert (options, backend) == (COMPILE_OPTIONS, "nvrtc")
        if code not in self._kernels:
            source = self._folder / f"source_{len(self._kernels)}.cu"
            source.write_text(code)
            program = build_driver(source, self._folder)
            self._kernels[code] = HostKernels(program, program.with_suffix(".err"))
        return _Module(self, self._kernels[code])

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()


class _Module:
    def __init__(self, cuda: HostCuda, kernels: HostKernels) -> None:
        self._cuda = cuda
        self._kernels = kernels

    def get_function(self, name: str) -> Any:
        def function(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            self._cuda.launched.add(name)
            self._kernels.call(name, grid, block, args)

        return function


class _Device:
    id = 0


class _Stream:
    def synchronize(self) -> None:
        """All work has been done when a launch returns."""


class _Cuda:
    Device = _Device
    get_current_stream = _Stream
