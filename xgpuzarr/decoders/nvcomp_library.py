"""How is nvCOMP's C library reached? Loaded once through ctypes, its entry points with their argument types.

Sources: the headers ``nvcomp/shared_types.h`` and ``nvcomp/version.h`` of nvCOMP 6.0.0.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from xgpuzarr.errors import MissingDependencyError, XGpuZarrError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTIONS_NBYTES", "Options", "check", "entry_point", "library_version", "pack_options", "status_text"]

OPTIONS_NBYTES = 64
_INSTALL = "pip install 'xgpuzarr[cu13]' for CUDA 13, or 'xgpuzarr[cu12]' for CUDA 12"


class Options(ctypes.Structure):
    """Any of nvCOMP's option structs: all are 64 bytes and passed by value."""

    _fields_ = [("bytes", ctypes.c_uint64 * (OPTIONS_NBYTES // 8))]


class _Properties(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32)]


# Argument types of nvcompBatched<Algorithm><call>; p stands for a pointer or a stream, n for a size_t, o for options.
_SIGNATURES = {
    "CompressAsync": "ppnnpnppopp",
    "CompressGetMaxOutputChunkSize": "nop",
    "CompressGetRequiredAlignments": "op",
    "CompressGetTempSize": "nnopnp",
    "DecompressAsync": "ppppnpnpopp",
    "DecompressGetRequiredAlignments": "op",
    "DecompressGetTempSize": "nnopnp",
    "GetDecompressSizeAsync": "pppnp",
}
_C_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_size_t, "o": Options}


@functools.cache
def entry_point(symbol: str, call: str) -> Callable[..., int]:
    """Return the entry point with its argument types set: without them ctypes would cut 64-bit addresses to int."""
    entry: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *(_C_TYPES[c] for c in _SIGNATURES[call]))(
        (f"nvcompBatched{symbol}{call}", _library())
    )
    return entry


def check(status: int, doing: str) -> None:
    """Raise `XGpuZarrError` if a call did not succeed."""
    if status:
        raise XGpuZarrError(f"{doing} failed: {status_text(status)}")


def status_text(status: int) -> str:
    """Return what nvCOMP says of a status, with its number."""
    text = _library().nvcompGetStatusString(status)
    return f"{text.decode() if text else 'unknown status'} (nvCOMP status {status})"


@functools.cache
def library_version() -> tuple[int, int, int]:
    """Version of the nvCOMP library in use. Needs no GPU.

    Raises
    ------
    MissingDependencyError
        nvCOMP is absent, or its major version is not 6.
    """
    return _version(_library())


def _version(library: ctypes.CDLL) -> tuple[int, int, int]:
    properties = _Properties()
    library.nvcompGetProperties(ctypes.byref(properties))
    # nvcomp/version.h: major * 1000 + minor * 100 + patch
    return properties.version // 1000, properties.version % 1000 // 100, properties.version % 100


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        from nvidia import libnvcomp
    except ImportError as error:
        raise MissingDependencyError(f"nvCOMP 6 is needed to decode on the device: {_INSTALL}") from error
    library: ctypes.CDLL | None = libnvcomp.load_library()
    if library is None:
        raise MissingDependencyError(f"the nvCOMP package is installed, its library does not load: {_INSTALL}")
    version = _version(library)
    if version[0] != 6:
        # Entry points were renamed at 6.0, and option structs may change at the next major version.
        found = ".".join(str(part) for part in version)
        raise MissingDependencyError(f"nvCOMP 6 is needed to decode on the device, got {found}: {_INSTALL}")
    library.nvcompGetStatusString.argtypes = [ctypes.c_int]
    library.nvcompGetStatusString.restype = ctypes.c_char_p
    return library


def pack_options(words: tuple[int, ...]) -> bytes:
    """Make an option struct that starts with some uint32 words, zeros behind them."""
    return b"".join(word.to_bytes(4, "little") for word in words).ljust(OPTIONS_NBYTES, b"\0")
