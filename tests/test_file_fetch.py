"""Waves of local files: who reads while what is decoded, and what little memory changes of that."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

import xgpuzarr
from tests.host_device import PlainReader, host_device, host_device_session  # noqa: F401  # fixtures
from xgpuzarr.errors import ChunkReadError, DeviceMemoryError
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("host_device")

N_CHUNKS = 6
TWO_CHUNKS_A_WAVE = ReadOptions(max_batch_bytes=4 * 350_000)


@pytest.fixture
def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 9, (N_CHUNKS, 100, 100)).astype("f4")


@pytest.fixture
def path(tmp_path: Path, values: np.ndarray[Any, Any]) -> Path:
    array = zarr.create_array(
        tmp_path / "a", shape=values.shape, chunks=(1, 100, 100), dtype="f4", compressors=ZstdCodec()
    )
    array[:] = values
    return tmp_path / "a"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: bytes begun, queued, there, given up; a wave decoded; the turn taken and given back."""
    from xgpuzarr import device_wave

    events: list[str] = []

    def logged(name: str, call: Any) -> Any:
        def logged_call(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            events.append(name)
            return result

        return logged_call

    class Reader(PlainReader):
        def turn(self, nbytes: int) -> AbstractContextManager[None]:
            assert nbytes > 0
            return turn()

        def begin(self, *args: Any, **kwargs: Any) -> Any:
            read = super().begin(*args, **kwargs)
            events.append("begin")
            read.queue = logged("queued", read.queue)
            read.finish, read.abandon = logged("there", read.finish), logged("abandon", read.abandon)
            return read

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("turn")
        yield
        events.append("turn over")

    from xgpuzarr import file_fetch

    monkeypatch.setattr(file_fetch, "KvikioReader", Reader)
    monkeypatch.setattr(device_wave.Wave, "start", logged("decode", device_wave.Wave.start))
    return events


def _read(path: Path) -> Any:
    return xgpuzarr.open_array(path, device="cuda", options=TWO_CHUNKS_A_WAVE)[:].get()


def test_next_wave_is_begun_before_the_last_bytes_of_a_wave_are_there(path: Path, values: Any, log: list[str]) -> None:
    np.testing.assert_array_equal(_read(path), values)
    n = log.count("decode")
    assert n > 2
    waves = [*["queued", "begin", "there", "decode"] * (n - 1), "queued", "there", "turn over", "decode"]
    assert log == ["turn", "begin", *waves]


def test_wave_that_meets_too_little_memory_gives_up_the_next_and_is_tried_alone(
    path: Path, values: Any, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgpuzarr import device_wave

    start, n_refused = device_wave.Wave.start, 0

    def refuse_first(wave: Any) -> None:
        nonlocal n_refused
        n_refused += 1
        if n_refused == 1:
            raise MemoryError
        start(wave)

    monkeypatch.setattr(device_wave.Wave, "start", refuse_first)
    np.testing.assert_array_equal(_read(path), values)
    assert log[:6] == ["turn", "begin", "queued", "begin", "there", "abandon"]
    assert log[6:11] == ["begin", "queued", "there", "decode", "begin"]  # alone
    assert (log.count("turn"), log.count("turn over")) == (1, 1)


def test_bytes_that_are_on_their_way_are_given_up_beside_waves_that_decode(
    path: Path, values: Any, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgpuzarr import device_wave

    start, finish, n_started = device_wave.Wave.start, device_wave.Wave.finish, 0

    def refuse_second(wave: Any) -> None:
        nonlocal n_started
        n_started += 1
        if n_started == 2:
            raise MemoryError
        start(wave)

    def logged_finish(wave: Any) -> None:
        finish(wave)
        log.append("decoded")

    monkeypatch.setattr(device_wave.Wave, "start", refuse_second)
    monkeypatch.setattr(device_wave.Wave, "finish", logged_finish)
    np.testing.assert_array_equal(_read(path), values)
    assert log.index("abandon") < log.index("decoded")  # so that their memory is free when a half is tried


def test_next_wave_waits_for_its_turn_if_there_is_no_memory_for_its_bytes(
    path: Path, values: Any, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgpuzarr import file_fetch

    layout_slab, n_calls = file_fetch.layout_slab, 0

    def refuse_second(*args: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise MemoryError
        return layout_slab(*args)

    monkeypatch.setattr(file_fetch, "layout_slab", refuse_second)
    np.testing.assert_array_equal(_read(path), values)
    assert log[:7] == ["turn", "begin", "queued", "there", "decode", "begin", "queued"]


def test_one_chunk_that_never_fits(path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from xgpuzarr import device_wave

    def refuse(_wave: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(device_wave.Wave, "start", refuse)
    with pytest.raises(DeviceMemoryError, match=r"decoding array '', chunk \(0, 0, 0\)"):
        _read(path)
    assert log[-1] == "turn over"


def test_error_leaves_nothing_under_way(path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from xgpuzarr import device_wave

    def fail(_wave: Any) -> None:
        raise ChunkReadError("gone")

    monkeypatch.setattr(device_wave.Wave, "start", fail)
    with pytest.raises(ChunkReadError, match="gone"):
        _read(path)
    assert log == ["turn", "begin", "queued", "begin", "there", "abandon", "turn over"]
