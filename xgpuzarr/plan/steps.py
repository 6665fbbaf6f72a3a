"""What is one codec of a chain, seen by a reader? A `Step` undoes it; a `Content` is a chunk as it lies between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

__all__ = ["Content", "Kind", "Route", "Step"]

Route = Literal["device", "host"]
Kind = Literal["bytes", "serializer", "array"]


@dataclass(frozen=True, slots=True)
class Step:
    """One codec of a chain, as it is undone.

    Attributes
    ----------
    codec
        Name of the codec; the same for both Zarr formats ("zstd", never "numcodecs.zstd").
    config
        What its decoder needs, dtypes as `numpy.dtype`; where `by_zarr`, the configuration as the metadata has it.
    kind
        "bytes" (bytes to bytes), "serializer" (bytes to array) or "array" (array to array).
    encoded_nbytes, decoded_nbytes
        Size of one chunk before and after this step, in bytes; None if the metadata does not determine it.
    reason
        Why this step cannot run on the device; "" if it can.
    by_zarr
        True if only zarr-python's codecs undo it; they then decode the whole chunk.
    """

    codec: str
    config: Mapping[str, Any]
    kind: Kind
    encoded_nbytes: int | None
    decoded_nbytes: int | None
    reason: str = ""
    by_zarr: bool = False

    @property
    def route(self) -> Route:
        """Where it is undone."""
        return "host" if self.reason else "device"

    def __str__(self) -> str:
        if self.codec == "bytes":
            return f"bytes[{self.config['dtype'].str}]"
        if self.codec == "blosc":
            return f"blosc[{self.config.get('cname', '?')},{self.config.get('shuffle', '?')}]"
        if self.codec == "transpose":
            return f"transpose{list(self.config['order'])}"
        return self.codec


@dataclass(frozen=True, slots=True)
class Content:
    """One chunk as it lies between two codecs.

    Attributes
    ----------
    nbytes
        Its size in bytes; None if only the data determine it.
    dtype, shape
        Its elements. Zarr v2's filters, and codecs behind the serializer, see bytes and go by `nbytes` alone.
    """

    nbytes: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
