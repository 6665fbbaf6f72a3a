"""One Zarr array, opened lazily: indexing plans, reads, decodes and returns an array on the device or the host."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from zarr.storage import LocalStore

from xgpuzarr.errors import MissingDependencyError, UnsupportedError, XGpuZarrError
from xgpuzarr.execute import Source, decide_route, read, read_by_zarr
from xgpuzarr.opened_array import OpenedArray, open_once
from xgpuzarr.opening import open_zarr_array
from xgpuzarr.options import ReadOptions, checked_options
from xgpuzarr.plan.cost import Decision
from xgpuzarr.plan.read_plan import ReadPlan, plan_read
from xgpuzarr.plan.selection import Selection, parse_numpy, parse_outer, parse_vectorized
from xgpuzarr.readers.remote import kvikio_problem
from xgpuzarr.system import device_problem, probe
from xgpuzarr.warning import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import zarr

    from xgpuzarr.opening import StoreLike
    from xgpuzarr.options import Device
    from xgpuzarr.plan.layout import ArrayLayout

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
    options = checked_options(options)
    opened = open_zarr_array(store, path=path, zarr_format=zarr_format, storage_options=storage_options)
    return ZarrArray(opened, device=resolve_device(device), options=options)


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
    is_consolidated
        Whether its metadata came from the consolidated metadata of a group. Another process then takes it from there.
    """

    def __init__(
        self, array: zarr.Array[Any], *, device: str, options: ReadOptions, is_consolidated: bool = False
    ) -> None:
        self._set(OpenedArray.of(array, is_consolidated=is_consolidated), device, options)

    def _set(self, opened: OpenedArray, device: str, options: ReadOptions) -> None:
        self._opened = opened
        self._options = options
        self._on_device = device == "cuda"
        array, layout = opened.array, opened.layout
        self._place, self._format = opened.place, array.metadata.zarr_format
        self._digest, self._token, self._is_consolidated = opened.digest, opened.token, opened.is_consolidated
        self._name = array.path.strip("/")
        self._shape = tuple(array.shape)
        self._dtype = array.dtype if layout is None else layout.dtype
        holds = layout is not None and not layout.host_result_reason
        self._device = "cuda" if self._on_device and holds else "cpu"
        if options.route == "device" and self.route != "device":
            raise UnsupportedError(f"array {self.name!r}: route='device' was asked for, but {self.reason}")
        if options.remote_reader == "kvikio" and self.device == "cuda" and self.remote_reader == "client":
            raise UnsupportedError(
                f"array {self.name!r}: remote_reader='kvikio' was asked for, but {self.remote_reader_reason}"
            )

    @property
    def name(self) -> str:
        """Path of the array in its store."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis, in elements."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements in the array."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """NumPy dtype of results, in native byte order."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Decoded size of the array, in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the smallest decodable unit."""
        return self._opened.array.chunks if self.layout is None else self.layout.chunk_shape

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Shape of a shard; None when every chunk is its own object."""
        layout = self.layout
        return layout.object_shape if layout is not None and layout.shard_levels else None

    @property
    def layout(self) -> ArrayLayout | None:
        """What the plan is made from; None for an array that zarr-python reads."""
        return self._opened.layout

    @property
    def attrs(self) -> dict[str, Any]:
        """User attributes of the array."""
        return dict(self._opened.array.attrs)

    @property
    def device(self) -> str:
        """Where results live: "cuda" or "cpu"."""
        return self._device

    @property
    def has_small_handle(self) -> bool:
        """Whether it pickles into less than a kilobyte: the path of a local folder, and not all that a store holds."""
        return isinstance(self._place, str)

    @property
    def route(self) -> str:
        """Where chunks are decoded: "device" or "host"."""
        return "host" if self.reason else "device"

    @property
    def reason(self) -> str:
        """Why chunks are decoded on the host; "" when the device does it."""
        if self.layout is None:
            return self._opened.layout_reason
        if not self._on_device:
            return "; ".join(self.layout.codec_chain.reasons) or "device='cpu'"
        if self._options.route == "host":
            return "route='host' was asked for"
        return "; ".join(self.layout.codec_chain.reasons)

    @property
    def remote_reader(self) -> str:
        """Who reads chunks to the device out of a store that is no local folder: "kvikio", or the store's "client".

        "" for a local folder, and where no chunks are read to the device.
        """
        if not self._has_remote_reader:
            return ""
        return "client" if self.remote_reader_reason else "kvikio"

    @property
    def remote_reader_reason(self) -> str:
        """Why the store's client reads and not KvikIO; "" if it does not. `ReadReport` has it for one read."""
        if not self._has_remote_reader:
            return ""
        if self.layout is None or self.route == "host":
            return f"chunks are decoded on the host: {self.reason}"
        return kvikio_problem(self._opened.array.store, self.layout, self._options)

    @property
    def _has_remote_reader(self) -> bool:
        return self._on_device and type(self._opened.array.store) is not LocalStore

    def on(self, device: str, options: ReadOptions | None = None) -> ZarrArray:
        """Give the same open array with its results on "cuda" or "cpu", and other options if any; reads nothing."""
        array = ZarrArray.__new__(ZarrArray)
        array._set(self._opened, device, options or self._options)  # noqa: SLF001
        return array

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
        if self.layout is None:
            raise UnsupportedError(f"array {self.name!r}: no plan, {self.reason}")
        plan = plan_read(self.layout, parse_numpy(key, self.shape))
        on_host = Decision("host", self.reason)
        return replace(plan, decision=decide_route(plan, self._options) if self._on_device else on_host)

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
        if self.layout is None:
            return selection.finish(read_by_zarr(self._opened.array, selection))
        plan = plan_read(self.layout, selection)
        source = Source(self._opened.array, self.layout, self._options)
        try:
            return selection.finish(read(plan, source, on_device=self._on_device))
        except (ImportError, RuntimeError) as error:  # of CuPy: it is not installed, or finds no driver
            if isinstance(error, XGpuZarrError) or not self._on_device or not device_problem():
                raise
            raise MissingDependencyError(
                f"array {self.name!r} is to be read on the device, and this process cannot: "
                f"{'; '.join(probe().problems)}; or open it with device='cpu'"
            ) from error

    # A handle travels in every dask task: a place and a digest, never metadata or attributes. Unpickling opens nothing,
    # for a scheduler unpickles too, and may see neither the store nor a device.

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, tuple(getattr(self, name) for name in _HANDLE)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("xgpuzarr", self._token, self._on_device)

    def __getattr__(self, name: str) -> Any:
        """Open an unpickled handle at its first use."""
        if name != "_opened":
            raise AttributeError(f"'ZarrArray' object has no attribute {name!r}")
        self._opened = open_once(
            self._token,
            self._digest,
            place=self._place,
            path=self._name,
            shape=self._shape,
            zarr_format=self._format,
            is_consolidated=self._is_consolidated,
        )
        return self._opened


_HANDLE = (
    "_options",
    "_on_device",
    "_place",
    "_format",
    "_digest",
    "_token",
    "_is_consolidated",
    "_name",
    "_shape",
    "_dtype",
    "_device",
)
"""What a handle knows of itself; without these names in it, it is a third smaller."""


def _unpickle(*state: Any) -> ZarrArray:
    array = ZarrArray.__new__(ZarrArray)
    array.__dict__.update(zip(_HANDLE, state, strict=True))
    return array


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
    warn(f"reading into host memory: {problem}; pass device='cpu' to silence this")


class _Indexer:
    """Square brackets for a function."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __getitem__(self, key: Any) -> Any:
        return self._get(key)
