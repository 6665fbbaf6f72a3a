"""What does an array have to offer to be read block by block? Needs no dask, which is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["LazyArray", "StoredArray"]


class LazyArray(Protocol):
    """What blocks are read from: an array that reads what it is indexed with.

    It pickles into a place and parameters, and has a deterministic `__dask_tokenize__`.
    """

    @property
    def name(self) -> str:
        """Path of the array in its store."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, in elements."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of results."""

    @property
    def device(self) -> str:
        """Where results live: "cuda" or "cpu"."""

    @property
    def has_small_handle(self) -> bool:
        """Whether it pickles into less than a kilobyte: the path of a local folder, and no index arrays."""

    def __getitem__(self, key: Any) -> Any: ...


class StoredArray(LazyArray, Protocol):
    """A lazy array that tells how it is stored: the `BackendArray` of the engine."""

    @property
    def layout(self) -> ArrayLayout | None:
        """The stored array; None where zarr-python reads it."""

    @property
    def target_block_bytes(self) -> int:
        """See `xgpuzarr.ReadOptions`."""
