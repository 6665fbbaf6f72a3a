"""Waves of a read: located one at a time, so that bytes come sooner, and all of them, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

import xgpuzarr
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from xgpuzarr.errors import CorruptChunkError

if TYPE_CHECKING:
    from pathlib import Path

N_SHARDS = 16
N_CHUNKS_IN_SHARD = 12
N_WAVES = 4


@pytest.fixture(autouse=True)
def _small_waves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.getfixturevalue("host_device")
    monkeypatch.setattr("xgpuzarr.waves.MIN_WAVE_DECODED_NBYTES", 1)


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were located at a time."""
    from xgpuzarr import waves

    counts: list[int] = []
    locate = waves.locate

    def counting(plan: Any, reader: Any, n_threads: int, rows: Any) -> Any:
        counts.append(len(rows))
        return locate(plan, reader, n_threads, rows)

    monkeypatch.setattr(waves, "locate", counting)
    return counts


def _store(path: Path, *, missing: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(0).integers(1, 100, (N_SHARDS * 4, 24)).astype("i4")
    array = zarr.create_array(path, shape=values.shape, shards=(4, 24), chunks=(1, 8), dtype="i4", fill_value=-7)
    array[:] = values
    for shard in missing:
        (path / f"c/{shard}/0").unlink()
        values[4 * shard : 4 * shard + 4] = -7
    return values


@pytest.mark.parametrize(
    "missing", [(), (0,), (0, 1, 2, 3, 4), (7,), (15,), tuple(range(1, 16)), tuple(range(16))], ids=str
)
@pytest.mark.parametrize("key", [np.s_[:], np.s_[::-1, 3:20], np.s_[5:61:3]], ids=str)
def test_all_chunks_come_whatever_is_missing(tmp_path: Path, missing: tuple[int, ...], key: Any) -> None:
    values = _store(tmp_path / "a", missing=missing)
    got = xgpuzarr.open_array(tmp_path / "a", device="cuda")[key].get()
    np.testing.assert_array_equal(got, values[key])


def test_whole_shards_are_located_a_wave_at_a_time(tmp_path: Path, located: list[int]) -> None:
    values = _store(tmp_path / "a")
    np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), values)
    assert sum(located) == N_SHARDS * N_CHUNKS_IN_SHARD
    assert all(n_chunks % N_CHUNKS_IN_SHARD == 0 for n_chunks in located)
    assert len(located) == N_WAVES
    assert located[0] < max(located)
    assert located[-1] < max(located)


@pytest.mark.parametrize("n_in_shard", [1, 2, 8, 16])
def test_shards_across_rows_are_located_once(tmp_path: Path, located: list[int], n_in_shard: int) -> None:
    values = np.arange(16 * 16, dtype="i4").reshape(16, 16)
    shards = (n_in_shard, n_in_shard)
    zarr.create_array(tmp_path / "a", shape=values.shape, shards=shards, chunks=(1, 1), dtype="i4")[:] = values
    np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[::-1, 1:].get(), values[::-1, 1:])
    assert sum(located) == 16 * 15
    assert len(located) <= N_WAVES


def test_others_are_located_while_the_first_bytes_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.host_device import PlainReader
    from xgpuzarr import file_fetch, waves

    _store(tmp_path / "a")
    events: list[str] = []
    locate = waves.locate

    class Reader(PlainReader):
        def begin(self, *args: Any, **kwargs: Any) -> Any:
            read = super().begin(*args, **kwargs)
            finish = read.finish
            events.append("begin")

            def logged() -> None:
                events.append("there")
                finish()

            read.finish = logged
            return read

    def logged_locate(*args: Any) -> Any:
        events.append("locate")
        return locate(*args)

    monkeypatch.setattr(file_fetch, "KvikioReader", Reader)
    monkeypatch.setattr(waves, "locate", logged_locate)
    xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]
    assert events[:5] == ["locate", "begin", "locate", "begin", "there"]


@pytest.mark.parametrize("shard", [0, 15])
def test_a_damaged_index_is_an_error_wherever_it_is(tmp_path: Path, shard: int, located: list[int]) -> None:
    _store(tmp_path / "a")
    file = tmp_path / f"a/c/{shard}/0"
    raw = bytearray(file.read_bytes())
    raw[-10] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptChunkError, match=rf"key 'c/{shard}/0': the shard index has CRC32C") as caught:
        xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]
    assert str(caught.value).count("array ") == 1
    assert len(located) == (N_WAVES if shard else 1)


def test_reads_at_once_share_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xgpuzarr import waves

    values = _store(tmp_path / "a")
    array = xgpuzarr.open_array(tmp_path / "a", device="cuda")
    sizes: list[list[int]] = []
    cut = waves.Waves._cut

    def noting(self: Any, rows: Any, n_even: float, *, is_halved: bool) -> Any:
        parts = cut(self, rows, n_even, is_halved=is_halved)
        sizes[-1].append(max(map(len, parts)))
        return parts

    monkeypatch.setattr(waves.Waves, "_cut", noting)
    monkeypatch.setattr("cupy.cuda.runtime.memGetInfo", lambda: (32_000, 32_000))

    def largest_wave() -> int:
        sizes.append([])
        np.testing.assert_array_equal(array[:].get(), values)
        return max(sizes[-1])

    alone = largest_wave()
    with waves.reading():
        beside_one = largest_wave()
        with waves.reading(), waves.reading():
            beside_three = largest_wave()
        assert largest_wave() == beside_three  # as many may be back at any time
    assert largest_wave() == alone
    assert beside_one == pytest.approx(alone / 2, abs=1)
    assert beside_three == pytest.approx(alone / 4, abs=1)


def test_what_streams_share_is_queued_before_the_event_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from xgpuzarr import device_output

    values = _store(tmp_path / "a")
    array = xgpuzarr.open_array(tmp_path / "a", device="cuda")
    events: list[str] = []

    def log(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def logged(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, logged)

    log(device_output.launch, "new_status")
    log(device_output.DeviceOutput, "_upload_gather_tables")
    log(cupy.cuda.Event, "record")
    rows = [3, 60, 2]
    np.testing.assert_array_equal(array.oindex[rows].get(), values[rows])
    assert events[:3] == ["new_status", "_upload_gather_tables", "record"]
    assert events.count("_upload_gather_tables") == 1


@pytest.mark.parametrize(("decoded_mib", "n_waves"), [(100, 1), (600, 4), (2000, 4), (3100, 6), (4096, 8), (9000, 8)])
def test_large_reads_are_cut_into_more_waves(monkeypatch: pytest.MonkeyPatch, decoded_mib: int, n_waves: int) -> None:
    from xgpuzarr import waves

    monkeypatch.setattr(waves, "MIN_WAVE_DECODED_NBYTES", 64 << 20)
    chain = SimpleNamespace(compressor=SimpleNamespace(codec="zstd"))
    layout = SimpleNamespace(codec_chain=chain, chunk_nbytes=1 << 16)
    plan = SimpleNamespace(layout=layout, decoded_nbytes=decoded_mib << 20)
    assert waves.Waves._n_waves(SimpleNamespace(_plan=plan, _is_local=True)) == n_waves
