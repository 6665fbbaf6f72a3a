"""Do the checksum codecs of a chain agree with the bytes they stand beside?

Each adds 4 bytes, little-endian, before or behind the bytes that it sums (numcodecs' ``checksum32`` and ``fletcher32``;
Zarr v3's ``crc32c``). `check_on_host` looks at one chunk, `check_on_device` at a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs import Adler32, Fletcher32
from numcodecs.checksum32 import CRC32, CRC32C

if TYPE_CHECKING:
    import cupy
    from numpy.typing import NDArray

    from xgpuzarr.plan.steps import Step

__all__ = ["NBYTES", "check_on_device", "check_on_host"]

NBYTES = 4
"""Size of every checksum here, in bytes."""

_CODECS = {"crc32": CRC32, "crc32c": CRC32C, "adler32": Adler32}


def check_on_host(step: Step, encoded: memoryview | NDArray[np.uint8]) -> tuple[NDArray[np.uint8], str]:
    """Undo a checksum codec on one chunk.

    Returns
    -------
    payload
        uint8, 1-D: the bytes without the checksum; a view.
    problem
        "" if they agree with it, else what is wrong.
    """
    data = np.frombuffer(encoded, np.uint8)
    location = step.config["location"]
    codec: Any = Fletcher32() if step.codec == "fletcher32" else _CODECS[step.codec](location=location)
    payload = data[NBYTES:] if location == "start" else data[:-NBYTES]
    if len(data) < NBYTES:
        return payload, f"codec {step.codec!r}: {len(data)} bytes have no room for a checksum"
    try:
        codec.decode(data)
    except RuntimeError as error:
        return payload, f"codec {step.codec!r}: {error}"
    return payload, ""


def check_on_device(
    step: Step, buffer: cupy.ndarray, offset: NDArray[np.int64], nbytes: NDArray[np.int64], *, status: cupy.ndarray
) -> tuple[NDArray[np.int64], NDArray[np.int64], cupy.ndarray]:
    """Undo a checksum codec on a batch of chunks, on the current stream.

    Parameters
    ----------
    buffer
        uint8, 1-D, on the device.
    offset, nbytes
        int64, shape (n,), host memory: where each chunk lies in `buffer`, checksum included, in bytes. Every chunk has
        room for its checksum.
    status
        From `xgpuzarr.kernels.launch.new_status`.

    Returns
    -------
    offset, nbytes
        Where its bytes lie without the checksum.
    is_bad
        int32, shape (n,), on the device: 1 where they do not agree with it, else 0.
    """
    import cupy

    from xgpuzarr.kernels import launch_checksums
    from xgpuzarr.kernels.arguments import upload

    rest = nbytes - NBYTES
    at_start = step.config["location"] == "start"
    payload, stored = (offset + NBYTES, offset) if at_start else (offset, offset + rest)
    is_bad = cupy.zeros(len(offset), np.int32)
    start, size, stored_at = upload(payload, rest, stored)
    found = getattr(launch_checksums, step.codec)(buffer, start, size, status=status)
    launch_checksums.compare(found, buffer, stored_at, skip=is_bad, code=1, problem=is_bad)
    return payload, rest, is_bad
