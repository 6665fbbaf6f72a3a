"""How is a batch of frames handed to a decoder that trusts its input? The launchers of ``frames.cu``.

==============  ====================================================================================================
`check_frames`  what is wrong with each encoded chunk, as far as can be told without decoding it
`point_frames`  the addresses and sizes that the decoder takes; a dummy frame stands in for each frame to leave out
`dummy_frame`   that frame, kept on the device
`judge_frames`  which frames failed, from sizes, statuses and the guard zones behind the outputs
==============  ====================================================================================================

None waits for another's result on the host: what `check_frames` finds wrong, `point_frames` leaves out on the device.
The rules of `xgpuzarr.kernels.launch` hold.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.kernels.arguments import check_bytes, device_address, device_columns, launch_items
from xgpuzarr.kernels.compile import device_constant

if TYPE_CHECKING:
    import cupy

    from xgpuzarr.kernels.arguments import Column

__all__ = ["CODECS", "check_frames", "dummy_frame", "judge_frames", "point_frames"]

_SOURCE = "frames.cu"

CODECS = ("zstd", "lz4", "gzip", "zlib", "deflate", "snappy")
"""What `check_frames` knows, in the order of ``FrameCodec``. "lz4" is numcodecs' framing."""

# Dummy frames, which stand in for frames to leave out, decode to one byte: no more than any frame does.
_PLAIN = b"x"
_STORED = b"\x01\x01\x00\xfe\xff" + _PLAIN  # a deflate stream of one stored block
_DUMMIES = {
    "zstd": b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00" + _PLAIN,
    "lz4": b"\x10" + _PLAIN,
    "gzip": b"\x1f\x8b\x08" + bytes(6) + b"\xff" + _STORED + struct.pack("<2I", zlib.crc32(_PLAIN), len(_PLAIN)),
    "deflate": _STORED,
    "snappy": b"\x01\x00" + _PLAIN,
}
_DUMMY_OUT = 64  # where the dummies' output lies behind the dummy frame: a multiple of every alignment asked for


def check_frames(
    codec: str,
    encoded: cupy.ndarray,
    offset: Column,
    nbytes: Column,
    *,
    expected_nbytes: int,
    room_nbytes: int = 0,
    prefix_nbytes: int = 0,
    skip: cupy.ndarray | None = None,
) -> cupy.ndarray:
    """Check encoded chunks against what they should decode to.

    Of zstd all block headers of the first frame are looked at, not only the first: `Problem.BLOCK` where they run past
    the chunk or cannot add up to the stated size, `Problem.MORE_FRAMES` where they are too many to be walked.

    Parameters
    ----------
    codec
        One of `CODECS`.
    encoded
        Contiguous bytes, uint8.
    offset, nbytes
        int64 ``(n_chunks,)``: where each chunk lies in `encoded`, in bytes.
    expected_nbytes
        Decoded size of every chunk, in bytes; at least 1.
    room_nbytes
        Room of each output, in bytes. A zstd frame that does not state its size has no problem if its blocks cannot
        decode to more: `expected_nbytes` rounded up to 128 KiB is enough for what the usual encoders write. Whether it
        decodes to `expected_nbytes` is for the caller to compare.
    prefix_nbytes
        4 if the decoded size stands before each frame, little-endian; else 0. That before "lz4" is part of its format.
    skip
        int32 ``(n_chunks,)``: what is known to be wrong with chunks; those with another number than 0 keep it.

    Returns
    -------
    cupy.ndarray
        int32 ``(n_chunks,)``: numbers of `xgpuzarr.plan.frames.Problem`.
    """
    import cupy

    check_bytes(encoded, "encoded")
    n_chunks = len(offset)
    problem = cupy.empty(n_chunks, dtype=np.int32)
    launch_items(
        _SOURCE,
        "check_frames",
        n_chunks,
        32,
        encoded,
        encoded.nbytes,
        *device_columns(n_chunks, offset, nbytes),
        skip,
        n_chunks,
        np.int32(CODECS.index(codec)),
        prefix_nbytes,
        expected_nbytes,
        room_nbytes,
        problem,
    )
    return problem


