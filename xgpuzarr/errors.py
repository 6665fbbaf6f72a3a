"""Every error xgpuzarr raises, as one tree.

::

    XGpuZarrError
    |- UnsupportedError        (NotImplementedError)  the store is valid; we, or this machine, cannot read it
    |- MetadataError           (ValueError)           the metadata contradicts itself or the Zarr specification
    |- CorruptChunkError       (ValueError)           stored bytes do not decode to what the metadata promises
    |- ChunkReadError          (OSError)              stored bytes could not be read at all
    |- DeviceMemoryError       (MemoryError)          the block does not fit the device, even in the smallest batches
    `- MissingDependencyError  (ImportError)          an optional package is needed and absent

Each is also the builtin error in brackets, so code that knows nothing of xgpuzarr can catch it. Messages are
lower case: subject, rule, the value met with its unit; then the way out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ChunkReadError",
    "CorruptChunkError",
    "DeviceMemoryError",
    "MetadataError",
    "MissingDependencyError",
    "UnsupportedError",
    "XGpuZarrError",
    "chunk_label",
    "loaded_errors",
]


class XGpuZarrError(Exception):
    """Base of every error raised by xgpuzarr."""


class UnsupportedError(XGpuZarrError, NotImplementedError):
    """A valid store uses something that cannot be read here; the message says what would."""


class MetadataError(XGpuZarrError, ValueError):
    """Array metadata that contradicts itself or the Zarr specification."""


class CorruptChunkError(XGpuZarrError, ValueError):
    """Stored bytes that do not decode to what the metadata promises."""


class ChunkReadError(XGpuZarrError, OSError):
    """Stored bytes that could not be read: permission, a directory in place of an object, a failed request."""


class DeviceMemoryError(XGpuZarrError, MemoryError):
    """Device memory ran out although the read was split as far as it can be."""


class MissingDependencyError(XGpuZarrError, ImportError):
    """An optional package is needed; the message holds the install line."""


def chunk_label(
    array: str, chunk: tuple[int, ...], key: str, store: str, offset: int = 0, nbytes: int | None = None
) -> str:
    """Name one chunk the way every message does.

    Parameters
    ----------
    array
        Path of the array in its store; "" is the root array.
    chunk
        Chunk coordinates in the array's chunk grid.
    key
        Key of the stored object.
    store
        Name of the store.
    offset, nbytes
        Byte range inside the object; ``nbytes=None`` means the whole object.

    Examples
    --------
    >>> chunk_label("t2m", (3, 0, 1), "t2m/c/3/0/1", "era5.zarr", 0, 16)
    "array 't2m', chunk (3, 0, 1) (key 't2m/c/3/0/1' of store 'era5.zarr', bytes 0:16)"
    """
    span = "" if nbytes is None else f", bytes {offset}:{offset + nbytes}"
    return f"array {array!r}, chunk {chunk} (key {key!r} of store {store!r}{span})"


def loaded_errors(names: Mapping[str, tuple[str, ...]]) -> tuple[type[BaseException], ...]:
    """Classes of errors, by module and name, of the modules that are loaded: the others have raised nothing."""
    return tuple(
        getattr(sys.modules[module], name) for module in names if module in sys.modules for name in names[module]
    )
