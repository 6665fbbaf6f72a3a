"""What a store that changes under an open array gives."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from xgpuzarr import ChunkReadError, XGpuZarrError, open_array

if TYPE_CHECKING:
    from pathlib import Path

    from xgpuzarr.array import ZarrArray


@pytest.fixture
def zipped(tmp_path: Path) -> tuple[Path, ZarrArray]:
    store = MemoryStore()
    zarr.create_array(store, data=np.arange(1000.0), chunks=(100,))
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        for key, content in store._store_dict.items():
            archive.writestr(key, content.to_bytes())
    return tmp_path / "t.zip", open_array(tmp_path / "t.zip", device="cpu")


def test_a_zip_file_removed_after_it_was_opened(zipped: tuple[Path, ZarrArray]) -> None:
    path, array = zipped
    path.unlink()
    with pytest.raises(ChunkReadError, match=rf"store '{path}': No such file or directory; was it moved\?"):
        array[:]


@pytest.mark.parametrize("content", [b"", b"x" * 1000, b"PK\3\4junk", "half"])
def test_a_zip_file_damaged_after_it_was_opened(zipped: tuple[Path, ZarrArray], content: bytes | str) -> None:
    path, array = zipped
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(ChunkReadError, match=rf"store '{path}': it was written anew since it was opened"):
        array[:]


@pytest.mark.parametrize("at", range(0, 120, 3))
def test_whatever_is_wrong_with_a_zip_files_directory_is_an_error_of_this_package(
    zipped: tuple[Path, ZarrArray], at: int
) -> None:
    path, _ = zipped
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) - 120 + at] ^= 0xFF
    path.write_bytes(damaged)
    with suppress(XGpuZarrError, FileNotFoundError):
        open_array(path, device="cpu")[:]
