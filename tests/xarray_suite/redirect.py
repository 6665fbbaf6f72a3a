"""How do xarray's own Zarr tests come to read through another engine?

xarray's test modules are imported from the installed package, unchanged. While they run, every opening function of
xarray that resolves to `engine="zarr"` is sent to `engine="gpuzarr", device="cpu"`; writing stays xarray's own.
`XGPUZARR_SUITE_ENGINE=zarr` leaves everything as it is: that run is the baseline.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import zarr
from _pytest.fixtures import FixtureFunctionDefinition
from xarray.backends import api, plugins
from zarr.core.indexing import AsyncOIndex, AsyncVIndex

from xgpuzarr import ReadOptions
from xgpuzarr.xarray_backend import GpuZarrBackendArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pytest

ENGINE = os.environ.get("XGPUZARR_SUITE_ENGINE", "gpuzarr")

STORED_CHUNKS = ReadOptions(target_block_bytes=1)  # blocks of dask are stored chunks, as with engine="zarr"

# The other opening functions (open_zarr, open_dataarray, open_mfdataset, load_*) call one of these.
OPENERS = ("open_dataset", "open_datatree", "open_groups")

# Their method `getitem` is where xarray's Zarr backend awaits values.
ASYNC_READERS = (zarr.AsyncArray, AsyncOIndex, AsyncVIndex)


class Redirection:
    """Sends openings of Zarr stores to `ENGINE`, and counts them.

    Attributes
    ----------
    n_opened
        Openings redirected so far.
    """

    def __init__(self) -> None:
        self.n_opened = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the openers wherever xarray has imported them by name, and refuse the engine "zarr" itself."""
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "xarray"]
        for name in OPENERS:
            original = getattr(api, name)
            redirected = self._redirect(original)
            for module in modules:
                if getattr(module, name, None) is original:
                    monkeypatch.setattr(module, name, redirected)
        monkeypatch.setattr(plugins, "get_backend", _refuse_zarr(plugins.get_backend))
        monkeypatch.setattr(patch, "object", _watch_our_async_reads(patch.object))

    def _redirect(self, opener: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(opener)
        def redirected(filename_or_obj: Any, *, engine: Any = None, **kwargs: Any) -> Any:
            if engine is None:
                engine = plugins.guess_engine(filename_or_obj)
            if engine == "zarr":
                self.n_opened += 1
                # "auto" is near dask's size with engine="zarr", and near the target of default blocks with ours
                options = ReadOptions() if kwargs.get("chunks") == "auto" else STORED_CHUNKS
                engine, kwargs["device"], kwargs["options"] = ENGINE, "cpu", options
            return opener(filename_or_obj, engine=engine, **kwargs)

        return redirected


def _refuse_zarr(get_backend: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_backend)
    def refusing(engine: Any) -> Any:
        assert engine != "zarr", "a store was opened with engine='zarr' past the redirection"
        return get_backend(engine)

    return refusing


def _watch_our_async_reads(patch_object: Callable[..., Any]) -> Callable[..., Any]:
    """Let tests that count the asynchronous reads of zarr-python's arrays count those of the engine's arrays."""

    @functools.wraps(patch_object)
    def watching(target: Any, attribute: str, *args: Any, **kwargs: Any) -> Any:
        if target in ASYNC_READERS and attribute == "getitem":
            target, attribute = GpuZarrBackendArray, "async_getitem"
            kwargs["side_effect"] = GpuZarrBackendArray.async_getitem
        return patch_object(target, attribute, *args, **kwargs)

    return watching


def tests_and_fixtures(module: ModuleType) -> dict[str, Any]:
    """Everything of `module` that pytest collects, by name."""
    return {
        name: item
        for name, item in vars(module).items()
        if name.startswith(("Test", "test_")) or isinstance(item, FixtureFunctionDefinition)
    }
