"""A stand-in for a whole device: reads with ``device="cuda"`` run on the host, kernels under the sanitizers.

`HostDevice` adds to `HostCuda` what a read needs of cupy beyond kernels: memory with addresses, streams, events. What
stands in for nvCOMP decodes from address to address with numcodecs and zlib, and, like nvCOMP, looks at no checksum.
KvikIO and page-locked memory become plain copies.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import zlib
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numcodecs import lz4, zstd

import xgpuzarr.decoders.nvcomp
import xgpuzarr.readers.kvikio
import xgpuzarr.readers.staging
from tests.kernels.host_cuda import HostCuda
from xgpuzarr.decoders.nvcomp import Alignment
from xgpuzarr.kernels import compile as kernel_compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUND_TO_CUPY = (
    "execute_device",
    "execute_staged",
    "waves",
    "ahead_fetch",
    "file_fetch",
    "store_fetch",
    "remote_fetch",
    "device_wave",
    "device_output",
    "decoders.frames",
    "decoders.opaque_frames",
)
"""Modules that import cupy when they are imported."""


class DeviceArray(np.ndarray):
    """Stands in for `cupy.ndarray`: refuses arithmetic with NumPy arrays, takes subnormal float32 for zero."""

    def get(self) -> np.ndarray:
        return np.array(self.view(np.ndarray))

    def set(self, values: np.ndarray) -> None:
        self.view(np.ndarray)[...] = values

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(type(x) is np.ndarray and x.ndim for x in inputs):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if "out" in kwargs:
            kwargs["out"] = tuple(_plain(x) for x in kwargs["out"])
        result = getattr(ufunc, method)(*(_flushed(_plain(x)) for x in inputs), **kwargs)
        if not isinstance(result, np.ndarray):
            return result
        result[...] = _flushed(result)
        return result.view(DeviceArray)

    def astype(self, dtype: Any, **kwargs: Any) -> DeviceArray:
        converted = (self if dtype == self.dtype else _flushed(self)).view(np.ndarray).astype(dtype, **kwargs)
        return (converted if dtype == self.dtype else _flushed(converted)).view(DeviceArray)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def _flushed(values: Any) -> Any:
    """Make what CuPy's kernels, compiled with -ftz=true, make of float32."""
    if getattr(values, "dtype", None) != np.float32:
        return values
    plain = np.asarray(values)
    return np.where(np.abs(plain) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), plain), plain)


class HostDevice(HostCuda):
    """The part of cupy that a read uses."""

    ndarray = DeviceArray

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lock = threading.Lock()
        self.cuda = SimpleNamespace(
            Device=_Device,
            Event=_Event,
            Stream=_Stream,
            get_current_stream=_Stream,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            runtime=SimpleNamespace(memGetInfo=lambda: (1 << 30, 1 << 30), CUDARuntimeError=OSError),
        )

    def RawModule(self, **options: Any) -> Any:  # noqa: N802
        """One kernel at a time: a pipe leads to each module, and zarr-python calls codecs on many threads."""
        module = super().RawModule(**options)

        def get_function(name: str) -> Any:
            function = module.get_function(name)

            def one_at_a_time(*arguments: Any) -> None:
                with self._lock:
                    function(*arguments)

            return one_at_a_time

        return SimpleNamespace(get_function=get_function)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type | np.ufunc) or not callable(found):
            return found
        return lambda *args, **kwargs: _on_device(found(*args, **kwargs))

    def asarray(self, values: Any, **kwargs: Any) -> DeviceArray:
        return values if isinstance(values, DeviceArray) else _on_device(np.array(values, **kwargs))

    def asnumpy(self, values: DeviceArray) -> np.ndarray:
        return values.get()

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)


def _on_device(result: Any) -> Any:
    return result.view(DeviceArray) if isinstance(result, np.ndarray) else result


