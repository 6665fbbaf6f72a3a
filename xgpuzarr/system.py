"""What can this machine do? GPUs, driver, cuFile mode, nvCOMP, package versions, and what is missing.

Everything here is found out without creating a CUDA context: GPUs by the driver's own interface, the rest by importing
packages and looking at the system. Any of it may be absent; then the report says so, with the line that installs it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xgpuzarr.decoders import nvcomp
from xgpuzarr.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xgpuzarr.options import ReadOptions

__all__ = ["CuFileMode", "Gpu", "SystemReport", "block_bytes", "device_problem", "format_report", "probe"]

# Label: the names of the distributions that may provide it.
_PACKAGES = {
    "xgpuzarr": ("xgpuzarr",),
    "zarr": ("zarr",),
    "numcodecs": ("numcodecs",),
    "numpy": ("numpy",),
    "xarray": ("xarray",),
    "dask": ("dask",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "nvidia-libnvcomp": ("nvidia-libnvcomp-cu13", "nvidia-libnvcomp-cu12"),
    "dask-cuda": ("dask-cuda",),
}

# Where no file lies on a block device that cuFile could read from directly.
_HOST_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "overlay", "fuse", "9p", "virtiofs"})

_CU_COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
_CU_COMPUTE_CAPABILITY_MINOR = 76


HOST_BLOCK_BYTES = 128 << 20

GPU_BLOCK_BYTES = (256 << 20, 8 << 30)
"""Least and most of a dask block on a GPU: a read takes some 15 ms beside what its bytes take, and a task some more."""

GPU_MEMORY_BLOCKS = 16
"""Blocks that the memory of a GPU would hold: some for each thread of a worker, their scratch, and what is computed."""

UNKNOWN_GPU_NBYTES = 64 << 30
"""Memory of the workers' GPUs where the client has none."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, as this process sees it.

    Attributes
    ----------
    name
        Product name.
    memory_nbytes
        Device memory, in bytes.
    compute_capability
        Major and minor number.
    """

    name: str
    memory_nbytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CuFileMode:
    """Whether cuFile reads straight into device memory (direct) or through host memory (compat).

    Attributes
    ----------
    mode
        "" if KvikIO is not usable at all.
    reasons
        Why it is not direct; empty when it is.
    n_threads
        Threads of KvikIO's pool so far; the first reader sets them. None if KvikIO is not usable.
    """

    mode: Literal["direct", "compat", ""]
    reasons: tuple[str, ...]
    n_threads: int | None


@dataclass(frozen=True, slots=True)
class SystemReport:
    """What `probe` found.

    Attributes
    ----------
    gpus
        CUDA devices, in the order of their ordinals.
    driver_version
        Version of the NVIDIA kernel driver; "" if there is none.
    driver_cuda
        Newest CUDA version the driver supports; None if there is none.
    runtime_cuda
        Version of the CUDA runtime that CuPy uses; None without CuPy.
    nvcomp_version
        Version of the nvCOMP library; "" if it is not usable.
    cufile
        How KvikIO reads.
    versions
        Version of each package, "" for those not installed.
    problems
        What keeps arrays from being read on the device, each with the way out. Empty when nothing does.
    """

    gpus: tuple[Gpu, ...]
    driver_version: str
    driver_cuda: tuple[int, int] | None
    runtime_cuda: tuple[int, int] | None
    nvcomp_version: str
    cufile: CuFileMode
    versions: Mapping[str, str]
    problems: tuple[str, ...]


def probe(path: str | os.PathLike[str] | None = None) -> SystemReport:
    """Find out what this machine can do. Creates no CUDA context.

    Parameters
    ----------
    path
        A local store or folder; then the cuFile mode takes its file system into account.
    """
    driver = _driver()
    problems = _problems(driver)
    try:
        nvcomp_version = ".".join(str(part) for part in nvcomp.library_version())
    except MissingDependencyError:
        nvcomp_version = ""
    return SystemReport(
        gpus=driver.gpus,
        driver_version=_driver_version(Path("/")),
        driver_cuda=driver.cuda,
        runtime_cuda=_runtime_cuda(),
        nvcomp_version=nvcomp_version,
        cufile=_cufile_mode(path),
        versions={label: _version(names) for label, names in _PACKAGES.items()},
        problems=problems,
    )


@functools.cache
def device_problem() -> str:
    """Say in one line why arrays cannot be read on the device; "" if they can. Creates no CUDA context."""
    problems = _problems(_driver())
    return problems[0] if problems else ""


def block_bytes(options: ReadOptions, device: str) -> int:
    """Decoded bytes that one dask block on "cuda" or "cpu" aims at: see `ReadOptions.target_block_bytes`."""
    if options.target_block_bytes is not None:
        return options.target_block_bytes
    if device == "cpu":
        return HOST_BLOCK_BYTES
    least, most = GPU_BLOCK_BYTES
    return min(max(_gpu_nbytes() // GPU_MEMORY_BLOCKS, least), most)


@functools.cache
def _gpu_nbytes() -> int:
    return min((gpu.memory_nbytes for gpu in _driver().gpus), default=UNKNOWN_GPU_NBYTES)


def format_report(report: SystemReport) -> str:
    """Write a report as text for a terminal, one fact a line."""
    rows = [
        (f"GPU {ordinal}", f"{gpu.name}, {gpu.memory_nbytes / 2**30:.1f} GiB, compute capability {_dotted(gpu)}")
        for ordinal, gpu in enumerate(report.gpus)
    ] or [("GPU", "none")]
    supports = f"supports CUDA {_dotted(report.driver_cuda)}" if report.driver_cuda else ""
    rows += [
        ("driver", " ".join(part for part in (report.driver_version, supports) if part) or "none"),
        ("CUDA runtime", _dotted(report.runtime_cuda) if report.runtime_cuda else "none"),
        ("nvCOMP", report.nvcomp_version or "none"),
        ("cuFile", report.cufile.mode or "none"),
        *(("", reason) for reason in report.cufile.reasons),
        ("KvikIO threads", "none" if report.cufile.n_threads is None else str(report.cufile.n_threads)),
        ("", ""),
        *((label, version or "not installed") for label, version in report.versions.items()),
    ]
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{label:{width}}{text}".rstrip() for label, text in rows]
    if report.problems:
        lines += ["", "Arrays are read on the host, because:", *(f"- {problem}" for problem in report.problems)]
    else:
        lines += ["", "Arrays can be read on the device."]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Driver:
    """What the CUDA driver says: its devices, the CUDA version it supports, and why it is of no use ("" if it is)."""

    gpus: tuple[Gpu, ...]
    cuda: tuple[int, int] | None
    problem: str


def _driver() -> _Driver:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _Driver((), None, "no NVIDIA driver is installed (libcuda.so.1 is missing)")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    if status := cuda.cuInit(0):
        return _Driver((), version, f"the CUDA driver does not start: {_error_text(cuda, status)}")
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_gpu(cuda, ordinal) for ordinal in range(number.value))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return _Driver(gpus, version, "" if gpus else f"no CUDA device is visible{hint}")


def _driver_version(root: Path) -> str:
    """Version of the NVIDIA kernel driver, from one of the two places where it tells; "" if it does not."""
    if version := _read_text(root / "sys/module/nvidia/version"):
        return version
    found = re.search(r"Module.*?\s(\d+\.\d+(\.\d+)?)\s", _read_text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _gpu(cuda: ctypes.CDLL, ordinal: int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    major, minor, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CU_COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CU_COMPUTE_CAPABILITY_MINOR, device)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {status})"


def _problems(driver: _Driver) -> tuple[str, ...]:
    extra = "cu12" if driver.cuda is not None and driver.cuda < (13, 0) else "cu13"
    install = f"pip install 'xgpuzarr[{extra}]'"
    problems = [driver.problem, *(_import_problem(name, install) for name in ("cupy", "kvikio"))]
    runtime = _runtime_cuda()
    if driver.cuda and runtime and runtime[0] > driver.cuda[0]:
        problems.append(
            f"cupy needs a driver for CUDA {runtime[0]}, this one supports {_dotted(driver.cuda)}; "
            f"update the driver, or uninstall cupy, kvikio and nvCOMP for CUDA {runtime[0]} and {install}"
        )
    try:
        nvcomp.library_version()
    except MissingDependencyError as error:
        problems.append(str(error))
    return tuple(problem for problem in problems if problem)


def _import_problem(name: str, install: str) -> str:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: {install}"
    except (ImportError, OSError, RuntimeError) as error:  # a library it loads is missing or does not fit
        return f"{name} does not load ({str(error).strip().splitlines()[0]}): {install}"
    return ""


def _runtime_cuda() -> tuple[int, int] | None:
    if _import_problem("cupy", ""):
        return None
    import cupy

    try:
        number = cupy.cuda.runtime.runtimeGetVersion()
    except (OSError, RuntimeError):  # its CUDA runtime library is missing
        return None
    return number // 1000, number % 1000 // 10


def _cufile_mode(path: str | os.PathLike[str] | None) -> CuFileMode:
    if _import_problem("kvikio", ""):
        return CuFileMode("", (), None)
    import kvikio.defaults

    reasons = _compat_reasons(Path("/"), os.environ, path)
    if kvikio.defaults.is_compat_mode_preferred() and not reasons:
        reasons = ("KvikIO chose it: libcufile.so.0 does not load",)
    return CuFileMode("compat" if reasons else "direct", reasons, int(kvikio.defaults.get("num_threads")))


def _compat_reasons(root: Path, environ: Mapping[str, str], path: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Why cuFile cannot read directly, as far as the system under `root` shows.

    The conditions are KvikIO's (``shim/cufile.cpp``) and cuFile's: its kernel module nvidia-fs, or PCI peer-to-peer
    transfers where its configuration turns them on.
    """
    reasons = []
    asked = environ.get("KVIKIO_COMPAT_MODE", "").upper()
    if asked in {"ON", "TRUE", "YES", "1"}:
        reasons.append(f"KVIKIO_COMPAT_MODE={asked} asks for it")
    if not (root / "run/udev").is_dir():
        reasons.append("/run/udev is missing, as in most containers: mount it")
    if "microsoft" in _read_text(root / "proc/version").lower():
        reasons.append("Windows Subsystem for Linux has no GPUDirect Storage")
    config = _read_text(Path(environ.get("CUFILE_ENV_PATH_JSON") or root / "etc/cufile.json"))
    peer_to_peer = re.search(r'"use_pci_p2pdma"\s*:\s*true', config) is not None
    if not peer_to_peer and not (root / "proc/driver/nvidia-fs").is_dir():
        where = "/etc/cufile.json" if config else "/etc/cufile.json, which is missing,"
        reasons.append(f"the kernel module nvidia-fs is not loaded, and {where} does not set use_pci_p2pdma")
    if path is not None:
        kind = _file_system(_read_text(root / "proc/mounts"), Path(path).resolve())
        if kind.split(".")[0] in _HOST_FILE_SYSTEMS:
            reasons.append(f"{os.fspath(path)!r} lies on a file system of type {kind}")
    return tuple(reasons)


def _file_system(mounts: str, path: Path) -> str:
    """Type of the file system that holds `path`, by the lines of /proc/mounts; "" if none does."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, where, mount_kind, *_ = line.split()
        # later mounts hide earlier ones at the same place
        if path.is_relative_to(where.replace(r"\040", " ")) and len(where) >= best:
            best, kind = len(where), mount_kind
    return kind


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _dotted(version: tuple[int, int] | Gpu) -> str:
    numbers = version.compute_capability if isinstance(version, Gpu) else version
    return ".".join(str(number) for number in numbers)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
