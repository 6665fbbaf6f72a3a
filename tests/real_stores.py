"""Where the corpus of real stores is, and how each of its arrays is opened as a zarr-python store."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, ZipStore

if TYPE_CHECKING:
    from types import ModuleType

    from zarr.abc.store import Store

FOLDER = Path(os.environ.get("XGPUZARR_CORPUS", Path(__file__).parents[2] / "shared" / "corpus"))


@functools.cache
def corpus() -> ModuleType | None:
    """The corpus' own module, `corpus.py`; None where there is no corpus."""
    if not (FOLDER / "corpus.py").is_file():
        return None
    spec = importlib.util.spec_from_file_location("corpus", FOLDER / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(*, readable: bool) -> list[Any]:
    """One parameter an array that zarr-python reads (or does not); without a corpus, one that is skipped."""
    module = corpus()
    if module is None:
        reason = f"no corpus of real stores at {FOLDER}; name its folder in XGPUZARR_CORPUS"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    found = [record for record in module.arrays() if record["zarr_python"]["ok"] is readable]
    return [pytest.param(record, id=record["id"]) for record in found]


def digest(values: Any) -> str:
    """The corpus' sha256 of decoded values, on the host or the device."""
    return corpus().array_digest(values)


def place(record: dict[str, Any]) -> tuple[Store, str]:
    """Store and path of a record's array."""
    if record["store_kind"] == "zip":
        return ZipStore(FOLDER / record["zip"], mode="r"), record.get("key") or ""
    if record["store_kind"] == "icechunk":
        icechunk = pytest.importorskip("icechunk")
        repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(FOLDER / record["icechunk"])))
        return repository.readonly_session(branch=record["branch"]).store, record["key"]
    return LocalStore(FOLDER / record["array_dir"], read_only=True), ""


def copy_into_group(record: dict[str, Any], folder: Path) -> str:
    """Copy a record's array to a new group at `folder`, as the array "v" with dimensions d0, d1, ...; give its path."""
    store, path = place(record)
    objects = sync(_objects(store, f"{path}/" if path else ""))
    dims = [f"d{axis}" for axis in range(len(record["shape"]))]
    if record["zarr_format"] == 2:
        group = {".zgroup": {"zarr_format": 2}}
        objects["v/.zattrs"] = _json(json.loads(objects.get("v/.zattrs", b"{}")) | {"_ARRAY_DIMENSIONS": dims})
        objects.pop("v/zarr.json", None)
    else:
        group = {"zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": {}}}
        objects["v/zarr.json"] = _json(json.loads(objects["v/zarr.json"]) | {"dimension_names": dims})
        for name in (".zarray", ".zattrs"):
            objects.pop(f"v/{name}", None)
    for key, value in (objects | {name: _json(document) for name, document in group.items()}).items():
        file = folder / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
    return str(folder)


async def _objects(store: Store, prefix: str) -> dict[str, bytes]:
    prototype = default_buffer_prototype()
    return {
        f"v/{key.removeprefix(prefix)}": (await store.get(key, prototype)).to_bytes()
        async for key in store.list_prefix(prefix)
        if not key.endswith("/")  # zip files list folders too
    }


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()
