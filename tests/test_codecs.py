"""Codecs of nvCOMP: what zarr-python writes with them is read back, by it and by xgpuzarr; unknown parameters raise.

Without a device they run on `tests.host_device`, where zlib plays the formats that only nvCOMP knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

import xgpuzarr
from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from xgpuzarr.codecs import GDeflateCodec, NvcompBatch, NvcompCodec
from xgpuzarr.diagnostics import collect, total
from xgpuzarr.errors import CorruptChunkError, UnsupportedError
from xgpuzarr.plan.codec_facts import NVCOMP_ALGORITHMS

SHAPE, CHUNKS = (90, 300), (40, 300)
VALUES = (np.arange(90 * 300, dtype="f4") // 3).reshape(SHAPE)
pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")

CODECS = {f"nvcomp.{name}": NvcompCodec(name) for name in sorted(NVCOMP_ALGORITHMS)} | {"gdeflate": GDeflateCodec()}
ON_HOST = ("nvcomp.deflate", "nvcomp.lz4", "nvcomp.zstd")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Stand-in, or a device."""
    if request.param == "host":
        request.getfixturevalue("host_device")
    return request.param


def write(path: Path, codecs: list[Any], **options: Any) -> None:
    array = zarr.create_array(path, shape=SHAPE, chunks=CHUNKS, dtype="f4", compressors=codecs, **options)
    array[:] = VALUES


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CODECS)
def test_written_and_read_back(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", [CODECS[name]])
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "a")[:], VALUES)
    with collect() as reports:
        np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), VALUES)
    assert (total(reports).route, total(reports).n_host_chunks) == ("device", 0)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["nvcomp.bitcomp", "gdeflate", "nvcomp.zstd"])
def test_in_shards_behind_a_checksum(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", [CODECS[name], Crc32cCodec()], shards=(80, 300))
    got = xgpuzarr.open_array(tmp_path / "a", device="cuda")
    np.testing.assert_array_equal(got[::-1, 3:7].get(), VALUES[::-1, 3:7])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("algorithm", ["LZ4", "zstd", "snappy", "Gdeflate"])
def test_v2_as_kvikio_wrote_it(tmp_path: Path, algorithm: str) -> None:
    write(tmp_path / "a", NvcompBatch(algorithm), zarr_format=2)
    with collect() as reports:
        np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), VALUES)
    assert total(reports).n_host_chunks == 0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CODECS)
def test_the_host_decodes_what_it_can(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", [CODECS[name]])
    array = xgpuzarr.open_array(tmp_path / "a", device="cpu")
    if name in ON_HOST:
        np.testing.assert_array_equal(array[:], VALUES)
    else:
        with pytest.raises(UnsupportedError, match=f"codec '{name}' has no decoder on the host; open it with"):
            array[:]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("damage", ["cut short", "another size"])
def test_damage_names_the_chunk(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path / "a", [CODECS[name]])
    chunk = tmp_path / "a" / "c" / "1" / "0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:3] if damage == "cut short" else (len(data) + 7).to_bytes(4, "little") + data[4:])
    with pytest.raises(CorruptChunkError, match=r"chunk \(1, 0\)"):
        xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("word", range(5))
def test_gdeflate_headers_that_lie(tmp_path: Path, word: int) -> None:
    values = np.arange(3 << 15, dtype="u2")
    array = zarr.create_array(tmp_path / "a", shape=values.shape, dtype="u2", compressors=GDeflateCodec())
    array[:] = values
    np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), values)
    chunk = tmp_path / "a" / "c" / "0"
    for lie in (0, 2**63, 7):
        words = np.frombuffer(chunk.read_bytes(), "<u8", 5).copy()
        words[word] = lie
        chunk.write_bytes(words.tobytes() + chunk.read_bytes()[40:])
        with pytest.raises(CorruptChunkError, match=r"chunk \(0,\).*gdeflate"):
            xgpuzarr.open_array(tmp_path / "a", device="cuda")[:]


@pytest.mark.gpu
def test_gdeflate_of_another_encoder(tmp_path: Path) -> None:
    """Pages of nvCOMP's CPU encoder, in the framing of zarrs."""
    i = np.arange(150_001, dtype="u8")
    expected = ((i * i // 7) % 23 + i // 4096).astype("u1")
    array = zarr.create_array(
        tmp_path / "a", shape=expected.shape, chunks=expected.shape, dtype="u1", compressors=GDeflateCodec()
    )
    array[0] = 1
    (tmp_path / "a" / "c" / "0").write_bytes((Path(__file__).parent / "data" / "gdeflate.bin").read_bytes())
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "a")[:], expected)
    np.testing.assert_array_equal(xgpuzarr.open_array(tmp_path / "a", device="cuda")[:].get(), expected)


@pytest.mark.parametrize("codec", [NvcompCodec("ans", "float16"), NvcompCodec("deflate", level=3), GDeflateCodec(9)])
def test_metadata_round_trip(codec: Any) -> None:
    document = json.loads(json.dumps(codec.to_dict()))
    assert type(codec).from_dict(document) == codec
    assert numcodecs.get_codec(NvcompBatch("LZ4").get_config()).algorithm == "lz4"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NvcompCodec("brotli"), "algorithm must be one of"),
        (lambda: NvcompCodec("ans", "float64"), "data_type must be one of"),
        (lambda: NvcompCodec("zstd", level=3), "level must be None"),
        (lambda: GDeflateCodec(13), "level must be 0 to 12"),
        (
            lambda: NvcompCodec.from_dict({"name": "nvcomp.ans", "configuration": {"x": 1}}),
            "parameter 'x' is not known",
        ),
        (
            lambda: GDeflateCodec.from_dict({"name": "gdeflate", "configuration": {"x": 1}}),
            "parameter 'x' is not known",
        ),
        (lambda: NvcompBatch("lz4", {"data_type": 1}).encode(b"abcd"), "options are taken when reading only"),
    ],
)
def test_unknown_parameters_raise(make: Any, text: str) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=text):
        make()


def test_an_array_of_an_unknown_parameter_does_not_open(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype="f4", compressors=NvcompCodec("ans"))
    document = json.loads((tmp_path / "a" / "zarr.json").read_text())
    document["codecs"][-1]["configuration"] = {"speed": 11}
    (tmp_path / "a" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(xgpuzarr.XGpuZarrError, match="parameter 'speed' is not known"):
        xgpuzarr.open_array(tmp_path / "a", device="cpu")
