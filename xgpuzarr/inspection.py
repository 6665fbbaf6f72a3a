"""What does a store hold, and where would each array be decoded?

1. Walk the store's keys, not its metadata: one broken array must not hide the others.
2. Open each array; what cannot be opened keeps its error as the reason.
3. Add the arrays that only the consolidated metadata names. In a store that lists nothing, these are all.
4. Take the codec chain and its route from the array's layout. No chunk is read and no device is needed.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.errors import BaseZarrError
from zarr.storage import LocalStore

from xgpuzarr.errors import ChunkReadError, UnsupportedError, XGpuZarrError, loaded_errors
from xgpuzarr.members import METADATA_ERRORS
from xgpuzarr.opening import as_store, open_zarr_array
from xgpuzarr.plan.layout import layout_of
from xgpuzarr.plan.read_plan import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zarr.abc.store import Store

    from xgpuzarr.opening import StoreLike

__all__ = ["ArrayEntry", "as_text", "inspect_store", "printable"]

MAX_DEPTH = 64
"""Deepest group looked into: links on a server, which do not show, must not be followed for ever."""

CLIENT_ERRORS = {
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "obstore.exceptions": ("BaseError",),
}
"""Errors of the clients of remote stores that are no OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayEntry:
    """One array of a store.

    Attributes
    ----------
    path
        Path in the store; "" for an array that is the store.
    zarr_format
        2 or 3; None, as everything below, if the array cannot be opened.
    shape, dtype
        Shape, in elements, and the name of the dtype.
    chunks, shards
        Shape of the smallest decodable unit, and of a shard; `shards` is None without sharding.
    codec_chain
        Codecs in the order of decoding; None if only zarr-python knows them.
    stored_nbytes
        Size in the store, in bytes, metadata included; None where the store cannot say.
    decoded_nbytes
        Size of the decoded array, in bytes; None for a dtype without a fixed width.
    route
        Where a machine with a device can decode its chunks: "device" or "host"; "" for an array that cannot be read.
        xarray's engine leaves coordinates on the host all the same.
    reason
        Why not on the device; "" if on the device.
    """

    path: str
    zarr_format: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    codec_chain: str | None = None
    stored_nbytes: int | None = None
    decoded_nbytes: int | None = None
    route: str = ""
    reason: str = ""


def inspect_store(store: StoreLike, *, storage_options: Mapping[str, Any] | None = None) -> list[ArrayEntry]:
    """List the arrays of a store, in the order of their paths. Only metadata is read.

    What cannot be opened is listed with the reason. A group that several links lead to is listed once.

    Parameters
    ----------
    store
        A folder, a `.zip` file, a URL, or a zarr-python store.
    storage_options
        Options of the file system behind a URL.

    Raises
    ------
    FileNotFoundError
        No group and no array is at `store`.
    MetadataError, UnsupportedError
        The store is one array, and it cannot be opened; no file system is known for its URL; or it is a group that
        neither can be listed nor has consolidated metadata.
    ChunkReadError
        The store's server cannot be asked.
    """
    with _client_errors(store):
        try:
            root = zarr.open_group(
                as_store(store),
                mode="r",
                use_consolidated=False,
                storage_options=None if storage_options is None else dict(storage_options),
            )
        except (BaseZarrError, ImportError, OSError, ValueError, TypeError) as error:
            if "Protocol not known" in str(error):
                raise UnsupportedError(
                    f"store {store}: no file system is known for such a URL; correct its protocol, or install the "
                    "fsspec package that has it"
                ) from error
            # One array, or nothing that can be opened, which its error explains.
            return [_entry_of(open_zarr_array(store, storage_options=storage_options))]
        problem, consolidated = _listing_problem(root), _consolidated_arrays(root)
        if problem and consolidated is None:
            raise UnsupportedError(
                f"store {store}: {problem}, and has no consolidated metadata that names its arrays; "
                f"give the path of one array, as in {store}/PATH"
            )
        found = {} if problem else sync(_array_paths(root.store, root.path))
        entries = {path: _entry(root.store, path, found[path]) for path in found}
        for array in consolidated or ():
            if array.path not in entries:
                entries[array.path] = _entry_of(array, can_list=not problem)
        return [entries[path] for path in sorted(entries)]


