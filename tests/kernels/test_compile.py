"""Every kernel source compiles to PTX for every architecture we name, and the host shim sees what it should."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kernels.host_cuda import KERNELS, HostKernels, build_driver, entry_points
from xgpuzarr.kernels.compile import COMPILE_OPTIONS, kernel_source

if TYPE_CHECKING:
    from typing import Any

# The compiler of CUDA 12 knows every architecture here; that of CUDA 13 no longer knows sm_70.
ARCHITECTURES = [70, 80, 90, 100, 120]
SOURCES = sorted(path.name for path in KERNELS.glob("*.cu"))


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = find_spec("nvidia.cuda_nvrtc")
    assert spec is not None, "this test needs the wheel nvidia-cuda-nvrtc-cu12"
    folder = Path(next(iter(spec.submodule_search_locations or []))) / "lib"
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def compile_to_ptx(nvrtc: ctypes.CDLL, source: str, architecture: int, *more_options: str) -> tuple[str, str]:
    """PTX ("" if it does not compile) and the compiler's log."""
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    options = [f"--gpu-architecture=compute_{architecture}", *COMPILE_OPTIONS, *more_options]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)

    def text(kind: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer) == 0
        return buffer.value.decode()

    result = "" if failed else text("PTX"), text("ProgramLog")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_sources_compile_without_a_warning(nvrtc: ctypes.CDLL, source: str, architecture: int) -> None:
    text = kernel_source(source)
    ptx, log = compile_to_ptx(nvrtc, text, architecture)
    assert [line for line in log.splitlines() if line and "are deprecated" not in line] == []  # sm_70 is
    assert f".target sm_{architecture}" in ptx
    names = entry_points(text)
    assert names
    assert all(f".entry {name}(" in ptx for name in names)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_keeps_subnormal_numbers_though_cupy_flushes_them(nvrtc: ctypes.CDLL, architecture: int) -> None:
    plain = 'extern "C" __global__ void add(float* x) { x[0] += x[1]; }'
    assert "add.ftz.f32" in compile_to_ptx(nvrtc, plain, architecture, "-ftz=true")[0]
    ptx, _ = compile_to_ptx(nvrtc, kernel_source("float32.cu"), architecture, "-ftz=true")
    assert ".ftz" not in ptx
    for instruction in ("add.rn.f32", "mul.rn.f32", "div.rn.f32", "cvt.f64.f32", "cvt.rn.f32.f64"):
        assert f"{instruction} " in ptx


@pytest.fixture
def faulty(tmp_path: Path) -> Any:
    source = tmp_path / "faulty.cu"
    source.write_text(
        'extern "C" __global__ void write_at(unsigned char* data, long long at) { data[at] = 1; }\n'
        'extern "C" __global__ void shift_by(int* data, int bits) { data[0] = 1 << bits; }\n'
    )
    kernels = HostKernels(build_driver(source, tmp_path), tmp_path / "errors.txt")
    yield kernels
    kernels.close()


def test_the_host_shim_changes_arrays_in_place(faulty: HostKernels) -> None:
    data = np.zeros(5, dtype=np.uint8)
    faulty.call("write_at", (1,), (1,), (data, np.int64(4)))
    assert data.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "args", "report"),
    [
        ("write_at", (np.zeros(5, dtype=np.uint8), np.int64(5)), "AddressSanitizer: heap-buffer-overflow"),
        ("write_at", (np.zeros(5, dtype=np.uint8), np.int64(-1)), "AddressSanitizer: heap-buffer-overflow"),
        ("shift_by", (np.zeros(1, dtype=np.int32), np.int32(40)), "runtime error: shift exponent 40"),
        ("write_at", (np.zeros(5, dtype=np.uint8), np.int32(0)), "does not fit the kernel's parameter"),
    ],
)
def test_the_host_shim_reports_what_the_sanitizers_find(
    faulty: HostKernels, name: str, args: tuple[Any, ...], report: str
) -> None:
    with pytest.raises(AssertionError, match=report):
        faulty.call(name, (1,), (1,), args)
