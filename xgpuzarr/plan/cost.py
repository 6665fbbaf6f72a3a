"""Where is a read decoded sooner, on the device or on the host's cores?

A GPU decodes each deflate stream serially, at the pace of one slow thread: it wins by the number of streams. A few
large gzip or zlib chunks are done sooner by the host's cores, copy to the device included. All other codecs with a
device decoder are fast enough there that nothing is weighed.

The tables are decoded GB/s as measured: the device's on one H200 (nvCOMP 6.0.0, ERA5-like float32, decoding alone), the
host's on one core of a Xeon (isal 1.9, c-blosc 1.21, the same data). They say what is larger, not how large it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from xgpuzarr.plan.codec_chain import CodecChain
    from xgpuzarr.plan.steps import Route

__all__ = ["Decision", "decide"]

DEFLATE_STREAM_GBPS = 0.0125
"""One deflate stream on the device: 64 chunks of 4 MB came at 0.8 GB/s, 384 of them at 4.6."""

DEFLATE_DEVICE_GBPS = ((64 << 10, 15.0), (1 << 20, 4.7))
"""(bytes of a stream, GB/s of the whole device) with more streams than it takes to fill it."""

COPY_GBPS = 40.0
"""From page-locked host memory to the device while the cores decode; 55 when they do not."""

BLOSC_ZLIB_CORE_GBPS = 0.33
"""c-blosc's zlib on one core, of data that compress well; noise passes at up to 1.2."""

DEVICE_START_S = 1.5e-3
"""Launches and waiting of a device read, however small."""

BLOSC_BLOCK_NBYTES = 1 << 20
"""Largest block that c-blosc makes for zlib; it splits each into one stream a byte of an element."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the chunks of one read are decoded, and why not where they could be; "" where there was no choice."""

    route: Route
    reason: str = ""


def decide(
    chain: CodecChain,
    *,
    n_chunks: int,
    chunk_nbytes: int,
    itemsize: int,
    n_threads: int,
    inflate_gbps: float,
    wanted: Literal["auto", "device", "host"] = "auto",
) -> Decision:
    """Choose the route of one read.

    Parameters
    ----------
    chain
        The array's codec chain.
    n_chunks
        Chunks that the read touches.
    chunk_nbytes
        Decoded size of a chunk, in bytes.
    itemsize
        Size of an element, in bytes.
    n_threads
        Host threads that may decode.
    inflate_gbps
        What one of them inflates, in GB/s.
    wanted
        "device" or "host" forces a route, as far as the chain allows it.
    """
    if chain.route == "host":
        return Decision("host", "; ".join(chain.reasons))
    if wanted != "auto":
        return Decision(wanted, f"route={wanted!r} was asked for")
    stream_nbytes, core_gbps = _deflate(chain, chunk_nbytes, itemsize, inflate_gbps)
    if not stream_nbytes or not n_chunks:
        return Decision("device")
    total_nbytes = n_chunks * chunk_nbytes
    device_gbps = min(total_nbytes / stream_nbytes * DEFLATE_STREAM_GBPS, _saturated_gbps(stream_nbytes))
    host_gbps = min(min(n_threads, n_chunks) * core_gbps, COPY_GBPS)
    device_s, host_s = DEVICE_START_S + total_nbytes / device_gbps / 1e9, total_nbytes / host_gbps / 1e9
    rates = f"{device_gbps:.2g} GB/s on the device, {host_gbps:.2g} GB/s on {n_threads} host threads"
    if host_s < device_s:
        return Decision("host", f"{n_chunks} chunks of {chunk_nbytes} bytes inflate at about {rates}")
    return Decision("device", f"{n_chunks} chunks of {chunk_nbytes} bytes inflate at about {rates}")


def _deflate(chain: CodecChain, chunk_nbytes: int, itemsize: int, inflate_gbps: float) -> tuple[int, float]:
    """Bytes of one deflate stream, and GB/s of one core; 0 for a chain that deflates nothing."""
    compressor = chain.compressor
    if compressor is None:
        return 0, inflate_gbps
    if compressor.codec in ("gzip", "zlib"):
        return max(chunk_nbytes, 1), inflate_gbps
    if compressor.codec == "blosc" and compressor.config.get("cname") == "zlib":
        block_nbytes = min(chunk_nbytes, compressor.config.get("blocksize") or BLOSC_BLOCK_NBYTES)
        return max(block_nbytes // min(itemsize, 16), 1), BLOSC_ZLIB_CORE_GBPS
    return 0, inflate_gbps


def _saturated_gbps(stream_nbytes: int) -> float:
    """Read the table, straight between its rows over the logarithm of the size, level outside them."""
    sizes, rates = zip(*DEFLATE_DEVICE_GBPS, strict=True)
    return float(np.interp(math.log(stream_nbytes), [math.log(size) for size in sizes], rates))
