"""Device reads equal zarr-python's: every codec, order, byte order and dtype, for every kind of selection.

Without a device they run on `tests.host_device`, their kernels under the sanitizers.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, GzipCodec, TransposeCodec, ZstdCodec

import xgpuzarr
from tests.codec_cases import CASES, CHUNKS, DAMAGE, SHAPE, damage
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.diagnostics import collect
from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    """Run every test on the stand-in for a device, and with -m gpu on a device."""
    if request.param == "host":
        request.getfixturevalue("host_device")


pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
]


BLOSC = ("lz4", "lz4hc", "zstd", "zlib", "blosclz")
COMPRESSORS = {
    2: {
        "none": None,
        "zstd": numcodecs.Zstd(3),
        "zstd-checksum": numcodecs.Zstd(3, checksum=True),
        "lz4": numcodecs.LZ4(),
        "gzip": numcodecs.GZip(5),
        "zlib": numcodecs.Zlib(5),
        **{f"blosc-{c}": numcodecs.Blosc(c, 5, shuffle) for c, shuffle in zip(BLOSC, (1, 2, 1, 0, 2), strict=True)},
    },
    3: {"none": None, "zstd": ZstdCodec(level=3), "zstd-checksum": ZstdCodec(checksum=True), "gzip": GzipCodec()},
}
SELECTIONS: list[Any] = [
    ...,
    np.s_[4:8],
    np.s_[::-1, ::3, 5:-2],
    np.s_[3, :, -1],
    np.s_[20, 30, 39],
    np.s_[5:5],
    np.s_[:, [0, 5, 30, 5]],
    np.s_[[1, 22, 3], [0, 1, 30], [39, 0, 7]],
    np.s_[[True] * 5 + [False] * 18],
]


def _values(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    size = int(np.prod(shape))
    raw = np.dtype(dtype)
    if raw.kind == "b":
        return (random.random(size) < 0.5).reshape(shape)
    if raw.kind in "SU":
        return np.array([f"v{n % 97}" for n in range(size)]).astype(raw).reshape(shape)
    if raw.kind == "c":
        return (random.integers(-99, 99, size) + 1j * random.integers(-99, 99, size)).astype(raw).reshape(shape)
    return random.integers(0, 99, size).astype("i8").astype(raw).reshape(shape)


def _check(path: Path, values: np.ndarray[Any, Any], *, route: Any = "device", on_device: bool = True) -> None:
    array = xgpuzarr.open_array(path, device="cuda", options=ReadOptions(route=route))
    assert array.route == route
    for key in SELECTIONS:
        got = array[key]
        assert hasattr(got, "get") is on_device
        host = got.get() if on_device else got
        expected = values[key]
        assert host.dtype == values.dtype.newbyteorder("=")
        assert host.shape == expected.shape
        np.testing.assert_array_equal(host, expected, err_msg=str(key))


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "|u1", "<f8", ">c16", "|b1", ">i2", "<f2", "<M8[ns]", "|S5", ">U3"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("compressor", COMPRESSORS[2])
def test_v2(tmp_path: Path, compressor: str, order: str, dtype: str) -> None:
    values = _values(dtype)
    array = zarr.create_array(
        tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype=dtype, order=order, zarr_format=2,
        compressors=COMPRESSORS[2][compressor], fill_value=None,
    )  # fmt: skip
    array[:] = values
    _check(tmp_path / "a", values, on_device=np.dtype(dtype).kind not in "MSU")


@pytest.mark.parametrize("shards", [None, (8, 31, 48)])
@pytest.mark.parametrize("transpose", [None, (2, 0, 1)])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("compressor", COMPRESSORS[3])
def test_v3(tmp_path: Path, compressor: str, endian: str, transpose: Any, shards: Any) -> None:
    values = _values("<i4")
    array = zarr.create_array(
        tmp_path / "a", shape=SHAPE, chunks=CHUNKS, shards=shards, dtype="i4", fill_value=7,
        compressors=COMPRESSORS[3][compressor], serializer=BytesCodec(endian=endian),
        filters=[TransposeCodec(order=transpose)] if transpose else None,
    )  # fmt: skip
    array[:] = values
    array[4:12] = 7  # left out by zarr-python: these chunks, and with them a shard, read as the fill value
    values[4:12] = 7
    with collect() as reports:
        _check(tmp_path / "a", values)
    assert sum(report.n_missing for report in reports) > 0


@pytest.mark.parametrize("name", CASES)
def test_codec_chains(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    values = case.write(tmp_path / "a")
    with collect() as reports:
        _check(tmp_path / "a", values, route=case.route, on_device=np.dtype(case.dtype).kind not in "MSU")
    if case.route == "device":
        assert {report.route for report in reports} == {"device"}
        assert sum(report.n_host_chunks for report in reports) == 0


@pytest.mark.parametrize("name", CASES)
def test_codec_chains_decoded_on_the_host(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    values = case.write(tmp_path / "a")
    _check(tmp_path / "a", values, route="host", on_device=np.dtype(case.dtype).kind not in "MSU")


@pytest.mark.parametrize("route", ["device", "host"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_the_chunk(tmp_path: Path, name: str, route: Any) -> None:
    case, at, text = DAMAGE[name]
    CASES[case].write(tmp_path / "a")
    damage(tmp_path / "a", at)
    with pytest.raises(CorruptChunkError, match=rf"chunk \(0, 0, 0\).*({text})"):
        xgpuzarr.open_array(tmp_path / "a", device="cuda", options=ReadOptions(route=route))[:]


def test_a_chunk_without_room_for_its_checksum(tmp_path: Path) -> None:
    CASES["v3-crc32c"].write(tmp_path / "a")
    (tmp_path / "a" / "c" / "0" / "0" / "0").write_bytes(b"abc")
    with pytest.raises(CorruptChunkError, match="3 bytes have no room for a crc32c checksum"):
        xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]


@pytest.mark.parametrize("chunk", [(1, 60, 100), (1, 2100, 1000)], ids=["staged", "larger than a staging buffer"])
def test_few_gzip_chunks_are_inflated_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: tuple[int, ...]
) -> None:
    shape = (3, chunk[1], chunk[2] + 5)
    array = zarr.create_array(
        tmp_path / "a", shape=shape, chunks=chunk, dtype="f4", compressors=GzipCodec(level=1), fill_value=3
    )
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    values[1] = 3  # not stored
    array[:] = values
    for route, text in (("auto", "chunks of"), ("device", "was asked for")):
        monkeypatch.setenv("XGPUZARR_ROUTE", route)
        opened = xgpuzarr.open_array(tmp_path / "a", device="cuda")
        for key in (..., np.s_[::-1, 3:], np.s_[[2, 1], :, [4, 7]]):
            with collect() as reports:
                np.testing.assert_array_equal(opened[key].get(), values[key])
            expected = "host" if route == "auto" else "device"
            assert [report.route for report in reports] == [expected]
            assert reports[0].n_missing > 0
        explained = opened.plan().explain()
        assert f"route: {expected}\n  because " in explained
        assert text in explained


def test_zero_dimensions(tmp_path: Path) -> None:
    for n, compressor in enumerate([None, ZstdCodec()]):
        array = zarr.create_array(tmp_path / str(n), shape=(), dtype="f8", compressors=compressor)
        array[...] = 2.5
        got = xgpuzarr.open_array(tmp_path / str(n), device="cuda")[...]
        assert got.shape == ()
        assert float(got) == 2.5


def test_empty_array(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=(0, 3), chunks=(2, 3), dtype="f4")
    assert xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].shape == (0, 3)


@pytest.mark.parametrize("shards", [None, (10, 100, 100)])
@pytest.mark.parametrize("in_memory", [False, True])
def test_many_waves_of_little_memory(tmp_path: Path, in_memory: bool, shards: Any) -> None:
    values = _values("<f4", (60, 100, 100))
    store: Any = zarr.storage.MemoryStore() if in_memory else tmp_path / "a"
    array = zarr.create_array(
        store, shape=values.shape, chunks=(1, 100, 100), shards=shards, dtype="f4", compressors=ZstdCodec()
    )
    array[:] = values
    options = ReadOptions(max_batch_bytes=1 << 20)
    got = xgpuzarr.open_array(store, device="cuda", options=options)[:]
    np.testing.assert_array_equal(got.get(), values)


def test_memory_store() -> None:
    values = _values("<f4")
    for shards in (None, (8, 31, 48)):
        store = zarr.storage.MemoryStore()
        array = zarr.create_array(store, shape=SHAPE, chunks=CHUNKS, shards=shards, dtype="f4", compressors=ZstdCodec())
        array[:] = values
        got = xgpuzarr.open_array(store, device="cuda")
        for key in SELECTIONS:
            np.testing.assert_array_equal(got[key].get(), values[key])


def _rewrite(path: Path, rewrite: Any, compressors: Any) -> np.ndarray[Any, Any]:
    """Write an array of which every chunk is encoded by another writer."""
    values = _values("<i4")
    array = zarr.create_array(
        path, shape=SHAPE, chunks=CHUNKS, dtype="i4", zarr_format=2, compressors=compressors, fill_value=None
    )
    array[:] = values
    for chunk in path.glob("[0-9]*"):
        chunk.write_bytes(rewrite(bytes(compressors.decode(chunk.read_bytes()))))
    return values


ZSTD, GZIP = numcodecs.Zstd(), numcodecs.GZip()


OTHER_WRITERS = {
    "zstd-no-size": (ZSTD, lambda data: zstd_frame(data, window_log=18, size_nbytes=0), False),
    "zstd-no-size-checksum": (ZSTD, lambda data: zstd_frame(data, window_log=18, size_nbytes=0, checksum=True), False),
    "zstd-trailing-skippable": (ZSTD, lambda data: zstd_frame(data) + skippable_frame(b"note"), False),
    "zstd-leading-skippable": (ZSTD, lambda data: skippable_frame(b"note") + zstd_frame(data), True),
    "zstd-frames": (ZSTD, lambda data: zstd_frame(data[:999]) + zstd_frame(data[999:]), True),
    "zstd-dictionary": (ZSTD, lambda data: zstd_frame(data, dictionary_id=(0, 1)), True),
    "gzip-members": (GZIP, lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]), True),
    "gzip-padding": (GZIP, lambda data: gzip.compress(data) + bytes(9), True),
    "zlib-9": (numcodecs.Zlib(), lambda data: zlib.compress(data, 9), False),
}


@pytest.mark.parametrize(("compressor", "rewrite", "on_host"), OTHER_WRITERS.values(), ids=OTHER_WRITERS)
def test_frames_of_other_writers(tmp_path: Path, compressor: Any, rewrite: Any, on_host: bool) -> None:
    values = _rewrite(tmp_path / "a", rewrite, compressor)
    array = xgpuzarr.open_array(tmp_path / "a", device="cuda", options=ReadOptions(route="device"))
    for key in (..., np.s_[4:8, :, :16], np.s_[::-1, 5:]):
        with collect() as reports:
            np.testing.assert_array_equal(array[key].get(), values[key])
        assert [report.n_host_chunks for report in reports] == [reports[0].n_chunks if on_host else 0]


def test_one_odd_frame_among_many_goes_to_the_host(tmp_path: Path) -> None:
    values = _rewrite(tmp_path / "a", zstd_frame, ZSTD)
    chunk = tmp_path / "a" / "1.0.1"
    data = bytes(ZSTD.decode(chunk.read_bytes()))
    for odd in (zstd_frame(data, window_log=18, size_nbytes=0), zstd_frame(data[:99]) + zstd_frame(data[99:])):
        chunk.write_bytes(odd)
        with collect() as reports:
            np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), values)
        assert [report.n_host_chunks for report in reports] == [1]


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS[2] if c != "none"] + ["none"])
def test_chunk_cut_short(tmp_path: Path, compressor: str) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype="i4", zarr_format=2, compressors=COMPRESSORS[2][compressor]
    )
    array[:] = _values("<i4")
    chunk = tmp_path / "a" / "2.0.1"
    chunk.write_bytes(chunk.read_bytes()[:6])
    with pytest.raises(CorruptChunkError, match=r"chunk \(2, 0, 1\) \(key '2.0.1'"):
        xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]


def test_result_is_safe_on_the_callers_stream(tmp_path: Path) -> None:
    import cupy

    values = _values("<f4")
    array = zarr.create_array(tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype="f4", compressors=ZstdCodec())
    array[:] = values
    opened = xgpuzarr.open_array(tmp_path / "a", device="cuda")
    with cupy.cuda.Stream(non_blocking=True):
        total = opened[:].sum(dtype="f8")
        assert float(total) == values.sum(dtype="f8")


def test_errors_of_readers_name_the_array(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    array = group.create_array("t", shape=SHAPE, chunks=CHUNKS, dtype="f4", compressors=ZstdCodec())
    array[:] = _values("<f4")
    chunk = tmp_path / "g" / "t" / "c" / "0" / "0" / "0"
    chunk.unlink()
    chunk.mkdir()
    with pytest.raises(ChunkReadError, match=r"^array 't': store .*key 't?/?c/0/0/0'.*must be a file"):
        xgpuzarr.open_array(tmp_path / "g", path="t", device="cuda")[:]
