"""What `doctor` reports, with drivers, packages and file systems of every kind put in place of this machine's."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from xgpuzarr import system
from xgpuzarr.decoders import nvcomp
from xgpuzarr.errors import MissingDependencyError
from xgpuzarr.options import ReadOptions
from xgpuzarr.system import CuFileMode, Gpu, SystemReport, device_problem, format_report, probe

NO_DRIVER = "no NVIDIA driver is installed (libcuda.so.1 is missing)"


class FakeDriver:
    """A CUDA driver with the devices it is given."""

    def __init__(self, gpus=(), cuda=13000, init_status=0):
        self.gpus, self.cuda, self.init_status = gpus, cuda, init_status

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.cuda
        return 0

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self.init_status

    def cuGetErrorString(self, status, text):  # noqa: N802
        text._obj.value = {100: b"no CUDA-capable device is detected"}.get(status)
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal + 40  # a handle, not the ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        assert size == len(name)
        name.value = self.gpus[device.value - 40].name.encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        memory._obj.value = self.gpus[device.value - 40].memory_nbytes
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = self.gpus[device.value - 40].compute_capability[attribute - 75]
        return 0


GPUS = (Gpu("NVIDIA H200", 150_000_000_000, (9, 0)), Gpu("NVIDIA T4", 16_000_000_000, (7, 5)))


@pytest.fixture(autouse=True)
def _fresh_answer():
    device_problem.cache_clear()
    yield
    device_problem.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Put a driver (None: none), a CuPy for some CUDA version and a KvikIO in place; None takes a package away."""

    def set_up(driver=None, runtime=13020, kvikio=True, nvcomp_version=(6, 0, 0)):
        def load(name):
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(runtimeGetVersion=lambda: runtime))
        package = types.ModuleType("kvikio")
        package.defaults = types.ModuleType("kvikio.defaults")
        package.defaults.is_compat_mode_preferred = lambda: True
        package.defaults.get = {"num_threads": 5}.__getitem__
        monkeypatch.setitem(sys.modules, "cupy", cupy if runtime else None)
        monkeypatch.setitem(sys.modules, "kvikio", package if kvikio else None)
        monkeypatch.setitem(sys.modules, "kvikio.defaults", package.defaults if kvikio else None)

        def version():
            if nvcomp_version is None:
                raise MissingDependencyError("nvCOMP 6 is needed")
            return nvcomp_version

        monkeypatch.setattr(nvcomp, "library_version", version)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return set_up


def test_machine_with_everything_has_no_problem(machine):
    machine(FakeDriver(GPUS))
    report = probe()
    assert report.gpus == GPUS
    assert (report.driver_cuda, report.runtime_cuda, report.nvcomp_version) == ((13, 0), (13, 2), "6.0.0")
    assert report.cufile.mode == "compat"
    assert report.cufile.n_threads == 5
    assert report.problems == ()
    assert device_problem() == ""


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"driver": None}, NO_DRIVER),
        (
            {"driver": FakeDriver(init_status=100)},
            "the CUDA driver does not start: no CUDA-capable device is detected (CUDA error 100)",
        ),
        ({"driver": FakeDriver(init_status=999)}, "the CUDA driver does not start: unknown error (CUDA error 999)"),
        ({"driver": FakeDriver()}, "no CUDA device is visible"),
        ({"driver": FakeDriver(GPUS), "kvikio": False}, "kvikio is not installed: pip install 'xgpuzarr[cu13]'"),
        ({"driver": FakeDriver(GPUS), "runtime": None}, "cupy is not installed: pip install 'xgpuzarr[cu13]'"),
        (
            {"driver": FakeDriver(GPUS, cuda=12080), "runtime": None},
            "cupy is not installed: pip install 'xgpuzarr[cu12]'",
        ),
        ({"driver": FakeDriver(GPUS), "nvcomp_version": None}, "nvCOMP 6 is needed"),
        (
            {"driver": FakeDriver(GPUS, cuda=12080)},
            (
                "cupy needs a driver for CUDA 13, this one supports 12.8; update the driver, or uninstall cupy, kvikio "
                "and nvCOMP for CUDA 13 and pip install 'xgpuzarr[cu12]'"
            ),
        ),
    ],
)
def test_what_is_missing_is_the_problem(machine, setting, problem):
    machine(**setting)
    assert device_problem() == problem
    assert probe().problems == (problem,)


