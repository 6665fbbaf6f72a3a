"""What does an array look like in its store? One frozen value answers, and everything later reads only that.

`ArrayLayout` holds the shape, the chunk and shard grids, the rule that names keys, the codec chain and the fill value.
`layout_of` builds it from a `zarr.Array`; it is the only place in `plan` that knows zarr-python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import zarr

    from xgpuzarr.plan.codec_chain import CodecChain

__all__ = ["ArrayLayout", "KeyRule", "ShardLevel"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """How chunk coordinates become a key (Zarr v3, "Chunk key encoding"; Zarr v2, "Storing chunks").

    Attributes
    ----------
    prefix
        "c" for the v3 default encoding, "" for the v2 one.
    separator
        "/" (nested keys) or "." (flat keys).
    """

    prefix: Literal["c", ""]
    separator: Literal["/", "."]

    def key(self, path: str, coords: Iterable[int]) -> str:
        """Key, relative to the store, of the object at `coords` of the array at `path`."""
        parts = ([self.prefix] if self.prefix else []) + [str(c) for c in coords]
        name = self.separator.join(parts) or "0"
        return f"{path}/{name}" if path else name


@dataclass(frozen=True, slots=True)
class ShardLevel:
    """One level of the `sharding_indexed` codec: a shard, the chunks inside it, and its index.

    Attributes
    ----------
    shard_shape
        Shape of the shard, in elements.
    chunk_shape
        Shape of the chunks inside it, in elements. With nested sharding these are themselves shards.
    index_location
        Whether the index stands at the start or the end of the shard.
    index_byteorder
        Byte order of the index entries (uint64 offset and length).
    index_checksum
        True if a CRC32C of the index follows it.
    """

    shard_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    index_location: Literal["start", "end"]
    index_byteorder: Literal["<", ">"]
    index_checksum: bool

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Chunks in the shard along each axis."""
        return tuple(s // c for s, c in zip(self.shard_shape, self.chunk_shape, strict=True))

    @property
    def index_nbytes(self) -> int:
        """Stored size of the index, checksum included, in bytes."""
        return 16 * math.prod(self.grid_shape) + (4 if self.index_checksum else 0)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Everything a read needs to know of an array, without its store.

    Attributes
    ----------
    path
        Path of the array in its store; "" for a root array.
    zarr_format
        2 or 3.
    shape
        Shape, in elements.
    dtype
        NumPy dtype of the result, always in native byte order.
    chunk_shape
        Shape of the smallest decodable unit; inside a shard too.
    object_shape
        Shape that one stored object covers: the outermost shard, or the chunk.
    shard_levels
        Sharding, outermost first; empty when an object is a chunk.
    codec_chain
        How the encoded bytes of one chunk become its elements.
    fill_value
        Scalar of `dtype` that missing chunks read as.
    key_rule
        How object coordinates become keys.
    """

    path: str
    zarr_format: Literal[2, 3]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    object_shape: tuple[int, ...]
    shard_levels: tuple[ShardLevel, ...]
    codec_chain: CodecChain
    fill_value: Any
    key_rule: KeyRule

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def chunk_nbytes(self) -> int:
        """Decoded size of one chunk, in bytes; edge chunks are stored whole, so it is one number."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Decoded size of the array, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Chunks along each axis, the cut ones at the edge included."""
        return tuple(-(-s // c) for s, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def object_grid_shape(self) -> tuple[int, ...]:
        """Stored objects along each axis."""
        return tuple(-(-s // c) for s, c in zip(self.shape, self.object_shape, strict=True))

    def key(self, coords: Iterable[int]) -> str:
        """Key of the stored object at `coords` of the object grid."""
        return self.key_rule.key(self.path, coords)
