"""One Zarr array, opened lazily: indexing plans, reads, decodes and returns an array on the device or the host."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import zarr
from zarr.storage import LocalStore

from xgpuzarr.errors import UnsupportedError, XGpuZarrError
from xgpuzarr.execute import Source, read, read_by_zarr
from xgpuzarr.opening import open_zarr_array
from xgpuzarr.options import ReadOptions
from xgpuzarr.plan.layout import ArrayLayout, layout_of
from xgpuzarr.plan.read_plan import ReadPlan, plan_read
from xgpuzarr.plan.selection import Selection, parse_numpy, parse_outer, parse_vectorized
from xgpuzarr.system import device_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xgpuzarr.opening import StoreLike
    from xgpuzarr.options import Device

__all__ = ["ZarrArray", "open_array", "resolve_device"]


def open_array(
    store: StoreLike,
    *,
    path: str = "",
    device: Device = "auto",
    options: ReadOptions | None = None,
    zarr_format: Literal[2, 3] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ZarrArray:
    """Open one array of a Zarr store lazily; only metadata is read.

    Parameters
    ----------
    store
        A folder, a `.zip` file, a URL, or a zarr-python store.
    path
        Path of the array inside the store; "" when the store is the array.
    device
        "cuda": results are CuPy arrays on the current device. "cpu": NumPy arrays. "auto": "cuda" if a device is
        usable, else "cpu" with one warning for the process.
    options
        How to read; see `ReadOptions`. Never changes a result.
    zarr_format
        2 or 3; None finds out.
    storage_options
        Options of the file system behind a URL.

    Returns
    -------
    ZarrArray
        Lazy; index it to read.

    Raises
    ------
    FileNotFoundError
        No store there, or no array at `path`.
    MetadataError, UnsupportedError
        The array cannot be read; the message says why and what would help.

    Examples
    --------
    >>> import xgpuzarr
    >>> t2m = xgpuzarr.open_array("era5.zarr", path="t2m")  # doctest: +SKIP
    >>> t2m[0, ::2, 100:200]  # doctest: +SKIP
    """
    opened = open_zarr_array(store, path=path, zarr_format=zarr_format, storage_options=storage_options)
    return ZarrArray(opened, device=resolve_device(device), options=options or ReadOptions())


class ZarrArray:
    """A lazy Zarr array with NumPy's indexing; made by `open_array`.

    ``a[...]`` follows NumPy, ``a.oindex[...]`` indexes each axis on its own, and ``a.vindex[...]`` indexes points.
    Only chunks that a selection touches are read. Results are in native byte order; they are CuPy arrays when
    `device` is "cuda", ordered on the stream that was current when indexing. dtypes that CuPy lacks (times, strings,
    structures) come as NumPy arrays on both devices.

    Parameters
    ----------
    array
        The array, opened by zarr-python.
    device
        "cuda" or "cpu".
    options
        How to read.
    """

    def __init__(self, array: zarr.Array[Any], *, device: str, options: ReadOptions) -> None:
        self._zarr = array
        self._options = options
        self._on_device = device == "cuda"
        self._layout: ArrayLayout | None
        try:
            self._layout = layout_of(array)
            self._layout_reason = ""
        except UnsupportedError as error:
            self._layout, self._layout_reason = None, str(error)
        if options.route == "device" and self.route != "device":
            raise UnsupportedError(f"array {self.name!r}: route='device' was asked for, but {self.reason}")

    @property
    def name(self) -> str:
        """Path of the array in its store."""
        return self._zarr.path.strip("/")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._zarr.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements in the array."""
        return int(self._zarr.size)

    @property
    def dtype(self) -> Any:
        """NumPy dtype of results, in native byte order."""
        return self._layout.dtype if self._layout is not None else self._zarr.dtype

    @property
    def nbytes(self) -> int:
        """Decoded size of the array, in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the smallest decodable unit."""
        return self._layout.chunk_shape if self._layout is not None else self._zarr.chunks

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Shape of a shard; None when every chunk is its own object."""
        layout = self._layout
        return layout.object_shape if layout is not None and layout.shard_levels else None

    @property
    def layout(self) -> ArrayLayout | None:
        """What the plan is made from; None for an array that zarr-python reads."""
        return self._layout

    @property
    def attrs(self) -> dict[str, Any]:
        """User attributes of the array."""
        return dict(self._zarr.attrs)

    @property
    def device(self) -> str:
        """Where results live: "cuda" or "cpu"."""
        holds = self._layout is not None and not self._layout.host_result_reason
        return "cuda" if self._on_device and holds else "cpu"

    @property
    def route(self) -> str:
        """Where chunks are decoded: "device" or "host"."""
        return "host" if self.reason else "device"

    @property
    def reason(self) -> str:
        """Why chunks are decoded on the host; "" when the device does it."""
        if self._layout is None:
            return self._layout_reason
        if not self._on_device:
            return "; ".join(self._layout.codec_chain.reasons) or "device='cpu'"
        if self._options.route == "host":
            return "route='host' was asked for"
        return "; ".join(self._layout.codec_chain.reasons)

    def __getitem__(self, key: Any) -> Any:
        return self._read(parse_numpy, key)

    @property
    def oindex(self) -> _Indexer:
        """Orthogonal indexing: each axis by its own integer, slice, index array or mask."""
        return _Indexer(lambda key: self._read(parse_outer, key))

    @property
    def vindex(self) -> _Indexer:
        """Vectorized indexing: index arrays are broadcast together and pick points; their axes come first."""
        return _Indexer(lambda key: self._read(parse_vectorized, key))

    def plan(self, key: Any = ...) -> ReadPlan:
        """What ``self[key]`` would read, without reading it.

        Raises
        ------
        UnsupportedError
            zarr-python reads this array, so there is no plan.
        """
        if self._layout is None:
            raise UnsupportedError(f"array {self.name!r}: no plan, {self._layout_reason}")
        return plan_read(self._layout, parse_numpy(key, self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.device == "cuda":
            raise TypeError(
                f"array {self.name!r} reads to the device; index it and call cupy.asnumpy on the result, "
                "or open it with device='cpu'"
            )
        result = self[...]
        return result if dtype is None else result.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"<xgpuzarr.ZarrArray {self.name or '/'} shape={self.shape} dtype={self.dtype} chunks={self.chunks} "
            f"device={self.device} route={self.route}>"
        )

    def _read(self, parse: Callable[[Any, tuple[int, ...]], Selection], key: Any) -> Any:
        selection = parse(key, self.shape)
        if self._layout is None:
            return selection.finish(read_by_zarr(self._zarr, selection))
        plan = plan_read(self._layout, selection)
        return selection.finish(read(plan, Source(self._zarr, self._layout, self._options), on_device=self._on_device))

    # A handle travels in every dask task: it is a place and a digest, never metadata or attributes.

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._zarr.store
        place: Any = str(store.root) if type(store) is LocalStore else store
        return _reopen, (place, self.name, self._on_device, self._options, self._digest)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("xgpuzarr", str(self._zarr.store), self.name, self._on_device, self._digest, self._modified_ns)

    @functools.cached_property
    def _digest(self) -> str:
        document = self._zarr.metadata.to_dict()
        document.pop("attributes", None)
        return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @functools.cached_property
    def _modified_ns(self) -> int:
        """When the metadata document was last written, in ns; 0 where the store does not say."""
        store = self._zarr.store
        if type(store) is not LocalStore:
            return 0
        folder = Path(store.root, self.name)
        return max((os.stat(f).st_mtime_ns for n in ("zarr.json", ".zarray") if (f := folder / n).exists()), default=0)


def resolve_device(device: Device) -> str:
    """Turn "auto" into "cuda" or "cpu"; the first "cpu" of a process is said in a warning, with its reason."""
    if device in ("cuda", "cpu"):
        return device
    if device != "auto":
        raise ValueError(f"device must be 'auto', 'cuda' or 'cpu', got {device!r}")
    problem = device_problem()
    if problem:
        _warn_once(problem)
    return "cpu" if problem else "cuda"


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"reading into host memory: {problem}; pass device='cpu' to silence this", stacklevel=4)


class _Indexer:
    """Square brackets for a function."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __getitem__(self, key: Any) -> Any:
        return self._get(key)


def _reopen(place: Any, path: str, on_device: bool, options: ReadOptions, digest: str) -> ZarrArray:
    if isinstance(place, str):
        return _reopen_local(place, path, on_device, options, digest)
    return _checked(ZarrArray(open_zarr_array(place, path=path), device=_name(on_device), options=options), digest)


@functools.lru_cache(maxsize=256)
def _reopen_local(place: str, path: str, on_device: bool, options: ReadOptions, digest: str) -> ZarrArray:
    """Opened once a process, however many tasks carry the handle."""
    return _checked(ZarrArray(open_zarr_array(place, path=path), device=_name(on_device), options=options), digest)


def _name(on_device: bool) -> str:
    return "cuda" if on_device else "cpu"


def _checked(array: ZarrArray, digest: str) -> ZarrArray:
    if array._digest != digest:
        raise XGpuZarrError(
            f"array {array.name!r}: its metadata changed after this handle was made; open the store again"
        )
    return array
