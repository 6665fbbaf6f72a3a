"""Opening one Zarr array, with one clear error for everything that can be wrong with a store or its metadata."""

from __future__ import annotations

import errno
import os
import re
import zipfile
from contextlib import suppress
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numcodecs
import zarr
from zarr.abc.store import Store
from zarr.errors import BaseZarrError, NodeNotFoundError, NodeTypeValidationError
from zarr.storage import LocalStore, StorePath, ZipStore

from xgpuzarr.errors import (
    ChunkReadError,
    CorruptChunkError,
    MetadataError,
    MissingDependencyError,
    UnsupportedError,
    XGpuZarrError,
)
from xgpuzarr.plan.layout import chunk_codecs
from xgpuzarr.readers.host import LocalReader
from xgpuzarr.readers.store import StoreReader
from xgpuzarr.readers.zip import zip_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xgpuzarr.options import ReadOptions
    from xgpuzarr.readers.protocol import Reader

__all__ = ["StoreLike", "as_store", "open_zarr_array", "reader_for", "reopen_zarr_array"]

StoreLike = Store | StorePath | str | os.PathLike[str]

_INSTALL = {
    "zfpy": "pip install 'numcodecs[zfpy]'",
    "pcodec": "pip install 'numcodecs[pcodec]'",
    "crc32c": "pip install 'numcodecs[crc32c]'",
    "msgpack2": "pip install 'numcodecs[msgpack]'",
}
"""Codecs that numcodecs has only with one more package."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
"""How URLs begin. With two colons come fsspec's chains: "simplecache::/data/store.zarr"."""