def test_hidden_devices_are_explained(machine, monkeypatch):
    machine(FakeDriver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_problem() == "no CUDA device is visible (CUDA_VISIBLE_DEVICES='')"


def test_package_that_does_not_load_is_told_from_one_that_is_absent(machine, monkeypatch):
    machine(FakeDriver(GPUS))

    def fail(name):
        if name == "kvikio":
            raise RuntimeError("libcufile.so.0 not found\nsearched everywhere")
        return sys.modules[name]

    monkeypatch.setattr(system.importlib, "import_module", fail)
    assert device_problem() == "kvikio does not load (libcufile.so.0 not found): pip install 'xgpuzarr[cu13]'"
    assert probe().cufile == CuFileMode("", (), None)


def test_problem_is_found_once(machine):
    machine(FakeDriver(GPUS))
    assert device_problem() == ""
    machine(None)
    assert device_problem() == ""


def make_system(root, *, udev=True, nvidia_fs=True, config="{}", version="Linux version 6.8", mounts=""):
    for folder in ["proc", "etc", *["run/udev"] * udev, *["proc/driver/nvidia-fs"] * nvidia_fs]:
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/version").write_text(version)
    (root / "proc/mounts").write_text(mounts)
    if config is not None:
        (root / "etc/cufile.json").write_text(config)


@pytest.mark.parametrize(
    ("setting", "environ", "reasons"),
    [
        ({}, {}, []),
        ({}, {"KVIKIO_COMPAT_MODE": "off"}, []),
        ({}, {"KVIKIO_COMPAT_MODE": "on"}, ["KVIKIO_COMPAT_MODE=ON asks for it"]),
        ({"udev": False}, {}, ["/run/udev is missing, as in most containers: mount it"]),
        (
            {"version": "Linux version 5.15-microsoft-WSL2"},
            {},
            ["Windows Subsystem for Linux has no GPUDirect Storage"],
        ),
        (
            {"nvidia_fs": False},
            {},
            ["the kernel module nvidia-fs is not loaded, and /etc/cufile.json does not set use_pci_p2pdma"],
        ),
        (
            {"nvidia_fs": False, "config": None},
            {},
            [
                (
                    "the kernel module nvidia-fs is not loaded, and /etc/cufile.json, which is missing, does not set "
                    "use_pci_p2pdma"
                )
            ],
        ),
        ({"nvidia_fs": False, "config": '{ // comment\n "use_pci_p2pdma" : true }'}, {}, []),
    ],
)
def test_why_cufile_is_not_direct(tmp_path, setting, environ, reasons):
    make_system(tmp_path, **setting)
    assert list(system._compat_reasons(tmp_path, environ, None)) == reasons


def test_configuration_of_cufile_may_lie_elsewhere(tmp_path):
    make_system(tmp_path, nvidia_fs=False)
    elsewhere = tmp_path / "my.json"
    elsewhere.write_text('{"use_pci_p2pdma": true}')
    assert system._compat_reasons(tmp_path, {"CUFILE_ENV_PATH_JSON": str(elsewhere)}, None) == ()


MOUNTS = """\
overlay / overlay rw 0 0
/dev/nvme0n1 /data ext4 rw 0 0
tmpfs /data/fast tmpfs rw 0 0
//server/share /data/with\\040blank cifs rw 0 0
sshfs /far fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "overlay"),
        ("/data", "ext4"),
        ("/data/fast/store.zarr", "tmpfs"),
        ("/data/faster", "ext4"),
        ("/data/with blank/a", "cifs"),
        ("/far/a", "fuse.sshfs"),
    ],
)
def test_file_system_of_a_path(path, kind):
    assert system._file_system(MOUNTS, Path(path)) == kind


def test_later_mount_hides_an_earlier_one():
    assert system._file_system("a / ext4 rw 0 0\nb / xfs rw 0 0\n", Path("/x")) == "xfs"


@pytest.mark.parametrize(
    ("path", "reasons"),
    [
        ("/data/a.zarr", []),
        ("/data/fast/a.zarr", ["'/data/fast/a.zarr' lies on a file system of type tmpfs"]),
        ("/far/a.zarr", ["'/far/a.zarr' lies on a file system of type fuse.sshfs"]),
    ],
)
def test_file_system_counts_where_a_path_is_given(tmp_path, path, reasons):
    make_system(tmp_path, mounts=MOUNTS)
    assert list(system._compat_reasons(tmp_path, {}, path)) == reasons


def test_kvikio_s_own_choice_counts(machine, monkeypatch):
    machine(FakeDriver(GPUS))
    monkeypatch.setattr(system, "_compat_reasons", lambda *_: ())
    assert probe().cufile == CuFileMode("compat", ("KvikIO chose it: libcufile.so.0 does not load",), 5)
    sys.modules["kvikio.defaults"].is_compat_mode_preferred = lambda: False
    assert probe().cufile == CuFileMode("direct", (), 5)


def test_version_of_the_driver(tmp_path):
    assert system._driver_version(tmp_path) == ""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.2.0"
    )
    assert system._driver_version(tmp_path) == "580.65.06"
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.65.07\n")
    assert system._driver_version(tmp_path) == "580.65.07"


def test_versions_are_those_of_the_installed_packages(machine):
    machine(None, runtime=None, kvikio=False)
    versions = probe().versions
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert versions["zarr"] == importlib.metadata.version("zarr")
    assert set(versions) >= {"xgpuzarr", "xarray", "dask", "numcodecs", "cupy", "kvikio", "nvidia-libnvcomp"}


def test_text_of_a_report():
    report = SystemReport(
        gpus=GPUS,
        driver_version="580.65.06",
        driver_cuda=(13, 0),
        runtime_cuda=(13, 2),
        nvcomp_version="6.0.0",
        cufile=CuFileMode("compat", ("no module", "no mount"), 16),
        versions={"zarr": "3.4.2", "dask": ""},
        problems=(),
    )
    assert format_report(report) == textwrap.dedent("""\
        GPU 0           NVIDIA H200, 139.7 GiB, compute capability 9.0
        GPU 1           NVIDIA T4, 14.9 GiB, compute capability 7.5
        driver          580.65.06 supports CUDA 13.0
        CUDA runtime    13.2
        nvCOMP          6.0.0
        cuFile          compat
                        no module
                        no mount
        KvikIO threads  16

        zarr            3.4.2
        dask            not installed

        Arrays can be read on the device.""")


def test_text_of_a_report_from_a_machine_with_nothing():
    report = SystemReport(
        (), "", None, None, "", CuFileMode("", (), None), {"zarr": "3.4.2"}, (NO_DRIVER, "b is missing")
    )
    assert format_report(report) == textwrap.dedent(f"""\
        GPU             none
        driver          none
        CUDA runtime    none
        nvCOMP          none
        cuFile          none
        KvikIO threads  none

        zarr            3.4.2

        Arrays are read on the host, because:
        - {NO_DRIVER}
        - b is missing""")


def test_report_needs_no_cuda_package():
    code = """
        import sys
        for name in ("cupy", "kvikio", "nvidia"):
            sys.modules[name] = None
        from xgpuzarr.system import device_problem, format_report, probe
        assert device_problem()
        assert "cupy is not installed: pip install 'xgpuzarr[cu1" in format_report(probe())
        """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)


@pytest.mark.gpu
def test_real_device_is_reported_without_a_context():
    code = """
        import ctypes
        from xgpuzarr.system import device_problem, probe
        assert device_problem() == "", device_problem()
        report = probe(".")
        assert report.gpus and report.gpus[0].memory_nbytes > 1 << 30 and report.gpus[0].compute_capability >= (7, 0)
        assert report.driver_cuda >= report.runtime_cuda[:1] and report.nvcomp_version.startswith("6.")
        assert report.cufile.mode in ("direct", "compat")
        cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(-1)
        cuda.cuDeviceGet(ctypes.byref(device), 0)
        cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        assert active.value == 0
        import cupy
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        assert report.gpus[0].name == name
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize(
    ("memory_nbytes", "expected"),
    [((4 << 30,), 256 << 20), ((40 << 30, 80 << 30), 2560 << 20), ((141 << 30,), 8 << 30)],
)
def test_blocks_follow_the_least_memory_of_the_gpus(monkeypatch, memory_nbytes, expected):
    gpus = tuple(Gpu("a", nbytes, (9, 0)) for nbytes in memory_nbytes)
    monkeypatch.setattr(system, "_driver", lambda: system._Driver(gpus, (13, 0), ""))
    system._gpu_nbytes.cache_clear()
    assert system.block_bytes(ReadOptions(), "cuda") == expected
    system._gpu_nbytes.cache_clear()


def test_blocks_on_the_host_and_blocks_that_were_asked_for():
    assert system.block_bytes(ReadOptions(), "cpu") == 128 << 20
    assert system.block_bytes(ReadOptions(target_block_bytes=7), "cuda") == 7