def as_text(store_name: str, entries: Sequence[ArrayEntry]) -> str:
    """Write entries as a tree for a terminal: a line a group, three lines an array, and the sums."""
    lines = [store_name]
    above: list[str] = []
    for entry in entries:
        *groups, name = entry.path.split("/")
        shared = next((i for i, pair in enumerate(zip(groups, above, strict=False)) if pair[0] != pair[1]), len(above))
        lines += [f"{'  ' * (depth + 1)}{group}/" for depth, group in enumerate(groups) if depth >= shared]
        lines += [f"{'  ' * (len(groups) + 1)}{line}" for line in _array_lines(entry, name)]
        above = groups
    on_device = sum(entry.route == "device" for entry in entries)
    sizes = [entry.stored_nbytes for entry in entries if entry.route]
    stored = "?" if None in sizes else format_nbytes(sum(filter(None, sizes)))
    decoded = format_nbytes(sum(entry.decoded_nbytes or 0 for entry in entries))
    routes = f"{on_device} can be decoded on the device"
    lines += ["", f"arrays: {len(entries)}, {routes}; {stored} stored, {decoded} decoded"]
    if on_device:
        lines.append('engine="gpuzarr" leaves coordinates, bounds and scalars on the host: see ds.gpuzarr.routes')
    return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """Text for a terminal, with control characters, which names in a store may hold, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _array_lines(entry: ArrayEntry, name: str) -> Iterator[str]:
    name = name or "(root)"
    if not entry.route:
        yield f"{name}  cannot be read"
        yield f"  {entry.reason}"
        return
    grid = f"chunks {entry.chunks}" + (f", shards {entry.shards}" if entry.shards else "")
    stored, decoded = ("?" if n is None else format_nbytes(n) for n in (entry.stored_nbytes, entry.decoded_nbytes))
    yield f"{name}  {entry.dtype} {entry.shape}, {grid}, Zarr v{entry.zarr_format}"
    yield f"  {entry.codec_chain or 'codecs of zarr-python'}; {stored} stored, {decoded} decoded"
    yield f"  decoded on the host: {entry.reason}" if entry.route == "host" else "  can be decoded on the device"


def _entry(store: Store, path: str, problem: str) -> ArrayEntry:
    if problem:
        return ArrayEntry(path=path, reason=problem)
    try:
        return _entry_of(open_zarr_array(store, path=path))
    except (XGpuZarrError, FileNotFoundError) as error:
        return ArrayEntry(path=path, reason=str(error))


def _entry_of(array: zarr.Array[Any], *, can_list: bool = True) -> ArrayEntry:
    facts = ArrayEntry(
        path=array.path,
        zarr_format=array.metadata.zarr_format,
        shape=array.shape,
        dtype=str(array.dtype),
        stored_nbytes=_stored_nbytes(array) if can_list else None,
    )
    try:
        layout = layout_of(array)
    except UnsupportedError as error:  # zarr-python reads it
        return replace(facts, route="host", reason=str(error))
    reasons = [*layout.codec_chain.reasons, *filter(None, [layout.host_result_reason])]
    return replace(
        facts,
        chunks=layout.chunk_shape,
        shards=layout.object_shape if layout.shard_levels else None,
        codec_chain=str(layout.codec_chain),
        decoded_nbytes=None if layout.dtype.kind in "OT" else layout.nbytes,
        route="host" if reasons else "device",
        reason="; ".join(reasons),
    )


def _stored_nbytes(array: zarr.Array[Any]) -> int | None:
    try:
        return int(array.nbytes_stored()) or None  # at least its metadata would be there
    except _listing_errors():
        return None


def _listing_problem(group: zarr.Group) -> str:
    """Why a group that was opened cannot be listed, as web servers often cannot; "" if it can."""

    async def lists() -> bool:
        return bool([name async for name in group.store.list_dir(group.path)])

    try:
        return "" if sync(lists()) else "it lists nothing"  # its own metadata would be there
    except _listing_errors() as error:
        return f"it cannot be listed ({_first_line(error)})"


def _consolidated_arrays(group: zarr.Group) -> list[zarr.Array[Any]] | None:
    """Arrays that the consolidated metadata of a group names; None if it has none that can be read."""
    try:
        opened = zarr.open_consolidated(group.store, path=group.path, mode="r", zarr_format=group.metadata.zarr_format)
    except METADATA_ERRORS:
        return None
    return [member for _, member in opened.members(max_depth=None) if isinstance(member, zarr.Array)]


async def _array_paths(store: Store, path: str) -> dict[str, str]:
    """Paths of all arrays at or below `path`, and of folders with something wrong, and what; "" for an array."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo, links = [path], list[str]()
    while todo or links:
        path = todo.pop() if todo else links.pop()  # links last: what they lead to has its own path, mostly
        prefix = f"{path}/" if path else ""
        folder = _real_folder(store, path)
        if not _exists(store, path):
            found[path] = f"a link to {folder!r}, which does not exist"
            continue
        try:
            names = {name async for name in store.list_dir(path)}
        except OSError as error:
            found[path] = f"the folder cannot be listed: {error.strerror or error}"
            continue
        kind = await _kind(store, f"{prefix}zarr.json") if "zarr.json" in names else ""
        if ".zarray" in names or kind == "array":
            found[path] = ""
            continue
        if folder in seen or path.count("/") >= MAX_DEPTH:
            continue
        seen.add(folder)
        if kind == "nothing":
            found[path] = "its zarr.json is not a file that can be read"
        for name in names - {"zarr.json"}:
            if not name.startswith("."):
                below = f"{prefix}{name}"
                (links if _is_link(store, below) else todo).append(below)
    return found


def _real_folder(store: Store, path: str) -> str:
    """Where a folder lies, whichever links lead to it; in other stores than local ones, its path."""
    return os.path.realpath(store.root / path) if isinstance(store, LocalStore) else path


def _is_link(store: Store, path: str) -> bool:
    return isinstance(store, LocalStore) and (store.root / path).is_symlink()


def _exists(store: Store, path: str) -> bool:
    """False for a link that leads nowhere."""
    return not isinstance(store, LocalStore) or os.path.lexists(_real_folder(store, path))


async def _kind(store: Store, key: str) -> str:
    """What a zarr.json says it is: "group", "array", or "nothing" if there is none to read."""
    document = await store.get(key, default_buffer_prototype())
    if document is None:
        return "nothing"
    try:
        return "group" if json.loads(document.to_bytes()).get("node_type") == "group" else "array"
    except (ValueError, AttributeError):
        return "array"  # so that its error is shown


@contextmanager
def _client_errors(store: StoreLike) -> Iterator[None]:
    """Make one error of what the client of a remote store raises."""
    try:
        yield
    except loaded_errors(CLIENT_ERRORS) as error:
        raise ChunkReadError(
            f"store {store}: {_first_line(error)}; look at its name, its credentials and the network, and see "
            "storage_options"
        ) from error


def _listing_errors() -> tuple[type[BaseException], ...]:
    """What a store raises that cannot list."""
    return (NotImplementedError, OSError, *loaded_errors(CLIENT_ERRORS))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