def point_frames(
    algorithm: str,
    source: cupy.ndarray,
    source_offset: Column,
    source_nbytes: Column,
    *,
    out: cupy.ndarray,
    out_offset: Column,
    out_nbytes: Column,
    skip: cupy.ndarray,
    guard_nbytes: int,
    status: cupy.ndarray,
) -> cupy.ndarray:
    """Make the columns that `xgpuzarr.decoders.nvcomp.decompress_batch` takes, and write the guard zones.

    Parameters
    ----------
    algorithm
        An algorithm of nvCOMP that has a dummy frame: "zstd", "lz4", "gzip", "deflate" or "snappy".
    source, out
        Contiguous bytes, uint8.
    source_offset, source_nbytes
        int64 ``(n_frames,)``: where each frame lies in `source`, in bytes.
    out_offset, out_nbytes
        int64 ``(n_frames,)``: where each output lies in `out`, in bytes.
    skip
        int32 ``(n_frames,)``: frames with another number than 0 are left out, whatever their other columns hold. The
        dummy frames in their place decode into a buffer of their own; their statuses and sizes mean nothing.
    guard_nbytes
        Size of the guard zone to write behind each output, in bytes; 0 for none.
    status
        From `xgpuzarr.kernels.launch.new_status`.

    Returns
    -------
    cupy.ndarray
        uint64 ``(4, n_frames)``: address and size of each frame, address and room of each output.
    """
    import cupy

    check_bytes(source, "source")
    check_bytes(out, "out")
    n_frames = len(source_offset)
    columns = cupy.empty((4, n_frames), dtype=np.uint64)
    dummy_address = device_address(dummy_frame(algorithm))
    launch_items(
        _SOURCE,
        "point_frames",
        n_frames,
        64,
        device_address(source),
        source.nbytes,
        device_address(out),
        out,
        out.nbytes,
        *device_columns(n_frames, source_offset, source_nbytes, out_offset, out_nbytes),
        skip,
        n_frames,
        dummy_address,
        len(_DUMMIES[algorithm]),
        dummy_address + np.uint64(_DUMMY_OUT),
        len(_PLAIN),
        guard_nbytes,
        columns,
        status,
    )
    return columns


def dummy_frame(algorithm: str) -> cupy.ndarray:
    """Bytes of the dummy frame of an algorithm, uint8, and behind it the room for its output; kept for all time."""
    frame = _DUMMIES[algorithm].ljust(2 * _DUMMY_OUT, b"\0")
    return device_constant(f"dummy of {algorithm}", lambda: np.frombuffer(frame, np.uint8))


def judge_frames(
    actual_nbytes: cupy.ndarray,
    statuses: cupy.ndarray,
    *,
    out: cupy.ndarray,
    out_offset: Column,
    out_nbytes: Column,
    skip: cupy.ndarray,
    guard_nbytes: int,
    code: int,
    problem: cupy.ndarray,
    overrun: cupy.ndarray,
    room_nbytes: Column | None = None,
    chunk: Column | None = None,
) -> None:
    """Note which frames did not decode to their sizes, or wrote into a guard zone.

    Parameters
    ----------
    actual_nbytes, statuses
        From `xgpuzarr.decoders.nvcomp.decompress_batch`.
    out, out_offset, out_nbytes, skip, guard_nbytes
        As given to `point_frames`; the sizes are those that the frames must decode to exactly.
    code
        What to store in `problem`, other than 0.
    problem
        int32 ``(n_chunks,)``: the chunk of a failed frame gets `code`, others stay. May be `skip` where frame f is
        chunk f.
    overrun
        int32 ``(1,)``: gets `code` if a guard zone is broken. Then any output may be overwritten by a neighbour.
    room_nbytes
        int64 ``(n_frames,)``: the sizes given to `point_frames`, if those were others than `out_nbytes`.
    chunk
        int64 ``(n_frames,)``: the chunk of each frame; by default frame f is chunk f.
    """
    n_frames = len(out_offset)
    if room_nbytes is None:
        room_nbytes = out_nbytes
    launch_items(
        _SOURCE,
        "judge_frames",
        n_frames,
        64,
        actual_nbytes,
        statuses,
        out,
        out.nbytes,
        *device_columns(n_frames, out_offset, out_nbytes, room_nbytes),
        skip,
        *(device_columns(n_frames, chunk) if chunk is not None else [None]),
        n_frames,
        guard_nbytes,
        np.int32(code),
        problem,
        problem.size,
        overrun,
    )
