"""Read Zarr stores into GPU memory, for xarray and dask.

`xarray.open_dataset(store, engine="gpuzarr")` opens a group, `open_array` one array, `from_zarr` one array as a dask
array. Importing this package loads neither CUDA nor any of its modules: each public name brings its own on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgpuzarr.array import ZarrArray, open_array
    from xgpuzarr.dask_arrays import from_zarr
    from xgpuzarr.errors import (
        ChunkReadError,
        CorruptChunkError,
        DeviceMemoryError,
        MetadataError,
        MissingDependencyError,
        UnsupportedError,
        XGpuZarrError,
    )
    from xgpuzarr.options import ReadOptions

    __version__: str

__all__ = [
    "ChunkReadError",
    "CorruptChunkError",
    "DeviceMemoryError",
    "MetadataError",
    "MissingDependencyError",
    "ReadOptions",
    "UnsupportedError",
    "XGpuZarrError",
    "ZarrArray",
    "__version__",
    "from_zarr",
    "open_array",
]

_MODULES = {"ReadOptions": "options", "ZarrArray": "array", "from_zarr": "dask_arrays", "open_array": "array"}
"""Module of each public name; the others are in `errors`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("xgpuzarr")
    elif name in __all__:
        value = getattr(import_module(f"xgpuzarr.{_MODULES.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'xgpuzarr' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
