"""What is known of an array once it is open, in the process that opened it and in those that a handle reaches.

A handle names a place and a digest. The array is opened again at the first use, once a process and whenever a local
folder's metadata was written, and must have the metadata that it had: its own, or that of a group above it if the array
was opened by that.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zarr.storage import FsspecStore, LocalStore, ObjectStore, ZipStore

from xgpuzarr.errors import UnsupportedError, XGpuZarrError
from xgpuzarr.opening import open_zarr_array, reader_for, reopen_zarr_array
from xgpuzarr.options import ReadOptions
from xgpuzarr.plan.layout import ArrayLayout, layout_of
from xgpuzarr.store_token import metadata_documents, store_token

if TYPE_CHECKING:
    import zarr

__all__ = ["OpenedArray", "open_once"]

MAX_OPENED = 256
"""Most arrays of local folders that a process keeps open for handles. They hold metadata, and no files."""

MAX_OPENED_ON_SERVERS = 16
"""Most arrays behind servers that it keeps open, with their clients."""


@dataclass(frozen=True)
class OpenedArray:
    """What opening an array found.

    Attributes
    ----------
    array
        The array, opened by zarr-python.
    layout
        What plans are made from; None for an array that zarr-python reads.
    layout_reason
        Why there is no layout; "" where there is one.
    place
        What another process opens: the path of a local folder, or the store.
    digest
        Digest of the metadata that decides how the array is read, its shape left out.
    token
        Names the array as it was when it was opened (`xgpuzarr.store_token`).
    is_consolidated
        Whether its metadata came from the consolidated metadata of a group.
    """

    array: zarr.Array[Any]
    layout: ArrayLayout | None
    layout_reason: str
    place: Any
    digest: str
    token: str
    is_consolidated: bool

    @classmethod
    def of(cls, array: zarr.Array[Any], token: str = "", *, is_consolidated: bool) -> OpenedArray:
        """Describe an open array; without a `token`, as a new opening of it."""
        layout, reason = None, ""
        if type(array.store) is ZipStore:
            reader_for(array, ReadOptions())  # of the file as it is now
        try:
            layout = layout_of(array)
        except UnsupportedError as error:
            reason = str(error)
        store = array.store
        place = str(Path(store.root).absolute()) if type(store) is LocalStore else store
        token = token or store_token(store, array.path, json.dumps(_document(array), sort_keys=True, default=str))
        return cls(array, layout, reason, place, _digest(array), token, is_consolidated)


def _document(array: zarr.Array[Any]) -> dict[str, Any]:
    """What of an array's metadata decides how it is read."""
    document = array.metadata.to_dict()
    for name in ("attributes", "dimension_names"):
        document.pop(name, None)
    return document


def _digest(array: zarr.Array[Any]) -> str:
    """Digest of all that but the shape: an array that has grown is still read by the same rules."""
    text = json.dumps({**_document(array), "shape": ()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_of_folders: dict[str, tuple[OpenedArray, dict[str, tuple[int, int]]]] = {}
"""Arrays of local folders, each with the state that its metadata documents had; every task has a handle of its own."""

_of_stores: weakref.WeakValueDictionary[str, OpenedArray] = weakref.WeakValueDictionary()
"""Arrays of all other stores. Their files close, and their memory is freed, with the last handle."""

_of_servers: deque[OpenedArray] = deque(maxlen=MAX_OPENED_ON_SERVERS)
"""The last of those that are opened by requests: tasks that follow one another would each make them again."""


def open_once(
    token: str,
    digest: str,
    *,
    place: Any,
    path: str,
    shape: tuple[int, ...],
    zarr_format: Literal[2, 3],
    is_consolidated: bool,
) -> OpenedArray:
    """Open the array of a handle once a process, however many tasks carry the handle.

    A local folder is opened again when its metadata documents have been written.

    Parameters
    ----------
    token, digest, place, is_consolidated
        As in the `OpenedArray` that the handle was made from.
    path, shape, zarr_format
        Of the array then; one that has grown since is read as it was.

    Raises
    ------
    FileNotFoundError, MetadataError, UnsupportedError
        As `open_zarr_array`.
    XGpuZarrError
        The metadata has changed.
    """

    def open_again() -> OpenedArray:
        if is_consolidated:
            array = reopen_zarr_array(place, path, zarr_format, lambda array: _digest(array) == digest)
        else:
            array = open_zarr_array(place, path=path, zarr_format=zarr_format)
        return OpenedArray.of(_as_it_was(array, digest, shape), token, is_consolidated=is_consolidated)

    if not isinstance(place, str):
        opened = _of_stores.get(token)
        if opened is None:
            opened = _of_stores[token] = open_again()
            if isinstance(place, (FsspecStore, ObjectStore)):
                _of_servers.append(opened)
        return opened
    opened, state = _of_folders.get(token, (None, {}))
    if opened is None or not _is_unchanged(state):
        state = {str(document): _state(document) for document in metadata_documents(Path(place), path)}
        opened = open_again()
        while len(_of_folders) >= MAX_OPENED:
            _of_folders.pop(next(iter(_of_folders)), None)
        _of_folders[token] = opened, state
    return opened


def _is_unchanged(documents: dict[str, tuple[int, int]]) -> bool:
    try:
        return all(_state(document) == state for document, state in documents.items())
    except OSError:
        return False


def _state(document: str | Path) -> tuple[int, int]:
    """Time and place of a file's bytes: a new file of the same name may be written within one tick of the clock."""
    status = os.stat(document)  # noqa: PTH116  # in every task; Path.stat takes as long again
    return status.st_mtime_ns, status.st_ino


def _as_it_was(array: zarr.Array[Any], digest: str, shape: tuple[int, ...]) -> zarr.Array[Any]:
    """Give an array that was opened again the shape that it had, if it has grown; any other change is an error."""
    if _digest(array) != digest or any(now < then for now, then in zip(array.shape, shape, strict=True)):
        raise XGpuZarrError(
            f"array {array.path!r} of store {str(array.store).removeprefix('file://')}: its metadata changed after "
            "this handle was made; open it again"
        )
    if array.shape == shape:
        return array
    return type(array).from_dict(array.store_path, {**array.metadata.to_dict(), "shape": shape})