def open_zarr_array(
    store: StoreLike,
    *,
    path: str = "",
    zarr_format: Literal[2, 3] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> zarr.Array[Any]:
    """Open an array read-only with zarr-python.

    Parameters
    ----------
    store
        A folder, a `.zip` file, a URL, or a zarr-python store.
    path
        Path of the array inside the store.
    zarr_format
        2 or 3; None tries both.
    storage_options
        Options of the file system behind a URL.

    Raises
    ------
    FileNotFoundError
        Nothing is at `store`, or no array at `path`; the message lists the arrays there are.
    MetadataError
        The metadata is not JSON, or contradicts itself or the specification.
    UnsupportedError
        A codec or a data type that no installed package knows.
    """
    name = f"array {path!r}" if path else "array"
    opened = as_store(store)
    try:
        array = zarr.open_array(
            store=opened,
            path=path,
            mode="r",
            zarr_format=zarr_format,
            storage_options=None if storage_options is None else dict(storage_options),
        )
        _make_codecs(array)
    except NodeNotFoundError as error:  # a FileNotFoundError too, of zarr-python's own
        raise _not_found(opened, str(store), path) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no Zarr store at {store!s}; give the folder, .zip file or URL of one") from error
    except JSONDecodeError as error:
        raise MetadataError(f"store {store!s}, {name}: metadata is not valid JSON ({error})") from error
    except ImportError as error:
        raise MissingDependencyError(f"store {store!s}: {error}") from error
    except (BaseZarrError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise _explained(error, opened, str(store), path, name) from error
    except BaseException as error:  # of the store's client: it stays what it is, and gains the place
        if isinstance(opened, ZipStore) and _tells_of_a_damaged_zip(error):
            raise MetadataError(f"store {store!s}: the zip file is damaged ({error})") from error
        error.add_note(f"while reading the metadata of {name} of store {store!s}")
        raise
    return array


def reopen_zarr_array(
    store: StoreLike, path: str, zarr_format: Literal[2, 3], is_the_same: Callable[[zarr.Array[Any]], bool]
) -> zarr.Array[Any]:
    """Open an array that was opened by the consolidated metadata of a group: its own may be missing, or differ.

    Parameters
    ----------
    store, path, zarr_format
        As in `open_zarr_array`.
    is_the_same
        Whether an opened array has the metadata that it had then.

    Returns
    -------
    zarr.Array
        By the array's own metadata if that is the same, for it is the smallest to read; else by that of the nearest
        group above which is; else by its own.

    Raises
    ------
    FileNotFoundError, MetadataError, UnsupportedError
        As `open_zarr_array`.
    """
    with suppress(FileNotFoundError, XGpuZarrError):
        own = open_zarr_array(store, path=path, zarr_format=zarr_format)
        if is_the_same(own):
            return own
    names = path.split("/")
    for depth in reversed(range(len(names))):
        # the group, its consolidated metadata, or the array in it is missing, or none that can be opened
        with suppress(FileNotFoundError, ValueError, KeyError, ImportError):
            group = zarr.open_consolidated(
                as_store(store), path="/".join(names[:depth]), mode="r", zarr_format=zarr_format
            )
            found = group["/".join(names[depth:])]
            if isinstance(found, zarr.Array) and is_the_same(found):
                return found
    return open_zarr_array(store, path=path, zarr_format=zarr_format)


def reader_for(array: zarr.Array[Any], options: ReadOptions) -> Reader:
    """Reader of an array's store: local files are read directly, everything else through its zarr-python store."""
    store = array.store
    if type(store) is LocalStore:
        return LocalReader(Path(store.root))
    if type(store) is ZipStore and store.path is not None and store.read_only:
        try:
            reader = zip_reader(store)
        except OSError as error:
            raise ChunkReadError(f"store '{store.path}': {error.strerror}; was it moved?") from error
        except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
            raise CorruptChunkError(f"store '{store.path}': it was damaged after it was opened ({error})") from error
        if reader is not None:
            return reader
    return StoreReader(store, options)


def as_store(store: StoreLike) -> Any:
    """Give zarr-python what it does not open by itself: `.zip` files."""
    if isinstance(store, (str, os.PathLike)) and not _URL.match(os.fspath(store)):
        file = Path(store)
        if file.is_file():
            if zipfile.is_zipfile(file):
                return ZipStore(file.absolute(), mode="r")
            raise FileNotFoundError(f"{store!s} is a file and not a Zarr store; give the folder or .zip file of one")
        return file.absolute()  # a handle of it means the same in a worker with another working directory
    return store


def _make_codecs(array: zarr.Array[Any]) -> None:
    """Make every numcodecs codec of a v3 array now: zarr-python finds out that one is missing when a chunk is read."""
    if array.metadata.zarr_format == 3:
        for codec in chunk_codecs(array):
            if (name := codec.to_dict()["name"]).startswith("numcodecs."):
                numcodecs.get_codec({"id": name.removeprefix("numcodecs."), **codec.to_dict()["configuration"]})


def _tells_of_a_damaged_zip(error: BaseException) -> bool:
    """Whether this is what zipfile raises for a broken directory: a seek to where no file can be, for one."""
    is_newer = type(error) is NotImplementedError  # "zip file version 23.5"
    return isinstance(error, zipfile.BadZipFile) or is_newer or getattr(error, "errno", None) == errno.EINVAL


def _explained(error: Exception, store: Any, store_name: str, path: str, name: str) -> Exception:
    """The error of ours that says what zarr-python's means."""
    kind = type(error).__name__
    if isinstance(error, NodeTypeValidationError):
        return _not_found(store, store_name, path)
    if kind == "UnknownCodecError":
        named = re.search(r"'([\w.-]+)'", str(error))
        codec = getattr(error, "codec_id", None) or (named[1] if named else "?")
        codec = codec.strip("'")
        short = codec.removeprefix("numcodecs.")
        way_out = _INSTALL.get(short, "install the package that registers it with zarr-python")
        return UnsupportedError(f"store {store_name}, {name}: codec {codec!r} has no decoder; {way_out}")
    if "No Zarr data type found" in str(error):
        return UnsupportedError(f"store {store_name}, {name}: zarr-python knows no such data type ({error})")
    return MetadataError(f"store {store_name}, {name}: invalid metadata ({kind}: {error})")


def _not_found(store: Any, store_name: str, path: str) -> FileNotFoundError:
    found = _array_paths(store)
    hint = f"arrays there: {', '.join(map(repr, found))}" if found else "no array is there"
    return FileNotFoundError(f"store {store_name}: no array at path {path!r}; {hint}")


def _array_paths(store: Any, most: int = 8) -> list[str]:
    """Paths of the first arrays of a store, for a message; empty when the store has no readable root group."""
    try:
        group = zarr.open_group(store, mode="r")
        found = []
        for path, node in group.members(max_depth=3):
            if isinstance(node, zarr.Array):
                found.append(path)
            if len(found) == most:
                break
    except (BaseZarrError, ValueError, KeyError, TypeError, OSError):
        return []  # the message is about something else; it goes out without the list
    return found
