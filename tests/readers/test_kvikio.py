"""Reading into device memory: order, errors and clean-up against a fake KvikIO; with -m gpu, the bytes themselves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from xgpuzarr.errors import ChunkReadError, MissingDependencyError
from xgpuzarr.readers import kvikio as module
from xgpuzarr.readers.kvikio import KvikioReader


class FakeSlab:
    """A slab in host memory."""

    def __init__(self, nbytes):
        self.array = np.zeros(nbytes, np.uint8)
        self.data = types.SimpleNamespace(ptr=self.array.ctypes.data)
        self.nbytes = nbytes
        self.device = contextlib.nullcontext()


@dataclass
class FakeKvikio:
    """KvikIO whose reads happen when they are waited for, and which keeps count of its handles."""

    n_threads: int = 1
    log: list = field(default_factory=list)
    n_open: int = 0
    most_open: int = 0
    n_waited: int = 0
    refused: frozenset = frozenset()  # names of files that do not open
    failing: frozenset = frozenset()  # offsets of reads that fail
    short: frozenset = frozenset()  # offsets of reads that come back short

    def install(self, monkeypatch):
        package = types.ModuleType("kvikio")
        package.CuFile = lambda path: FakeCuFile(self, path)
        package.defaults = types.ModuleType("kvikio.defaults")
        package.defaults.get = self._get
        package.defaults.set = self._set
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(free=lambda _: None))
        for name, fake in {"kvikio": package, "kvikio.defaults": package.defaults, "cupy": cupy}.items():
            monkeypatch.setitem(sys.modules, name, fake)
        for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)

    def _get(self, name):
        assert name == "num_threads"
        return self.n_threads

    def _set(self, settings):
        self.n_threads = settings["num_threads"]


class FakeCuFile:
    def __init__(self, kvikio, path):
        if Path(path).name in kvikio.refused:
            raise RuntimeError("Unable to open file. Permission denied")
        self.kvikio, self.fd = kvikio, os.open(path, os.O_RDONLY)
        kvikio.n_open += 1
        kvikio.most_open = max(kvikio.most_open, kvikio.n_open)

    def pread(self, out, nbytes, offset, task_nbytes):
        room = out.__cuda_array_interface__
        assert room["shape"] == (nbytes,)
        assert nbytes > 0
        self.kvikio.log.append(("pread", nbytes, task_nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(room["data"][0])
        return FakeFuture(self, np.frombuffer(memory, np.uint8), offset)

    def close(self):
        os.close(self.fd)
        self.kvikio.n_open -= 1


@dataclass
class FakeFuture:
    file: FakeCuFile
    out: np.ndarray
    offset: int

    def get(self):
        kvikio = self.file.kvikio
        kvikio.n_waited += 1
        if self.offset in kvikio.failing:
            raise RuntimeError("POSIX error on pread: Input/output error")
        try:
            return os.preadv(self.file.fd, [self.out], self.offset) - (self.offset in kvikio.short)
        except OSError as error:  # of any kind, KvikIO's is a RuntimeError
            raise RuntimeError(f"POSIX error on pread: {error.strerror}") from error


@dataclass
class FakeEvent:
    kvikio: FakeKvikio

    def synchronize(self):
        self.kvikio.log.append(("event",))


@pytest.fixture
def kvikio(monkeypatch):
    fake = FakeKvikio()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def objects(tmp_path):
    """Ten objects of 1000 bytes and more."""
    rng = np.random.default_rng(0)
    contents = {f"a/c/{i}": rng.bytes(1000 + i) for i in range(10)}
    for key, content in contents.items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path, contents


def begin(root, keys, ranges, slab, *, after=None, **knobs):
    """Begin to read ranges of (object row, offset, nbytes, place in the slab)."""
    columns = np.array(ranges, np.int64).reshape(-1, 4).T
    names = ("object_row", "offset", "nbytes", "slab_offset")
    return KvikioReader(root, **knobs).begin(keys, slab, **dict(zip(names, columns, strict=True)), after=after)


def read(*args, **kwargs):
    """Read such ranges."""
    begin(*args, **kwargs).finish()


def expected(contents, keys, ranges, nbytes):
    slab = np.zeros(nbytes, np.uint8)
    for row, offset, size, at in ranges:
        slab[at : at + size] = np.frombuffer(contents[keys[row]], np.uint8)[offset : offset + size]
    return slab


RANGES = [(0, 0, 10, 5), (0, 991, 9, 900), (2, 17, 501, 100), (3, 0, 0, 0), (3, 1003, 0, 40), (9, 0, 1009, 1000)]


def test_ranges_land_in_their_places(kvikio, objects):
    root, contents = objects
    slab = FakeSlab(2009)
    read(root, list(contents), RANGES, slab, task_nbytes=4096)
    np.testing.assert_array_equal(slab.array, expected(contents, list(contents), RANGES, 2009))
    assert [entry[1:] for entry in kvikio.log] == [(10, 4096), (9, 4096), (501, 4096), (1009, 4096)]
    assert kvikio.n_open == 0


def test_nothing_is_written_before_the_event(kvikio, objects):
    root, contents = objects
    read(root, list(contents), RANGES, FakeSlab(2009), after=FakeEvent(kvikio))
    assert [entry[0] for entry in kvikio.log] == ["event", "pread", "pread", "pread", "pread"]


def test_few_objects_are_open_at_once(kvikio, objects, monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN_OBJECTS", 3)
    root, contents = objects
    ranges = [(row, 0, 1000, 1000 * row) for row in range(10)]
    slab = FakeSlab(10_000)
    read(root, list(contents), ranges, slab)
    np.testing.assert_array_equal(slab.array, expected(contents, list(contents), ranges, 10_000))
    assert (kvikio.most_open, kvikio.n_open) == (3, 0)


def test_begun_reads_go_on_by_themselves(kvikio, objects, monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN_OBJECTS", 3)
    root, contents = objects
    slab = FakeSlab(10_000)
    wave = begin(root, list(contents), [(row, 0, 1000, 1000 * row) for row in range(10)], slab)
    assert (kvikio.log, kvikio.n_waited, kvikio.n_open) == ([("pread", 1000, None)] * 3, 0, 3)
    wave.queue()
    assert (len(kvikio.log), kvikio.n_waited, kvikio.n_open) == (10, 7, 3)
    wave.finish()
    assert (len(kvikio.log), kvikio.n_waited, kvikio.n_open) == (10, 10, 0)
    assert slab.array.tobytes() == b"".join(content[:1000] for content in contents.values())


def test_abandoned_reads_are_waited_for_and_no_others_begun(kvikio, objects, monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN_OBJECTS", 3)
    root, contents = objects
    wave = begin(root, list(contents), [(row, 0, 1000, 1000 * row) for row in range(10)], FakeSlab(10_000))
    wave.abandon()
    assert (len(kvikio.log), kvikio.n_waited, kvikio.n_open) == (3, 3, 0)
    wave.finish()
    assert len(kvikio.log) == 3


def test_large_reads_take_turns(kvikio, tmp_path):
    del kvikio
    readers = [KvikioReader(tmp_path), KvikioReader(tmp_path)]
    order = []

    def second():
        with readers[1].turn(module.LARGE_READ_NBYTES):
            order.append("second")

    thread = threading.Thread(target=second)
    with readers[0].turn(module.LARGE_READ_NBYTES):
        thread.start()
        with readers[1].turn(module.LARGE_READ_NBYTES - 1):
            order.append("small")
        order.append("first")
    thread.join()
    assert order == ["small", "first", "second"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"failing": frozenset({17})}, r"key 'a/c/2', bytes 17:518: POSIX error on pread"),
        ({"short": frozenset({17})}, r"key 'a/c/2', bytes 17:518: got 500 bytes; the object was cut short"),
        ({"refused": frozenset({"9"})}, r"key 'a/c/9': Unable to open file. Permission denied; the object vanished"),
    ],
)
def test_after_an_error_no_read_is_under_way(kvikio, objects, fault, message):
    for name, value in fault.items():
        setattr(kvikio, name, value)
    root, contents = objects
    with pytest.raises(ChunkReadError, match=message):
        read(root, list(contents), RANGES, FakeSlab(2009))
    assert kvikio.n_waited == sum(entry[0] == "pread" for entry in kvikio.log)
    assert kvikio.n_open == 0


def test_read_that_fails_at_once_leaves_no_other_under_way(kvikio, objects, monkeypatch):
    root, contents = objects
    pread = FakeCuFile.pread

    def failing(self, out, nbytes, offset, task_nbytes):
        if offset == 991:
            raise RuntimeError("POSIX error on pread: EOF")
        return pread(self, out, nbytes, offset, task_nbytes)

    monkeypatch.setattr(FakeCuFile, "pread", failing)
    with pytest.raises(ChunkReadError, match="key 'a/c/0', bytes 991:1000: POSIX error on pread: EOF"):
        read(root, list(contents), RANGES, FakeSlab(2009))
    assert (kvikio.n_waited, kvikio.n_open) == (1, 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "key 'a/c/2': .*No such file.*; the object vanished while being read"),
        (lambda path: path.write_bytes(b"abc" * 9), "bytes 17:518: got 10 bytes; the object was cut short"),
        (lambda path: (path.unlink(), path.mkdir()), "key 'a/c/2', bytes 17:518: .*directory"),
    ],
)
def test_objects_that_changed_are_named(kvikio, objects, spoil, message):
    root, contents = objects
    spoil(root / "a/c/2")
    with pytest.raises(ChunkReadError, match=message):
        read(root, list(contents), RANGES, FakeSlab(2009))
    assert kvikio.n_open == 0


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "a/../../secret", "..", "a/c/0\0"])
def test_keys_do_not_leave_the_store(kvikio, objects, key):
    del kvikio
    with pytest.raises(ChunkReadError, match="leads out of the store"):
        read(objects[0] / "a", [key], [(0, 0, 10, 0)], FakeSlab(10))


@pytest.mark.parametrize(
    "ranges", [[(0, 0, 10, 91)], [(0, 0, 10, -1)], [(1, 0, 10, 0), (0, 0, 10, 20)]], ids=["past", "before", "unordered"]
)
def test_ranges_outside_the_slab_or_out_of_order_are_refused(kvikio, objects, ranges):
    root, contents = objects
    with pytest.raises(ValueError, match="ordered by object and lie in the slab of 100 bytes"):
        read(root, list(contents), ranges, FakeSlab(100))
    assert kvikio.log == []


def test_no_ranges(kvikio, objects):
    read(objects[0], [], [], FakeSlab(0), after=FakeEvent(kvikio))
    assert kvikio.log == []


def test_threads_are_as_many_as_a_reader_wants_and_never_against_the_user(kvikio, tmp_path, monkeypatch):
    for n_threads, then in ((6, 6), (9, 9), (3, 9)):
        KvikioReader(tmp_path, n_threads=n_threads)
        assert kvikio.n_threads == then
    kvikio.n_threads = 5  # by the program
    KvikioReader(tmp_path, n_threads=9)
    assert kvikio.n_threads == 5
    kvikio.n_threads = 1
    monkeypatch.setenv("KVIKIO_NTHREADS", "1")
    KvikioReader(tmp_path, n_threads=9)
    assert kvikio.n_threads == 1


def test_absent_kvikio_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'xgpuzarr\[cu13\]'"):
        KvikioReader(tmp_path)


def device_slab(nbytes):
    import cupy

    return cupy.full(nbytes, 0xEE, cupy.uint8)


def allocated(slab):
    """The event after which memory fresh from the pool may be written to."""
    import cupy

    del slab
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


def write_objects(root, sizes):
    rng = np.random.default_rng(1)
    contents = {str(i): rng.bytes(size) for i, size in enumerate(sizes)}
    for key, content in contents.items():
        (root / key).write_bytes(content)
    return contents


@pytest.mark.gpu
@pytest.mark.parametrize("task_nbytes", [None, 65536])
def test_device_gets_the_bytes_of_every_range(tmp_path, task_nbytes):
    sizes = [1, 5000, 16_384, 65_537, 5_000_003, 40 << 20]
    contents = write_objects(tmp_path, sizes)
    rng = np.random.default_rng(2)
    ranges, at = [], 3
    for row, size in enumerate(sizes):
        ends = np.sort(rng.integers(0, size + 1, (6, 2)), axis=1)
        for start, stop in [(0, size), *ends.tolist()]:
            ranges.append((row, start, stop - start, at))
            at += stop - start + 7
    slab = device_slab(at)
    read(tmp_path, list(contents), ranges, slab, after=allocated(slab), task_nbytes=task_nbytes)
    host = slab.get()
    for row, offset, size, place in ranges:
        assert host[place : place + size].tobytes() == contents[str(row)][offset : offset + size]
        assert (host[place + size : place + size + 7] == 0xEE).all()


@pytest.mark.gpu
def test_device_gets_many_objects(tmp_path):
    contents = write_objects(tmp_path, [3000 + 100 * i for i in range(400)])
    offsets = np.cumsum([0, *(len(content) for content in contents.values())])
    ranges = [(i, 0, 3000 + 100 * i, int(offsets[i])) for i in range(400)]
    slab = device_slab(int(offsets[-1]))
    read(tmp_path, list(contents), ranges, slab, after=allocated(slab))
    assert slab.get().tobytes() == b"".join(contents.values())


@pytest.mark.gpu
def test_threads_without_a_context_can_read(tmp_path):
    contents = write_objects(tmp_path, [100, 1 << 20])
    slabs = [device_slab(100 + (1 << 20)) for _ in range(4)]
    event = allocated(slabs)
    errors = []

    def work(slab):
        try:
            read(tmp_path, ["0", "1"], [(0, 0, 100, 0), (1, 0, 1 << 20, 100)], slab, after=event)
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(slab,)) for slab in slabs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for slab in slabs:
        assert slab.get().tobytes() == contents["0"] + contents["1"]


@pytest.mark.gpu
def test_work_queued_before_the_event_does_not_overwrite_the_bytes(tmp_path):
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ticks)'
        "{ long long start = clock64(); while (clock64() - start < ticks); }",
        "spin",
    )
    contents = write_objects(tmp_path, [1 << 20])
    slab = device_slab(1 << 20)
    read(tmp_path, ["0"], [(0, 0, 1 << 20, 0)], slab, after=allocated(slab))  # everything is loaded and warm
    stream = cupy.cuda.Stream(non_blocking=True)
    event = cupy.cuda.Event(disable_timing=True)
    with stream:
        spin((1,), (1,), (500_000_000,))
        slab.fill(0)
        event.record(stream)
    read(tmp_path, ["0"], [(0, 0, 1 << 20, 0)], slab, after=event)
    with cupy.cuda.Stream(non_blocking=True) as other:  # visible to any stream
        copy = slab.copy()
        other.synchronize()
    assert copy.get().tobytes() == contents["0"]


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_device_read_past_the_end_is_an_error(tmp_path, nbytes):
    """As if the object were cut short between the look at its size and the read."""
    write_objects(tmp_path, [nbytes])
    slab = device_slab(2 * nbytes)
    with pytest.raises(ChunkReadError, match=rf"key '0', bytes {nbytes - 10}:{nbytes + 10}: "):
        read(tmp_path, ["0"], [(0, nbytes - 10, 20, 0)], slab, after=allocated(slab))
    with pytest.raises(ChunkReadError, match=rf"key '0', bytes 0:{2 * nbytes}: "):
        read(tmp_path, ["0"], [(0, 0, 2 * nbytes, 0)], slab, after=allocated(slab))


@pytest.mark.gpu
def test_object_that_kvikio_cannot_open_is_an_error(tmp_path):
    slab = device_slab(100)
    with pytest.raises(ChunkReadError, match=r"key '0': .*No such file"):
        read(tmp_path, ["0"], [(0, 0, 100, 0)], slab, after=allocated(slab))


@pytest.mark.gpu
def test_more_than_one_thread_reads(tmp_path):
    import kvikio

    KvikioReader(tmp_path)
    if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & set(os.environ):
        assert kvikio.defaults.get("num_threads") > 1
