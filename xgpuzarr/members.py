"""Which members of a group can be opened, and what is wrong with the others?

zarr-python opens all members of a group or none, and names none in its errors. These functions open them one by one
after that has failed, so that an array with bad metadata has a name, and can be left out.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import zarr
from zarr.core.sync import sync
from zarr.errors import NodeNotFoundError

from xgpuzarr.errors import UnsupportedError, XGpuZarrError
from xgpuzarr.opening import open_zarr_array

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Mapping

__all__ = ["naming_bad_arrays", "openable_members", "without_endless"]

METADATA_ERRORS = (ValueError, TypeError, KeyError, ImportError, OverflowError)
"""What zarr-python raises for metadata that it cannot take; most of its own errors are ValueErrors."""


def openable_members(group: zarr.Group, dropped: Container[Hashable]) -> dict[str, Any]:
    """Open the arrays and groups of a group, leaving out those of `dropped` that cannot be opened.

    Raises
    ------
    MetadataError, UnsupportedError, MissingDependencyError
        Another array cannot be opened: its name, why, and the ways out.
    """
    members = {}
    for name in _child_names(group):
        try:
            members[name] = group[name]
        except METADATA_ERRORS as error:
            is_node = not (isinstance(error, KeyError) and error.args == (name,))
            if is_node and name not in dropped:
                _raise_named(group, name)
                raise
    return members


def without_endless(members: Mapping[str, Any], dropped: Container[Hashable]) -> dict[str, Any]:
    """Leave out those of `dropped` that are longer than Python's and xarray's indexes reach.

    Raises
    ------
    UnsupportedError
        Another array is: its name, and the ways out.
    """
    endless = [name for name, member in members.items() if max(getattr(member, "shape", ()), default=0) > sys.maxsize]
    for name in endless:
        if name not in dropped:
            raise UnsupportedError(
                f"array {members[name].path!r} has shape {members[name].shape}, and xarray indexes no axis longer than "
                f"{sys.maxsize}; pass drop_variables=[{name!r}], or open it with xgpuzarr.open_array"
            )
    return {name: member for name, member in members.items() if name not in endless}


@contextmanager
def naming_bad_arrays(store: Any, path: str | None, storage_options: Mapping[str, Any] | None) -> Iterator[None]:
    """Raise an error that names the array, where zarr-python fails at one below the group at `path`."""
    try:
        yield
    except NodeNotFoundError:
        raise
    except METADATA_ERRORS:
        options = None if storage_options is None else dict(storage_options)
        with suppress(NodeNotFoundError):  # then it was about the group
            _walk(zarr.open_group(store, mode="r", path=path or "", use_consolidated=False, storage_options=options))
        raise


def _walk(group: zarr.Group) -> None:
    for member in openable_members(group, ()).values():
        if isinstance(member, zarr.Group):
            _walk(member)


def _raise_named(group: zarr.Group, name: str) -> None:
    path = f"{group.path}/{name}".strip("/")
    try:
        open_zarr_array(group.store, path=path)
    except XGpuZarrError as error:
        way_out = f"pass drop_variables=[{name!r}] and consolidated=False, or ask for another group"
        error.add_note(f"to open the rest, {way_out}")
        raise


def _child_names(group: zarr.Group) -> list[str]:
    async def listed() -> list[str]:
        return [key.strip("/").split("/")[-1] async for key in group.store.list_dir(group.path)]

    names: list[str] = sync(listed())
    return sorted(name for name in names if name not in ("zarr.json", ".zgroup", ".zattrs", ".zmetadata", ".zarray"))
