"""How do the encoded bytes of a chunk become its elements, and where can that happen?

`build_codec_chain` turns the codec metadata of either Zarr format into decode steps, each with its sizes, its route
(device or host) and, for the host, the reason. A chain that is known here runs in four parts:

1. `CodecChain.checks`: checksums of the encoded bytes;
2. `CodecChain.compressor`: at most one, from encoded bytes to bytes of a size that the metadata states;
3. `CodecChain.filters`: each one operation on a whole batch of chunks of one size;
4. the axes and the byte order of the elements, settled while they are copied to their place.

Format facts: Zarr v3 core specification, "Codecs"; Zarr v2 specification, "Arrays".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from xgpuzarr.plan.codec_facts import COMPRESSORS, make_step
from xgpuzarr.plan.steps import Content, Kind, Route, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

__all__ = ["CodecChain", "Step", "build_codec_chain"]

_FOREIGN_SERIALIZERS = frozenset(
    {"vlen-utf8", "vlen-bytes", "vlen-array", "numcodecs.zfpy", "zfp", "numcodecs.pcodec", "sharding_indexed"}
)


@dataclass(frozen=True)
class CodecChain:
    """The decode steps of one chunk, first step first.

    Attributes
    ----------
    steps
        Steps in decode order: checksums and compressors, the serializer, then array codecs. In Zarr v2, where the
        dtype and the order stand beside the codecs, filters come before the serializer.
    stored_dtype
        dtype, byte order included, of the elements that are left to be copied to their place; None where zarr-python
        decodes, or nothing is stored.
    """

    steps: tuple[Step, ...]
    stored_dtype: np.dtype[Any] | None = None

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return " | ".join(str(step) for step in self.steps)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason for the host, once; empty when the device decodes."""
        return tuple(dict.fromkeys(step.reason for step in self.steps if step.reason))

    @property
    def route(self) -> Route:
        """Where chunks are decoded.

        One host step takes the whole chain to the host: crossing the bus twice costs more than the steps between.
        """
        return "host" if self.reasons else "device"

    @cached_property
    def by_zarr(self) -> bool:
        """True if only zarr-python's codecs decode these chunks."""
        return any(step.by_zarr for step in self.steps)

    @cached_property
    def compressor(self) -> Step | None:
        """The step that decompresses."""
        return next((step for step in self.steps if step.codec in COMPRESSORS), None)

    @cached_property
    def checks(self) -> tuple[Step, ...]:
        """Checksums of the compressed bytes."""
        return self.steps[: max(self._n_unpacked - 1, 0)]

    @cached_property
    def filters(self) -> tuple[Step, ...]:
        """What is undone behind the compressor, before the elements are copied to their place."""
        return self.steps[self._n_unpacked : self._n_filtered]

    @cached_property
    def settled(self) -> tuple[Step, ...]:
        """What is settled while the elements are copied to their place: byte order and axes."""
        return self.steps[self._n_filtered :]

    @cached_property
    def unfiltered_nbytes(self) -> int:
        """Size of one chunk behind the compressor, or as it is stored without one, in bytes."""
        nbytes = self.steps[self._n_unpacked].encoded_nbytes
        assert nbytes is not None  # so it is for every chain that is not left to zarr-python
        return nbytes

    @property
    def is_plain(self) -> bool:
        """True if chunks are stored as their elements, with nothing to undo but axes and byte order."""
        return not self.by_zarr and self.compressor is None and not self.filters

    @cached_property
    def _n_unpacked(self) -> int:
        return 0 if self.compressor is None else self.steps.index(self.compressor) + 1

    @cached_property
    def _n_filtered(self) -> int:
        stop = len(self.steps)
        while stop > self._n_unpacked and self.steps[stop - 1].codec in ("transpose", "bytes"):
            stop -= 1
        return stop

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Array axis that each axis of the chunk holds as it is copied to its place, slowest first."""
        order = list(range(ndim))
        for step in reversed(self.settled):
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
    nbytes = math.prod(chunk_shape) * dtype.itemsize if dtype.kind not in "OT" else None
    content = Content(nbytes, dtype, chunk_shape)
    encode_side = _v3_steps(codecs, content) if zarr_format == 3 else _v2_steps(codecs, content, order)
    chain = CodecChain(_at_most_one_compressor(encode_side[::-1]))
    if chain.by_zarr:
        return chain
    stored = next((step.config["dtype"] for step in chain.settled if step.codec == "bytes"), dtype)
    return replace(chain, stored_dtype=stored)


def _v2_steps(
    codecs: Sequence[tuple[str, Mapping[str, Any]]], content: Content, order: Literal["C", "F"]
) -> tuple[Step, ...]:
    """Steps in encode order."""
    steps: list[Step] = []
    ndim = len(content.shape)
    if order == "F" and ndim > 1:
        reverse = {"order": tuple(range(ndim))[::-1]}
        step, content = make_step("transpose", reverse, content, kind="array", is_typed=False)
        steps.append(step)
    steps.append(_serializer(content, content.dtype))
    for full_name, config in codecs:
        step, content = make_step(_canonical(full_name, config), config, content, kind="bytes", is_typed=False)
        steps.append(step)
    return tuple(steps)


def _v3_steps(codecs: Sequence[tuple[str, Mapping[str, Any]]], content: Content) -> tuple[Step, ...]:
    """Steps in encode order."""
    steps: list[Step] = []
    kind: Kind = "array"
    for full_name, config in codecs:
        name = _canonical(full_name, config)
        if name == "bytes":
            endian: Literal["big", "little", "="] = config.get("endian") or "="
            steps.append(_serializer(content, content.dtype.newbyteorder(endian)))
            kind = "bytes"
            continue
        own_kind: Kind = "serializer" if full_name in _FOREIGN_SERIALIZERS else kind
        step, content = make_step(name, config, content, kind=own_kind, is_typed=own_kind == "array")
        kind = "bytes" if own_kind == "serializer" else kind
        steps.append(step)
    return tuple(steps)


def _serializer(content: Content, stored: np.dtype[Any]) -> Step:
    is_object = content.dtype.kind in "OT"
    reason = f"objects ({content.dtype}) live on the host" if is_object else ""
    config = {"dtype": stored, "decoded_dtype": content.dtype}
    return Step("bytes", config, "serializer", content.nbytes, content.nbytes, reason, by_zarr=is_object)


def _canonical(name: str, config: Mapping[str, Any]) -> str:
    """Drop the prefixes under which the two formats, and their implementations, register one codec."""
    if name == "nvcomp_batch":  # KvikIO's codec for Zarr v2
        return f"nvcomp.{str(config.get('algorithm')).lower()}"
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return {"endian": "bytes"}.get(name, name)


_PREFIXES = ("numcodecs.", "https://codec.zarr.dev/", "zarrs.", "https://codec.zarrs.dev/bytes_to_bytes/")


def _at_most_one_compressor(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if sum(step.codec in COMPRESSORS for step in steps) <= 1:
        return steps
    reason = "one compressor behind another, and only the data tell the size between them"
    return tuple(replace(s, reason=reason, by_zarr=True) if s.codec in COMPRESSORS else s for s in steps)
