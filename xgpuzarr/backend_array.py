"""A stored array as xarray's lazy variables hold it: what xarray selects is what is read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from xarray.backends.common import BackendArray
from xarray.core import indexing

from xgpuzarr import cf

if TYPE_CHECKING:
    import numpy as np

    from xgpuzarr.array import ZarrArray
    from xgpuzarr.plan.layout import ArrayLayout

__all__ = ["GpuZarrBackendArray"]


class GpuZarrBackendArray(BackendArray):
    """Indexing reads the stored values, and decodes CF where that was folded in.

    Parameters
    ----------
    zarr_array
        Reads stored values.
    dtype
        dtype of the result: after `steps`, or what xarray takes the stored values for where it decodes them itself.
    steps
        CF decoding of the stored values.
    target_block_bytes
        See `ReadOptions`.
    host_reason
        Why the values stay on the host although the dataset is on the device; "" where they do not.
    """

    def __init__(
        self,
        zarr_array: ZarrArray,
        *,
        dtype: np.dtype[Any],
        steps: tuple[cf.Step, ...] = (),
        target_block_bytes: int,
        host_reason: str = "",
    ) -> None:
        self.zarr_array = zarr_array
        self.shape = zarr_array.shape
        self.dtype = dtype
        self.steps = steps
        self.target_block_bytes = target_block_bytes
        self.host_reason = host_reason

    @property
    def name(self) -> str:
        """Path of the array in its store."""
        return self.zarr_array.name

    @property
    def layout(self) -> ArrayLayout | None:
        """The stored array; None where zarr-python reads it."""
        return self.zarr_array.layout

    @property
    def device(self) -> str:
        """Where results live: "cuda" or "cpu"."""
        return self.zarr_array.device

    @property
    def has_small_handle(self) -> bool:
        """See `LazyArray`."""
        return self.zarr_array.has_small_handle

    def on(self, device: str) -> GpuZarrBackendArray:
        """Make the same array, read to `device`: "cuda" or "cpu". Where CuPy lacks the dtype, that remains the host."""
        zarr_array = self.zarr_array.on(device)
        return GpuZarrBackendArray(
            zarr_array, dtype=self.dtype, steps=self.steps, target_block_bytes=self.target_block_bytes
        )

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        if isinstance(key, indexing.VectorizedIndexer):
            stored = self.zarr_array.vindex[key.tuple]
        elif isinstance(key, indexing.OuterIndexer):
            stored = self.zarr_array.oindex[key.tuple]
        else:
            stored = self.zarr_array[key.tuple]
        return cf.decode(stored, self.steps)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read in a thread of its own; a device result is complete when this returns."""
        if self.device == "cpu":
            return await asyncio.to_thread(self.__getitem__, key)
        import cupy

        device = cupy.cuda.Device()

        def read() -> Any:
            with device:
                result = self[key]
                cupy.cuda.get_current_stream().synchronize()
            return result

        return await asyncio.to_thread(read)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (self.zarr_array.__dask_tokenize__(), str(self.dtype), repr(self.steps))

    def __reduce__(self) -> tuple[Any, ...]:  # every task of a dask array carries one
        state = self.zarr_array, self.dtype, self.steps, self.target_block_bytes, self.host_reason
        return _unpickle, state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.zarr_array!r}, dtype={self.dtype}, steps={self.steps})"


def _unpickle(
    zarr_array: ZarrArray, dtype: np.dtype[Any], steps: tuple[cf.Step, ...], target_block_bytes: int, host_reason: str
) -> GpuZarrBackendArray:
    return GpuZarrBackendArray(
        zarr_array, dtype=dtype, steps=steps, target_block_bytes=target_block_bytes, host_reason=host_reason
    )
