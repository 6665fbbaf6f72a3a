"""What can be wrong with an encoded chunk, as far as can be told without decoding it?

Device decoders trust their input: a frame that holds more than its output has room for overruns it. So chunks are
checked before one sees them, most of them by a kernel (`xgpuzarr.kernels.launch_frames`).
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Problem"]


class Problem(IntEnum):
    """What a check found. From `DICTIONARY` on the chunk may be valid, but is not known to suit the device decoder."""

    NONE = 0
    TOO_SHORT = 1
    MAGIC = 2
    HEADER = 3
    SIZE = 4
    BLOCK = 5
    DICTIONARY = 64
    SIZE_UNKNOWN = 65
    MORE_FRAMES = 66
