"""Reports say what a read did, and reach whoever collects, on any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

import xgpuzarr
from xgpuzarr.diagnostics import ReadReport, collect, total

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shards", [None, (20,)])
@pytest.mark.parametrize("compressor", [None, ZstdCodec()])
def test_a_read_is_reported(tmp_path: Path, device: str, shards: tuple[int, ...] | None, compressor: object) -> None:
    path = tmp_path / "a"
    array = zarr.create_array(path, shape=(40,), chunks=(10,), shards=shards, dtype="f4", compressors=compressor)
    array[:10] = 1
    array[30:] = 2
    with collect() as reports:
        xgpuzarr.open_array(path, device=device)[5:]
    (report,) = reports
    assert (report.n_chunks, report.n_missing, report.out_nbytes) == (4, 2, 140)
    assert report.route == ("device" if device == "cuda" else "host")
    if compressor is None:
        assert report.encoded_nbytes == 80
    else:
        assert 0 < report.encoded_nbytes < 80
    assert report.total_s > 0


def test_reports_of_other_threads_are_collected(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=(4,), dtype="f4")[:] = 1
    opened = xgpuzarr.open_array(tmp_path / "a", device="cpu")
    with collect() as reports, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: opened[:], range(3)))
    opened[:]
    assert len(reports) == 3


def test_totals_add_up() -> None:
    reports = [
        ReadReport(array="t", route="device", n_chunks=3, encoded_nbytes=10, total_s=0.5),
        ReadReport(array="u", route="device", n_chunks=4, encoded_nbytes=20, total_s=0.25),
    ]
    both = total(reports)
    assert (both.array, both.route, both.n_reads) == ("t, u", "device", 2)
    assert (both.n_chunks, both.encoded_nbytes, both.total_s) == (7, 30, 0.75)
    assert total([]).n_reads == 0


def test_collectors_do_not_mix() -> None:
    with collect() as outer, collect() as inner:
        assert outer is not inner
    assert np.array_equal(outer, inner)
