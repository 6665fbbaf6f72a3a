"""Codecs of nvCOMP for zarr-python, so that archives made for GPUs can be written and read back.

zarr-python and numcodecs find them by entry points.

==================  =================================================================================================
``nvcomp.*``        `NvcompCodec`, Zarr v3: the decoded size (4 bytes, little-endian), then one frame of the algorithm
``gdeflate``        `GDeflateCodec`, Zarr v3: pages of 64 KiB, as zarrs writes them
``nvcomp_batch``    `NvcompBatch`, Zarr v2: as ``nvcomp.*``; the codec that KvikIO had
==================  =================================================================================================

Through zarr-python each chunk travels to the device and back; xgpuzarr decodes whole batches where they lie. Encoding
needs a device, and so does decoding all but ``nvcomp.deflate``, ``nvcomp.lz4`` and ``nvcomp.zstd``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy
from zarr.abc.codec import BytesBytesCodec

from xgpuzarr.decoders import nvcomp
from xgpuzarr.decoders.host import decode_into
from xgpuzarr.plan import gdeflate
from xgpuzarr.plan.codec_facts import DEVICE_ONLY, NVCOMP_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from numpy.typing import NDArray
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer
    from zarr.core.common import JSON

__all__ = ["GDeflateCodec", "NvcompBatch", "NvcompCodec"]

PREFIX_NBYTES = 4
MAX_RATIO = 2064
"""Most decoded bytes that one encoded byte of gdeflate can stand for, with room to spare: what says more is damaged."""


class _BytesCodec(BytesBytesCodec):
    """What `NvcompCodec` and `GDeflateCodec` share: zarr-python's buffers, and its two ways to call a codec."""

    is_fixed_size = False

    def encode_bytes(self, data: NDArray[np.uint8]) -> bytes:
        raise NotImplementedError

    def decode_bytes(self, encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        decoded = self.decode_bytes(chunk_bytes.as_numpy_array().view(np.uint8))
        return chunk_spec.prototype.buffer.from_bytes(decoded.tobytes())

    def _encode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        encoded = self.encode_bytes(chunk_bytes.as_numpy_array().view(np.uint8))
        return chunk_spec.prototype.buffer.from_bytes(encoded)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        raise NotImplementedError  # it depends on the data


@dataclass(frozen=True)
class NvcompCodec(_BytesCodec):
    """One algorithm of nvCOMP, a chunk a frame.

    Parameters
    ----------
    algorithm
        "ans", "bitcomp", "cascaded", "deflate", "gdeflate", "lz4", "snappy" or "zstd".
    data_type
        What the bytes are, by NumPy's name, for the algorithms that ask (`xgpuzarr.decoders.nvcomp.encode_options`).
        It helps the encoder; decoding does not need it.
    level
        Effort of the encoder, for the algorithms that have levels.

    Raises
    ------
    UnsupportedError
        nvCOMP has no such algorithm, or its encoder does not take these options.
    """

    algorithm: str
    data_type: str = "uint8"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in NVCOMP_ALGORITHMS:
            raise ValueError(f"nvcomp: algorithm must be one of {sorted(NVCOMP_ALGORITHMS)}, got {self.algorithm!r}")
        nvcomp.encode_options(self.algorithm, data_type=self.data_type, level=self.level)

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Read the codec from metadata."""
        return cls(str(data["name"]).removeprefix("nvcomp."), **_configuration(data, {"data_type", "level"}))

    def to_dict(self) -> dict[str, JSON]:
        """Write the codec to metadata."""
        config: dict[str, JSON] = {} if self.data_type == "uint8" else {"data_type": self.data_type}
        if self.level is not None:
            config["level"] = self.level
        return {"name": f"nvcomp.{self.algorithm}", "configuration": config}

    def encode_bytes(self, data: NDArray[np.uint8]) -> bytes:
        """Encode one chunk."""
        options = nvcomp.encode_options(self.algorithm, data_type=self.data_type, level=self.level)
        (frame,) = _encode_frames(self.algorithm, data, data.nbytes, options)
        return data.nbytes.to_bytes(PREFIX_NBYTES, "little") + frame

    def decode_bytes(self, encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Decode one chunk."""
        return _decode(f"nvcomp.{self.algorithm}", encoded, int.from_bytes(encoded[:PREFIX_NBYTES], "little"))


@dataclass(frozen=True)
class GDeflateCodec(_BytesCodec):
    """GDeflate in pages of 64 KiB.

    Parameters
    ----------
    level
        0 (fastest) to 12 (smallest); nvCOMP's encoder knows 0 to 5.
    """

    level: int = 5

    def __post_init__(self) -> None:
        if self.level not in range(13):
            raise ValueError(f"gdeflate: level must be 0 to 12, got {self.level!r}")

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Read the codec from metadata."""
        return cls(**_configuration(data, {"level"}))

    def to_dict(self) -> dict[str, JSON]:
        """Write the codec to metadata."""
        return {"name": "gdeflate", "configuration": {"level": self.level}}

    def encode_bytes(self, data: NDArray[np.uint8]) -> bytes:
        """Encode one chunk."""
        options = nvcomp.encode_options("gdeflate", level=min(self.level, 5))
        pages = _encode_frames("gdeflate", data, gdeflate.PAGE_NBYTES, options)
        numbers = np.array([data.nbytes, len(pages), *(len(page) for page in pages)], "<u8")
        return b"".join([numbers.tobytes(), *pages])

    def decode_bytes(self, encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Decode one chunk."""
        stated = int.from_bytes(encoded[:8], "little")
        if stated > MAX_RATIO * encoded.nbytes:
            raise ValueError(f"gdeflate: {encoded.nbytes} encoded bytes cannot hold {stated} decoded bytes")
        return _decode("gdeflate", encoded, stated)


class NvcompBatch(Codec):  # type: ignore[misc]  # numcodecs has no types
    """KvikIO's ``nvcomp_batch``, for Zarr v2: the same bytes as `NvcompCodec`.

    Parameters
    ----------
    algorithm
        As for `NvcompCodec`, in lower or upper case.
    options
        Options of KvikIO's encoders. They do not matter for reading; writing takes none.
    """

    codec_id = "nvcomp_batch"

    def __init__(self, algorithm: str, options: Mapping[str, Any] | None = None) -> None:
        self.algorithm = algorithm.lower()
        self.options = dict(options or {})
        self._codec = NvcompCodec(self.algorithm)

    def encode(self, buf: Any) -> bytes:
        """Encode one chunk."""
        if self.options:
            raise ValueError(f"nvcomp_batch: options are taken when reading only, got {self.options}")
        return self._codec.encode_bytes(ensure_contiguous_ndarray(buf).view(np.uint8))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode one chunk."""
        return ndarray_copy(self._codec.decode_bytes(ensure_contiguous_ndarray(buf).view(np.uint8)), out)

    def get_config(self) -> dict[str, Any]:
        """Write the codec to metadata."""
        return {"id": self.codec_id, "algorithm": self.algorithm, "options": self.options}


def _configuration(data: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    config = dict(data.get("configuration") or {})
    unknown = sorted(config.keys() - known)
    if unknown:
        raise ValueError(f"codec {data['name']!r}: parameter {unknown[0]!r} is not known; it has {sorted(known)}")
    return config


def _encode_frames(algorithm: str, data: NDArray[np.uint8], frame_nbytes: int, options: bytes) -> list[bytes]:
    """Encode pieces of `frame_nbytes` decoded bytes each, on the current device."""
    import cupy

    starts = np.arange(0, data.nbytes, max(frame_nbytes, 1))
    sizes = np.minimum(data.nbytes - starts, frame_nbytes)
    alignment = nvcomp.encode_alignment(algorithm, options).output
    room = -(-nvcomp.max_encoded_nbytes(algorithm, frame_nbytes, options) // alignment) * alignment
    source, out = cupy.asarray(data), cupy.empty((len(starts), room), np.uint8)
    encoded_nbytes, statuses = nvcomp.compress_batch(
        algorithm,
        cupy.asarray((source.data.ptr + starts).astype(np.uint64)),
        cupy.asarray(sizes.astype(np.uint64)),
        cupy.asarray((out.data.ptr + np.arange(len(starts)) * room).astype(np.uint64)),
        max_chunk_nbytes=frame_nbytes,
        total_nbytes=data.nbytes,
        stream=cupy.cuda.get_current_stream(),
        options=options,
    )
    for status in statuses.get().tolist():
        if status:
            raise ValueError(f"encoding {data.nbytes} bytes with {algorithm} failed: {nvcomp.status_text(status)}")
    frames, ends = out.get(), encoded_nbytes.get().tolist()
    return [frame[:end].tobytes() for frame, end in zip(frames, ends, strict=True)]


def _decode(codec: str, encoded: NDArray[np.uint8], decoded_nbytes: int) -> NDArray[np.uint8]:
    """Decode one chunk, on the host where it can."""
    decoded = np.empty(decoded_nbytes, np.uint8)
    on_host = codec not in DEVICE_ONLY
    problem = (
        decode_into(codec, memoryview(encoded), decoded) if on_host else _decode_on_device(codec, encoded, decoded)
    )
    if problem:
        raise ValueError(problem)
    return decoded


def _decode_on_device(codec: str, encoded: NDArray[np.uint8], decoded: NDArray[np.uint8]) -> str:
    """Fill `decoded` by way of the current device; "", or what is wrong."""
    import cupy

    from xgpuzarr.decoders.frames import GUARD_NBYTES, Places
    from xgpuzarr.decoders.opaque_frames import batch_type
    from xgpuzarr.kernels import launch

    status, start = launch.new_status(), np.zeros(1, np.int64)
    slab, nbytes = cupy.asarray(encoded), np.array([encoded.nbytes])
    batch = batch_type(codec)(codec, slab, start, nbytes, decoded_nbytes=decoded.nbytes, status=status)
    out = cupy.empty(batch.room_nbytes + GUARD_NBYTES, np.uint8)
    batch.decode(Places(out, out, 0, start))
    launch.check_status(status, f"codec {codec!r}")
    if len(batch.suspects()):
        return batch.describe(0)
    decoded[:] = out[: decoded.nbytes].get()
    return ""
