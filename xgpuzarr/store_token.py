"""What tells one store from another in the names of dask arrays?

dask takes equal names for equal data, and then reads one of two arrays for both. So a token covers all that decides
what a store reads, among it the options of file systems and clients; it is a digest, and shows no password. A store
that can change unseen, or that nothing is known of, gets a token that never comes again, as dask gives its objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import weakref
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarr.storage import FsspecStore, LocalStore, ObjectStore, ZipStore

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["metadata_documents", "store_token"]

METADATA_KEYS = ("zarr.json", ".zarray", ".zmetadata")

CHANGING = {"memory", "filecache", "blockcache", "simplecache", "cached"}
"""Protocols of fsspec behind which bytes may change without any option or file of ours telling."""

ENVIRONMENT = ("AWS_", "AZURE_", "FSSPEC_", "GCSFS_", "GOOGLE_", "S3_")
"""Starts of the names of variables from which clients take endpoints and accounts."""


def store_token(store: Store, path: str, metadata: Any) -> str:
    """Token of one array of a store, as it is now.

    It changes with `metadata`, and with the modification times of local files: those that hold metadata of
    the array and of groups above it, zip files, and files of references. Whether remote objects have been written anew
    is not asked.

    Parameters
    ----------
    store
        An open store.
    path
        Path of the array.
    metadata
        The array's metadata, as JSON has it.

    Returns
    -------
    str
        32 hexadecimal digits; the same in every process where all of the store's state is known, else never the same.
    """
    try:
        state = json.dumps([_store_state(store, path), path, metadata], sort_keys=True, default=_state)
    except TypeError:
        state = uuid.uuid4().hex
    return hashlib.sha256(state.encode()).hexdigest()[:32]


def _store_state(store: Any, path: str) -> list[Any]:
    """All that decides what a store reads; a TypeError where that is not known."""
    if type(store) is LocalStore:
        return ["local", _folder_state(store.root, path)]
    if type(store) is ZipStore and store.path is not None and store.read_only:
        return ["zip", _file_state(store.path)]
    if type(store) is FsspecStore:
        local = _folder_state(store.path, path) if "file" in _protocols(store.fs) else []
        return ["fsspec", store.fs, store.path, local, _environment()]
    if type(store) is ObjectStore:
        return ["obstore", *_obstore_state(store.store, path), _environment()]
    session = getattr(store, "session", None)
    if type(store).__module__ == "icechunk.store" and session is not None and session.read_only:
        return ["icechunk", session.snapshot_id]  # a random number, and what it names is never written again
    raise TypeError(f"no token for {type(store)}")


def _environment() -> list[tuple[str, str]]:
    return sorted(item for item in os.environ.items() if item[0].upper().startswith(ENVIRONMENT))


def _folder_state(root: Any, path: str) -> list[Any]:
    """Place of a local store, and when the metadata of one of its arrays was last written."""
    folder = Path(root).resolve()  # a link may lead elsewhere next time
    return [str(folder), [document.stat().st_mtime_ns for document in metadata_documents(folder, path)]]


def metadata_documents(folder: Path, path: str) -> list[Path]:
    """Files of a local store that hold metadata of the array at `path`, or of groups above it."""
    nodes = (Path(path), *Path(path).parents) if path else (Path(),)
    documents = (folder / node / name for node in nodes for name in METADATA_KEYS)
    return [document for document in documents if document.exists()]


def _file_state(file: Any) -> list[Any]:
    status = Path(file).stat()
    return [str(Path(file).absolute()), status.st_mtime_ns, status.st_size]


def _obstore_state(client: Any, path: str) -> list[Any]:
    kind = type(client).__name__
    if not hasattr(client, "__getnewargs_ex__"):  # in memory
        raise TypeError(f"no token for {kind}")
    arguments, options = client.__getnewargs_ex__()
    local = _folder_state(client.prefix, path) if kind == "LocalStore" and client.prefix is not None else []
    return [kind, arguments, options, local]


def _state(value: Any) -> Any:
    """What JSON can hold of an option of a store; a TypeError where that is not all of it."""
    if isinstance(value, (Path, timedelta)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "storage_options"):  # of fsspec, which makes a file system anew from nothing else
        return _file_system_digest(value)
    raise TypeError(f"no token for {type(value)}")


_digests: dict[int, tuple[weakref.ref[Any], str]] = {}


def _file_system_digest(file_system: Any) -> str:
    """Digest of the state of a file system, made once: a table of references may have a million rows.

    Found by identity, for fsspec takes two file systems over one file for equal, whatever it held when they opened it.
    """
    key = id(file_system)
    if key not in _digests:
        state = json.dumps(_file_system_state(file_system), sort_keys=True, default=_state)
        forget = weakref.ref(file_system, lambda _: _digests.pop(key, None))
        _digests[key] = forget, hashlib.sha256(state.encode()).hexdigest()
    return _digests[key][1]


def _file_system_state(file_system: Any) -> list[Any]:
    arguments, options = file_system.storage_args, file_system.storage_options
    if CHANGING & {*_protocols(file_system), options.get("target_protocol"), options.get("remote_protocol")}:
        raise TypeError("no token for memory and caches")
    files = [file.removeprefix("file://") for file in (*arguments, options.get("fo")) if isinstance(file, str)]
    local = [_file_state(file) for file in files if os.path.exists(file)]  # noqa: PTH110  # of any length
    return [f"{type(file_system).__module__}.{type(file_system).__qualname__}", arguments, options, local]


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
