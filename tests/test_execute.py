"""Host reads equal zarr-python's, for every chain that is decoded here; damage gives one error that names the chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import xgpuzarr
from tests.codec_cases import CASES, DAMAGE, damage
from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.options import ReadOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
]


@pytest.mark.parametrize("name", CASES)
def test_reads_as_zarr_python(tmp_path: Path, name: str) -> None:
    expected = CASES[name].write(tmp_path / "a")
    array = xgpuzarr.open_array(tmp_path / "a", device="cpu")
    assert array.layout is not None
    assert array.layout.codec_chain.route == CASES[name].route
    assert bool(array.layout.codec_chain.reasons) == (CASES[name].route == "host")
    for key in (..., np.s_[3], np.s_[::-2, 4:9, 11], np.s_[[0, 10, 5], :, 23]):
        got = array[key]
        assert got.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, expected[key], err_msg=str(key))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_the_chunk(tmp_path: Path, name: str) -> None:
    case, at, text = DAMAGE[name]
    CASES[case].write(tmp_path / "a")
    damage(tmp_path / "a", at)
    with pytest.raises(CorruptChunkError, match=rf"chunk \(0, 0, 0\).*({text})"):
        xgpuzarr.open_array(tmp_path / "a", device="cpu")[:]


def test_a_chunk_without_room_for_its_checksum(tmp_path: Path) -> None:
    CASES["v3-crc32c"].write(tmp_path / "a")
    (tmp_path / "a" / "c" / "0" / "0" / "0").write_bytes(b"abc")
    with pytest.raises(CorruptChunkError, match="3 bytes have no room for a checksum"):
        xgpuzarr.open_array(tmp_path / "a", device="cpu")[:]


def test_the_environment_names_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReadOptions().route == "auto"
    monkeypatch.setenv("XGPUZARR_ROUTE", "host")
    assert ReadOptions().route == "host"
    assert ReadOptions(route="device").route == "device"
    monkeypatch.setenv("XGPUZARR_ROUTE", "gpu")
    with pytest.raises(ValueError, match="route must be 'auto', 'device' or 'host', got 'gpu'"):
        ReadOptions()
