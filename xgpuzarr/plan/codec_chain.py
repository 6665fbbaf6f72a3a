"""How do the encoded bytes of a chunk become its elements, and where can that happen?

`build_codec_chain` turns the codec metadata of either Zarr format into decode steps, each with its size, its
route (device or host) and, for the host, the reason. Format facts: Zarr v3 core specification, "Codecs";
Zarr v2 specification, "Arrays"; the numcodecs documentation for the configuration of each numcodecs codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["CodecChain", "Step", "build_codec_chain"]

Route = Literal["device", "host"]

DEVICE_COMPRESSORS = frozenset({"zstd", "lz4", "gzip", "zlib", "blosc"})
"""Compressors with a decoder on the device."""

HOST_COMPRESSORS = frozenset({"zstd", "lz4", "gzip", "zlib", "blosc"})
"""Compressors that `decoders.host` decodes straight into place."""


@dataclass(frozen=True, slots=True)
class Step:
    """One codec of a chain, as it is undone.

    Attributes
    ----------
    codec
        Name of the codec; the same for both Zarr formats ("zstd", never "numcodecs.zstd").
    config
        The codec's configuration, as the metadata has it.
    kind
        "bytes" (bytes to bytes), "serializer" (bytes to array) or "array" (array to array).
    decoded_nbytes
        Size of one chunk after this step, in bytes; None if the metadata does not determine it.
    reason
        Why this step cannot run on the device; "" if it can.
    """

    codec: str
    config: Mapping[str, Any]
    kind: Literal["bytes", "serializer", "array"]
    decoded_nbytes: int | None
    reason: str

    @property
    def route(self) -> Route:
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
class CodecChain:
    """The decode steps of one chunk, first step first.

    Attributes
    ----------
    steps
        Steps in decode order: compressors, checksums, the serializer, then array codecs.
    """

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return " | ".join(str(step) for step in self.steps)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason for the host; empty when the device decodes."""
        return tuple(step.reason for step in self.steps if step.reason)

    @property
    def route(self) -> Route:
        """Where chunks are decoded. One host step takes the whole chain to the host: crossing the bus twice
        costs more than the steps between."""
        return "host" if self.reasons else "device"

    @property
    def stored_dtype(self) -> np.dtype[Any] | None:
        """dtype, byte order included, of the elements as the serializer reads them; None for a foreign serializer."""
        for step in self.steps:
            if step.kind == "serializer":
                return step.config["dtype"] if step.codec == "bytes" else None
        return None

    @property
    def compressor(self) -> Step | None:
        """The single bytes-to-bytes step, if there is exactly one."""
        found = [s for s in self.steps if s.kind == "bytes"]
        return found[0] if len(found) == 1 else None

    @property
    def is_direct(self) -> bool:
        """True if a chunk is at most one known compressor over plain elements, in C order or permuted.

        Such a chunk decodes straight to its place; its axes and byte order are settled while it is copied.
        """
        kinds = [s.kind for s in self.steps]
        return (
            self.stored_dtype is not None
            and kinds.count("bytes") <= 1
            and all(s.codec in HOST_COMPRESSORS for s in self.steps if s.kind == "bytes")
            and all(s.codec == "transpose" for s in self.steps if s.kind == "array")
            and not any(s.reason for s in self.steps if s.kind == "serializer")
        )

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Permutation of a direct chain: array axis that each axis of the stored chunk holds, slowest first."""
        order = list(range(ndim))
        for step in reversed(self.steps):
            if step.codec == "transpose":
                order = [order[i] for i in step.config["order"]]
        return tuple(order)


def build_codec_chain(
    codecs: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    zarr_format: Literal[2, 3],
    dtype: np.dtype[Any],
    chunk_shape: tuple[int, ...],
    order: Literal["C", "F"] = "C",
) -> CodecChain:
    """Decode steps of a codec chain.

    Parameters
    ----------
    codecs
        (name, configuration) of each codec in encode order. For Zarr v2: filters, then the compressor.
    zarr_format
        2 or 3. In v2 the dtype and order stand beside the codecs; in v3 they are codecs.
    dtype
        dtype of the stored array; for v2 with the stored byte order.
    chunk_shape
        Shape of one chunk, in elements.
    order
        Zarr v2's order of elements in a chunk; ignored for v3.

    Returns
    -------
    CodecChain
        Never fails: what is not known gets a step with a host reason.
    """
    size = math.prod(chunk_shape)
    nbytes: int | None = size * dtype.itemsize if dtype.kind not in "OT" else None
    encode_side: list[Step] = []
    current = dtype
    if zarr_format == 2:
        if order == "F" and len(chunk_shape) > 1:
            reverse = tuple(range(len(chunk_shape)))[::-1]
            encode_side.append(Step("transpose", {"order": reverse}, "array", nbytes, ""))
        reason = f"objects ({dtype}) live on the host" if dtype.kind in "OT" else ""
        encode_side.append(Step("bytes", {"dtype": dtype}, "serializer", nbytes, reason))
    seen_serializer = zarr_format == 2
    for full_name, config in codecs:
        name = _canonical(full_name)
        before = nbytes
        if name == "bytes" and zarr_format == 3:
            seen_serializer = True
            endian: Literal["big", "little", "="] = config.get("endian") or "="
            stored = current.newbyteorder(endian)
            encode_side.append(Step("bytes", {"dtype": stored}, "serializer", nbytes, ""))
            continue
        kind: Literal["bytes", "serializer", "array"] = "bytes" if seen_serializer else "array"
        if name in _FOREIGN_SERIALIZERS and zarr_format == 3:
            kind, seen_serializer = "serializer", True
        nbytes, current = _encoded_size(name, config, before, current)
        encode_side.append(Step(name, dict(config), kind, before, _host_reason(name, config, kind)))
    steps = tuple(reversed(encode_side))
    if len([s for s in steps if s.kind == "bytes"]) > 1:
        steps = tuple(_with_reason(s, "more than one bytes codec is undone on the host") for s in steps)
    return CodecChain(steps)


_FOREIGN_SERIALIZERS = frozenset(
    {"vlen-utf8", "vlen-bytes", "vlen-array", "zfpy", "zfp", "pcodec", "sharding_indexed", "optional", "packbits"}
)


def _canonical(name: str) -> str:
    """Drop the prefixes under which the two formats register one codec."""
    return {"endian": "bytes"}.get(name, name.removeprefix("numcodecs.").removeprefix("https://codec.zarr.dev/"))


def _encoded_size(
    name: str, config: Mapping[str, Any], nbytes: int | None, dtype: np.dtype[Any]
) -> tuple[int | None, np.dtype[Any]]:
    """Size of a chunk, and dtype of its elements, once `name` has encoded it; None when it depends on the data."""
    if nbytes is None:
        return None, dtype
    if name in ("shuffle", "bitround", "transpose"):
        return nbytes, dtype
    if name in ("crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3"):
        return nbytes + 4, dtype
    if name in ("delta", "fixedscaleoffset", "quantize", "astype"):
        target = config.get("encode_dtype" if name == "astype" else "astype") or config.get("dtype") or dtype
        source = config.get("decode_dtype" if name == "astype" else "dtype") or dtype
        encoded = np.dtype(target)
        return nbytes // np.dtype(source).itemsize * encoded.itemsize, encoded
    if name == "packbits":
        return 1 + -(-nbytes // 8), np.dtype("u1")
    return None, dtype


def _host_reason(name: str, config: Mapping[str, Any], kind: str) -> str:
    if kind == "bytes" and name in DEVICE_COMPRESSORS:
        return ""
    if name == "transpose":
        return ""
    if name in ("lzma", "bz2", "pcodec", "zfpy", "zfp", "jenkins_lookup3"):
        return f"codec {name!r} has no GPU decoder"
    if name.startswith("vlen") or name in ("json2", "msgpack2", "pickle", "categorize", "base64"):
        return f"codec {name!r} makes objects, which live on the host"
    return f"codec {name!r} is decoded on the host"


def _with_reason(step: Step, reason: str) -> Step:
    if step.kind != "bytes":
        return step
    return Step(step.codec, step.config, step.kind, step.decoded_nbytes, step.reason or reason)
