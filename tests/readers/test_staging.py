"""Staging through page-locked memory: against a fake CUDA whose copies run as late as they may, and with -m gpu."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpuzarr.readers.staging import PinnedPool

UNTOUCHED = 0xEE


@dataclass
class FakeStream:
    """A stream that copies nothing before somebody waits for it."""

    ptr: int = 7
    pending: list = field(default_factory=list)

    def synchronize(self):
        for copy in self.pending:
            ctypes.memmove(*copy)
        self.pending.clear()


class FakeEvent:
    def __init__(self, *, disable_timing):
        assert disable_timing
        self.stream = None

    def record(self, stream):
        self.stream = stream

    def synchronize(self):
        if self.stream is not None:
            self.stream.synchronize()


class FakeSlab:
    """A slab in host memory."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes, UNTOUCHED, np.uint8)
        self.nbytes = nbytes
        self.data = types.SimpleNamespace(ptr=self.array.ctypes.data)


@pytest.fixture(scope="module")
def stream():
    stream = FakeStream()

    def copy(target, source, nbytes, kind, stream_ptr):
        assert (kind, stream_ptr) == (1, stream.ptr)
        stream.pending.append((target, source, nbytes))

    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        alloc_pinned_memory=bytearray,
        Event=FakeEvent,
        runtime=types.SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        yield stream


@st.composite
def placed_parts(draw):
    """Parts, their places in ascending order with gaps between, and the size of the slab."""
    parts = draw(st.lists(st.binary(max_size=60), max_size=12))
    places, at = [], 0
    for part in parts:
        at += draw(st.integers(0, 40))
        places.append(at)
        at += len(part)
    return parts, np.array(places, np.int64), at + draw(st.integers(0, 10))


@given(case=placed_parts(), buffer_nbytes=st.integers(1, 100), n_buffers=st.integers(1, 3))
def test_every_part_lands_in_its_place(stream, case, buffer_nbytes, n_buffers):
    parts, places, slab_nbytes = case
    slab = FakeSlab(slab_nbytes)
    pool = PinnedPool(buffer_nbytes, n_buffers)
    pool.copy_to_device([memoryview(part) for part in parts], slab, places, stream=stream)
    stream.synchronize()
    for part, place in zip(parts, places, strict=True):
        assert slab.array[place : place + len(part)].tobytes() == part
    first, last = (places[0], places[-1] + len(parts[-1])) if parts else (0, 0)
    assert (slab.array[:first] == UNTOUCHED).all()
    assert (slab.array[last:] == UNTOUCHED).all()


def test_buffers_are_not_refilled_before_they_are_copied(stream):
    pool = PinnedPool(4, 1)
    slab = FakeSlab(8)
    for half, value in enumerate((1, 2)):
        with pool.buffer() as buffer:
            buffer.array[:] = value
            buffer.send(0, 4, slab, 4 * half, stream=stream)
    assert slab.array.tolist() == [1] * 4 + [UNTOUCHED] * 4  # the second copy is still to come
    stream.synchronize()
    assert slab.array.tolist() == [1] * 4 + [2] * 4


def test_buffers_come_back_after_an_error(stream):
    del stream
    pool = PinnedPool(4, 1)
    with pytest.raises(RuntimeError, match="the filling failed"), pool.buffer():
        raise RuntimeError("the filling failed")
    with pool.buffer() as buffer:
        assert buffer.array.shape == (4,)


def test_lent_buffers_are_waited_for(stream):
    del stream
    pool = PinnedPool(4, 1)
    taken = threading.Event()

    def take():
        with pool.buffer():
            taken.set()

    with pool.buffer():
        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.05)
    thread.join()
    assert taken.is_set()


@pytest.mark.parametrize(("start", "nbytes", "place"), [(0, 5, 0), (-1, 2, 0), (2, 3, 0), (0, 4, 5), (0, 4, -1)])
def test_sends_outside_the_buffer_or_the_slab_are_refused(stream, start, nbytes, place):
    with PinnedPool(4, 1).buffer() as buffer, pytest.raises(ValueError, match=r"do not fit at -?\d of 8"):
        buffer.send(start, nbytes, FakeSlab(8), place, stream=stream)
    assert stream.pending == []


@pytest.mark.parametrize("places", [[0, 2], [4, 0]])
def test_parts_that_overlap_or_go_back_are_refused(stream, places):
    with pytest.raises(ValueError, match="ordered by their place in the slab and must not overlap"):
        PinnedPool(4, 1).copy_to_device([memoryview(b"abc")] * 2, FakeSlab(8), np.array(places), stream=stream)


@pytest.mark.gpu
def test_device_gets_every_part():
    import cupy

    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 300_000, 200)
    places = np.cumsum([0, *(sizes[:-1] + 17)])
    parts = [rng.bytes(size) for size in sizes]
    slab = cupy.full(int(places[-1] + sizes[-1]), UNTOUCHED, cupy.uint8)
    pool = PinnedPool(1 << 20, 2)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for stream, rows in zip(streams, (slice(0, 100), slice(100, 200)), strict=True):
        pool.copy_to_device([memoryview(part) for part in parts[rows]], slab, places[rows], stream=stream)
    cupy.cuda.Device().synchronize()
    host = slab.get()
    for part, place in zip(parts, places, strict=True):
        assert host[place : place + len(part)].tobytes() == part