class _Device:
    id = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Event:
    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing

    def record(self, _stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Stream(_Device):
    ptr = 0

    def __init__(self, *, non_blocking: bool = True) -> None:
        assert non_blocking

    def synchronize(self) -> None:
        return None

    def wait_event(self, _event: _Event) -> None:
        return None


class PlainReader:
    """Stands in for `KvikioReader`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def turn(self, _nbytes: int) -> Any:
        return nullcontext()

    def begin(
        self, keys: list[str], slab: Any, *, object_row: Any, offset: Any, nbytes: Any, slab_offset: Any, after: Any
    ) -> Any:
        del after

        def finish() -> None:
            for row, start, size, at in zip(object_row, offset, nbytes, slab_offset, strict=True):
                data = Path(self._root, keys[row]).read_bytes()[start : start + size]
                slab[at : at + size].set(np.frombuffer(data, np.uint8))

        return SimpleNamespace(queue=lambda: None, finish=finish, abandon=lambda: None)


class PlainBuffer:
    """Stands in for `PinnedBuffer`."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)

    def send(self, start: int, nbytes: int, slab: Any, slab_offset: int, *, stream: Any) -> None:
        del stream
        slab[slab_offset : slab_offset + nbytes].set(self.array[start : start + nbytes])


class PlainPool:
    """Stands in for `PinnedPool`."""

    def __init__(self, buffer_nbytes: int, _n_buffers: int) -> None:
        self.buffer_nbytes = buffer_nbytes

    @contextmanager
    def buffer(self) -> Iterator[PlainBuffer]:
        yield PlainBuffer(self.buffer_nbytes)

    def copy_to_device(self, parts: list[memoryview], slab: Any, slab_offset: Any, *, stream: Any) -> None:
        del stream
        for part, at in zip(parts, slab_offset, strict=True):
            slab[at : at + len(part)].set(np.frombuffer(part, np.uint8))


def decode_frame(algorithm: str, encoded: bytes, room: int) -> bytes:
    """Decode one frame; of a gzip chunk the first member, whose checksum nobody looks at."""
    match algorithm:
        case "zstd":
            return bytes(zstd.decompress(encoded))
        case "lz4":
            return bytes(lz4.decompress(room.to_bytes(4, "little") + encoded))
        case "deflate":
            return zlib.decompress(encoded, -15)
        case "gzip":
            assert encoded[3] == 0, "optional fields"
            return zlib.decompressobj(-15).decompress(encoded[10:])
        case "snappy":  # the size as snappy states it, then something else
            return zlib.decompress(encoded[len(_varint(room)) :])
    return zlib.decompress(encoded)  # formats that only nvCOMP knows


def encode_frame(algorithm: str, data: bytes) -> bytes:
    """Encode what `decode_frame` decodes."""
    match algorithm:
        case "zstd":
            return bytes(zstd.compress(data))
        case "lz4":
            return bytes(lz4.compress(data))[4:]
        case "deflate":
            return zlib.compress(data, wbits=-15)
        case "snappy":
            return _varint(len(data)) + zlib.compress(data, 0)
    return zlib.compress(data)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def compress_batch(
    algorithm: str, src_ptrs: Any, src_nbytes: Any, dst_ptrs: Any, *, max_chunk_nbytes: int, **_: Any
) -> tuple[Any, Any]:
    """Stand-in for the function of `xgpuzarr.decoders.nvcomp`."""
    encoded_nbytes, statuses = np.zeros(len(src_ptrs), np.uint64), np.zeros(len(src_ptrs), np.int32)
    for row, (source, size, to) in enumerate(
        zip(src_ptrs.tolist(), src_nbytes.tolist(), dst_ptrs.tolist(), strict=True)
    ):
        assert size <= max_chunk_nbytes
        frame = encode_frame(algorithm, ctypes.string_at(source, size))
        assert len(frame) <= max_encoded_nbytes(algorithm, size)
        ctypes.memmove(to, frame, len(frame))
        encoded_nbytes[row] = len(frame)
    return encoded_nbytes.view(DeviceArray), statuses.view(DeviceArray)


def max_encoded_nbytes(_algorithm: str, chunk_nbytes: int, _options: bytes | None = None) -> int:
    return 2 * chunk_nbytes + 100


def decompressed_nbytes(algorithm: str, src_ptrs: Any, src_nbytes: Any, *, stream: Any) -> Any:
    """Stand-in for the function of `xgpuzarr.decoders.nvcomp`; 0 for what does not decode."""
    del stream
    assert algorithm in ("ans", "bitcomp", "cascaded")
    sizes = np.zeros(len(src_ptrs), np.uint64)
    for row, (source, size) in enumerate(zip(src_ptrs.tolist(), src_nbytes.tolist(), strict=True)):
        with suppress(zlib.error):
            sizes[row] = len(zlib.decompress(ctypes.string_at(source, size)))
    return sizes.view(DeviceArray)


def decompress_batch(
    algorithm: str, src_ptrs: Any, src_nbytes: Any, dst_ptrs: Any, dst_nbytes: Any, **_: Any
) -> tuple[Any, Any]:
    """Stand-in for the function of `xgpuzarr.decoders.nvcomp`."""
    n = len(src_ptrs)
    actual, statuses = np.zeros(n, np.uint64).view(DeviceArray), np.zeros(n, np.int32).view(DeviceArray)
    columns = (src_ptrs.tolist(), src_nbytes.tolist(), dst_ptrs.tolist(), dst_nbytes.tolist())
    for row, (source, size, to, room) in enumerate(zip(*columns, strict=True)):
        try:
            data = decode_frame(algorithm, ctypes.string_at(source, size), room)
        except (RuntimeError, zlib.error):
            statuses[row] = 1
            continue
        actual[row] = len(data)
        ctypes.memmove(to, data, min(len(data), room))
    return actual, statuses


@pytest.fixture(scope="session")
def host_device_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostDevice]:
    device = HostDevice(tmp_path_factory.mktemp("device"))
    yield device
    device.close()


@pytest.fixture
def host_device(host_device_session: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """Let ``device="cuda"`` mean the stand-in."""

    def aligned(_algorithm: str, _options: bytes | None = None) -> Alignment:
        return Alignment(input=8, output=8, temp=1)

    _forget_modules()
    monkeypatch.setitem(sys.modules, "cupy", host_device_session)
    monkeypatch.setattr(kernel_compiler, "_modules", {})
    monkeypatch.setattr(xgpuzarr.decoders.nvcomp, "decompress_batch", decompress_batch)
    monkeypatch.setattr(xgpuzarr.decoders.nvcomp, "decode_alignment", aligned)
    monkeypatch.setattr(xgpuzarr.decoders.nvcomp, "encode_alignment", aligned)
    for function in (compress_batch, decompressed_nbytes, max_encoded_nbytes):
        monkeypatch.setattr(xgpuzarr.decoders.nvcomp, function.__name__, function)
    monkeypatch.setattr(xgpuzarr.readers.kvikio, "KvikioReader", PlainReader)
    monkeypatch.setattr(xgpuzarr.readers.staging, "PinnedPool", PlainPool)
    yield host_device_session
    _forget_modules()


def _forget_modules() -> None:
    """Modules that are bound to one cupy must be imported anew for another."""
    for name in BOUND_TO_CUPY:
        sys.modules.pop(f"xgpuzarr.{name}", None)
        package, _, module = f"xgpuzarr.{name}".rpartition(".")
        vars(sys.modules[package]).pop(module, None)
