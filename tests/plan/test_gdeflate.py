"""Headers of zarrs' gdeflate chunks: page tables, and every way in which they can lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xgpuzarr.plan import gdeflate
from xgpuzarr.plan.frames import Problem

CHUNK = (Path(__file__).parents[1] / "data" / "gdeflate.bin").read_bytes()  # of nvCOMP's CPU encoder
DECODED_NBYTES = 150_001


def header() -> np.ndarray:
    return np.frombuffer(CHUNK, "<u8", 5).astype("u8")[None].copy()


def problem(words: np.ndarray, nbytes: int = len(CHUNK), decoded_nbytes: int = DECODED_NBYTES) -> Problem:
    return Problem(int(gdeflate.check_headers(words, np.array([nbytes]), decoded_nbytes)[0]))


@pytest.mark.parametrize(("decoded_nbytes", "pages"), [(1, 1), (65536, 1), (65537, 2), (DECODED_NBYTES, 3)])
def test_pages(decoded_nbytes: int, pages: int) -> None:
    assert gdeflate.n_pages(decoded_nbytes) == pages
    assert gdeflate.header_nbytes(decoded_nbytes) == 16 + 8 * pages


def test_a_sound_chunk() -> None:
    assert problem(header()) is Problem.NONE
    assert gdeflate.page_offsets(header(), DECODED_NBYTES).tolist() == [[40, 40 + 1684, 40 + 1684 + 1672]]


@pytest.mark.parametrize("lie", [0, 7, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("word", range(5))
def test_lies(word: int, lie: int) -> None:
    words = header()
    words[0, word] = lie
    assert problem(words) is (Problem.SIZE if word == 0 else Problem.HEADER)


def test_cut_short() -> None:
    assert problem(header(), nbytes=39) is Problem.TOO_SHORT
    assert problem(header(), nbytes=len(CHUNK) - 1) is Problem.HEADER
