"""What does an array look like in its store? One frozen value answers, and everything later reads only that.

`ArrayLayout` holds the shape, the chunk and shard grids, the rule that names keys, the codec chain and the fill value.
`layout_of` builds it from a `zarr.Array`; it is the only place in `plan` that knows zarr-python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from xgpuzarr.errors import UnsupportedError
from xgpuzarr.plan.codec_chain import CodecChain, build_codec_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import zarr
    from zarr.abc.codec import Codec

__all__ = ["DEVICE_KINDS", "ArrayLayout", "KeyRule", "ShardLevel", "chunk_codecs", "layout_of"]

DEVICE_KINDS = "biufc"
"""Kinds of dtype that CuPy has: bool, int, unsigned, float, complex."""


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


@dataclass(frozen=True)
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

    @cached_property
    def grid_shape(self) -> tuple[int, ...]:
        """Chunks in the shard along each axis."""
        return tuple(s // c for s, c in zip(self.shard_shape, self.chunk_shape, strict=True))

    @cached_property
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
    store_name
        The store, as errors name it.
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
    store_name: str = ""

    @property
    def ndim(self) -> int:
        """Number of axes."""
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

    @property
    def host_result_reason(self) -> str:
        """Why results are NumPy arrays even when the device decodes: CuPy lacks the dtype. "" if it has it."""
        if self.dtype.kind in DEVICE_KINDS and self.dtype.itemsize <= (8 if self.dtype.kind == "f" else 16):
            return ""
        return f"CuPy has no {self.dtype.name} dtype"

    def key(self, coords: Iterable[int]) -> str:
        """Key of the stored object at `coords` of the object grid."""
        return self.key_rule.key(self.path, coords)


def layout_of(array: zarr.Array[Any]) -> ArrayLayout:
    """Layout of an open Zarr array.

    Raises
    ------
    UnsupportedError
        The chunk grid is not regular, or keys follow a rule that is not in the specification. zarr-python may
        still read such an array.
    """
    metadata = array.metadata
    path = array.path.strip("/")
    declared = array.dtype
    levels, codecs = _shards_and_codecs(array)
    if metadata.zarr_format == 2:
        object_shape = tuple(metadata.chunks)
        rule = KeyRule("", metadata.dimension_separator)
        order: Literal["C", "F"] = metadata.order
    else:
        object_shape = _regular_grid(path, metadata.chunk_grid.to_dict())
        rule = _key_rule(path, metadata.chunk_key_encoding.to_dict())
        order = "C"
    chunk_shape = levels[-1].chunk_shape if levels else object_shape
    fill_value = metadata.fill_value
    if fill_value is None:  # Zarr v2 allows null; zarr-python reads it as the dtype's zero
        fill_value = metadata.dtype.default_scalar() if hasattr(metadata.dtype, "default_scalar") else declared.type()
    return ArrayLayout(
        path=path,
        zarr_format=metadata.zarr_format,
        shape=tuple(array.shape),
        dtype=declared.newbyteorder("=") if declared.kind not in "OT" else declared,
        chunk_shape=chunk_shape,
        object_shape=object_shape,
        shard_levels=levels,
        codec_chain=build_codec_chain(
            [_name_and_config(codec) for codec in codecs],
            zarr_format=metadata.zarr_format,
            dtype=declared,
            chunk_shape=chunk_shape,
            order=order,
        ),
        fill_value=fill_value,
        key_rule=rule,
        store_name=str(array.store).removeprefix("file://"),
    )


def chunk_codecs(array: zarr.Array[Any]) -> tuple[Any, ...]:
    """zarr-python's codec objects for the smallest decodable unit of `array`, in encode order."""
    return _shards_and_codecs(array)[1]


def _shards_and_codecs(array: zarr.Array[Any]) -> tuple[tuple[ShardLevel, ...], tuple[Any, ...]]:
    """Peel plain `sharding_indexed` levels off an array's codecs.

    A level with other codecs around it, or with an unusual index, is not peeled: its shard is then one chunk that
    zarr-python decodes whole.
    """
    metadata = array.metadata
    if metadata.zarr_format == 2:
        compressor = () if metadata.compressor is None else (metadata.compressor,)
        return (), (*(metadata.filters or ()), *compressor)
    levels: list[ShardLevel] = []
    codecs: Sequence[Codec] = metadata.codecs
    shape = _regular_grid(array.path, metadata.chunk_grid.to_dict())
    while len(codecs) == 1:
        name, config = _name_and_config(codecs[0])
        if name != "sharding_indexed":
            break
        level = _shard_level(shape, config)
        if level is None:
            break
        levels.append(level)
        shape = level.chunk_shape
        inner: Any = codecs[0]
        codecs = inner.codecs
    return tuple(levels), tuple(codecs)


def _shard_level(shard_shape: tuple[int, ...], config: Mapping[str, Any]) -> ShardLevel | None:
    names = [codec["name"] for codec in config["index_codecs"]]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        return None
    endian = config["index_codecs"][0].get("configuration", {}).get("endian", "little")
    location = config.get("index_location", "end")
    return ShardLevel(
        shard_shape=shard_shape,
        chunk_shape=tuple(config["chunk_shape"]),
        index_location=getattr(location, "value", location),
        index_byteorder=">" if endian == "big" else "<",
        index_checksum=len(names) == 2,
    )


def _name_and_config(codec: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of a codec object of either format (a numcodecs codec for v2)."""
    if hasattr(codec, "codec_id") and hasattr(codec, "get_config") and not hasattr(codec, "to_dict"):
        config = dict(codec.get_config())
        return config.pop("id"), config
    as_dict = codec.to_dict()
    return as_dict["name"], as_dict.get("configuration", {})


def _regular_grid(path: str, grid: Mapping[str, Any]) -> tuple[int, ...]:
    if grid["name"] != "regular":
        raise UnsupportedError(f"array {path!r}: chunk grid {grid['name']!r} is read by zarr-python")
    return tuple(grid["configuration"]["chunk_shape"])


def _key_rule(path: str, encoding: Mapping[str, Any]) -> KeyRule:
    separator = encoding.get("configuration", {}).get("separator", "/")
    if encoding["name"] not in ("default", "v2"):
        raise UnsupportedError(f"array {path!r}: chunk key encoding {encoding['name']!r} is read by zarr-python")
    return KeyRule("c" if encoding["name"] == "default" else "", separator)
