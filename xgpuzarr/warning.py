"""Warnings that belong to the line of the user's that led to them."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

__all__ = ["warn"]

PASSING_ON = ("xgpuzarr", "xarray", "dask")
"""Packages whose code only hands on what somebody else has asked for."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning that points to the innermost line outside this package, xarray and dask."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in PASSING_ON)
    folders = tuple(str(Path(file).parent) + os.sep for file in files if file)
    warnings.warn(message, category, stacklevel=2, skip_file_prefixes=folders)
