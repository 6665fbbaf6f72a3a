"""What does the configuration of one codec say: sizes, dtypes, and can the device undo it?

`make_step` answers for one codec. What is not known here, a codec or a parameter, becomes a step that only
zarr-python's codecs undo: never a guess.

Sources: Zarr v3 core specification, "Codecs"; zarr-extensions, ``codecs/cast_value`` and ``codecs/scale_offset``; the
numcodecs documentation for each codec of that package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.plan.steps import Content, Kind, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CHECKSUMS", "COMPRESSORS", "DEVICE_ONLY", "NVCOMP_ALGORITHMS", "ROUNDINGS", "make_step"]

NVCOMP_ALGORITHMS = frozenset({"ans", "bitcomp", "cascaded", "deflate", "gdeflate", "lz4", "snappy", "zstd"})
"""What the codecs ``nvcomp.*``, and KvikIO's ``nvcomp_batch`` of Zarr v2, may name."""

COMPRESSORS = frozenset(
    {"zstd", "lz4", "gzip", "zlib", "blosc", "gdeflate", *(f"nvcomp.{name}" for name in NVCOMP_ALGORITHMS)}
)
"""Compressors with a decoder on the device."""

DEVICE_ONLY = frozenset({"gdeflate", *(f"nvcomp.{name}" for name in NVCOMP_ALGORITHMS - {"lz4", "zstd", "deflate"})})
"""Compressors without a decoder on the host."""

CHECKSUMS = {"crc32": "start", "adler32": "start", "crc32c": "end", "fletcher32": "end"}
"""Checksums that the device verifies, and where each stands if its configuration does not say."""

ROUNDINGS = frozenset({"nearest-even", "towards-zero", "towards-positive", "towards-negative", "nearest-away"})
"""What `cast_value` may do with a value between two others."""

_NO_DEVICE_DECODER = frozenset({"lzma", "bz2", "pcodec", "zfpy", "zfp", "jenkins_lookup3"})
_OBJECT_CODECS = frozenset({"json2", "msgpack2", "pickle", "categorize", "base64"})
_FLOAT_NAMES = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


class _UnknownError(Exception):
    """A codec, or a parameter of one, that is not known here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the decoder needs, the chunk as the codec leaves it when encoding, and the reason for the host."""

    config: Mapping[str, Any]
    encoded: Content
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Given:
    """One codec as the metadata has it, and the chunk as it meets it when encoding."""

    name: str
    config: Mapping[str, Any]
    content: Content
    is_typed: bool

    @property
    def nbytes(self) -> int:
        """Size of the chunk; filters are read only where it is known."""
        assert self.content.nbytes is not None
        return self.content.nbytes

    def unknown(self, why: str) -> _UnknownError:
        return _UnknownError(f"codec {self.name!r}: {why}, so zarr-python decodes it")

    def dtypes(self, decoded: str, encoded: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Read the dtypes before and after encoding, from the parameters of these names."""
        given = self.config.get(decoded)
        if given is None and not self.is_typed:
            raise self.unknown(f"{decoded} is missing")
        dtype = self.content.dtype if given is None else self.dtype(given)
        astype = dtype if self.config.get(encoded) is None else self.dtype(self.config[encoded])
        if self.is_typed and not _same_bits(dtype, self.content.dtype):
            raise self.unknown(f"{decoded} is {dtype}, the elements are {self.content.dtype}")
        if self.nbytes % dtype.itemsize:
            raise self.unknown(f"elements of {dtype.itemsize} bytes do not make up {self.nbytes} bytes")
        return dtype, astype

    def dtype(self, name: object) -> np.dtype[Any]:
        try:
            dtype = np.dtype(name) if isinstance(name, str) else None
        except TypeError:
            dtype = None
        if dtype is None or not _is_number(dtype):
            raise self.unknown(f"{name!r} is no plain number")
        return dtype

    def scalar(self, value: object, dtype: np.dtype[Any]) -> Any:
        """Read a number of `dtype` from JSON, exactly as it stands there."""
        if dtype.kind == "f":
            number = _FLOAT_NAMES.get(value, value) if isinstance(value, str) else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                return dtype.type(number)
        elif isinstance(value, int) and not isinstance(value, bool):
            limits = np.iinfo(dtype)
            if limits.min <= value <= limits.max:
                return dtype.type(value)
        raise self.unknown(f"{value!r} is no {dtype}")

    def converted(self, dtype: np.dtype[Any], astype: np.dtype[Any]) -> Content:
        nbytes = self.nbytes // dtype.itemsize * astype.itemsize
        return Content(nbytes, astype, self.content.shape)


def make_step(
    name: str, config: Mapping[str, Any], content: Content, *, kind: Kind, is_typed: bool
) -> tuple[Step, Content]:
    """Step that undoes a codec, and the chunk as that codec leaves it when encoding.

    Parameters
    ----------
    name
        Name of the codec, without prefixes.
    config
        Its configuration.
    content
        The chunk as the codec meets it when encoding.
    kind
        What the codec turns into what.
    is_typed
        True for array codecs of Zarr v3, which meet elements of a dtype. The filters of Zarr v2 take bytes for what
        their configuration says.
    """
    try:
        facts = _facts(_Given(name, config, content, is_typed))
    except _UnknownError as error:
        step = Step(name, dict(config), kind, None, content.nbytes, str(error), by_zarr=True)
        return step, replace(content, nbytes=None)
    return Step(name, facts.config, kind, facts.encoded.nbytes, content.nbytes, facts.reason), facts.encoded


def _facts(given: _Given) -> _Facts:
    name = given.name
    if name in COMPRESSORS:
        return _Facts(dict(given.config), replace(given.content, nbytes=None))
    if name in _NO_DEVICE_DECODER:
        raise _UnknownError(f"codec {name!r} has no GPU decoder")
    if name.startswith("vlen") or name in _OBJECT_CODECS:
        raise _UnknownError(f"codec {name!r} makes objects, which live on the host")
    if name not in _PARSERS:
        raise _UnknownError(f"codec {name!r} is decoded by zarr-python")
    parameters, parse = _PARSERS[name]
    unknown = sorted(given.config.keys() - parameters)
    if unknown:
        raise given.unknown(f"parameter {unknown[0]!r} is not known")
    if given.content.nbytes is None and name not in CHECKSUMS:
        raise given.unknown("the size of its chunks depends on the data")
    return parse(given)


def _checksum(given: _Given) -> _Facts:
    location = given.config.get("location") or CHECKSUMS[given.name]
    if location not in ("start", "end"):
        raise given.unknown(f"location {location!r} is not known")
    nbytes = given.content.nbytes
    return _Facts({"location": location}, replace(given.content, nbytes=None if nbytes is None else nbytes + 4))


def _shuffle(given: _Given) -> _Facts:
    size = given.config.get("elementsize", 4)
    if not isinstance(size, int) or (size > 1 and given.nbytes % size):
        raise given.unknown(f"elements of {size!r} bytes do not make up {given.nbytes} bytes")
    return _Facts({"elementsize": max(size, 1)}, given.content)


def _delta(given: _Given) -> _Facts:
    dtype, astype = given.dtypes("dtype", "astype")
    if "b" in (dtype.kind, astype.kind):
        raise given.unknown("bool has no differences")
    # NumPy sums in the dtype that both promote to, and for uint64 with a signed one that is a float
    is_exact = np.promote_types(dtype, astype).kind in "iu"
    reason = "" if is_exact else "codec 'delta' sums floats, and their sum depends on the order"
    return _Facts({"dtype": dtype, "astype": astype}, given.converted(dtype, astype), reason)


def _fixed_scale_offset(given: _Given) -> _Facts:
    dtype, astype = given.dtypes("dtype", "astype")
    numbers = {key: given.config.get(key) for key in ("scale", "offset")}
    for key, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise given.unknown(f"{key} is {value!r}, no number")
    work = astype if astype.kind == "f" else np.dtype(np.float64)
    known = {"dtype": dtype, "astype": astype, **numbers}
    return _Facts(known, given.converted(dtype, astype), _half_reason(given.name, work, dtype))


def _convert(given: _Given) -> _Facts:
    names = ("decode_dtype", "encode_dtype") if given.name == "astype" else ("dtype", "astype")
    dtype, astype = given.dtypes(*names)
    if given.name == "quantize" and given.is_typed and astype != dtype:
        raise given.unknown("in Zarr v3 it keeps the dtype")
    known = {"dtype": dtype, "astype": astype}
    return _Facts(known, given.converted(dtype, astype), _half_reason(given.name, astype, dtype))


def _bitround(given: _Given) -> _Facts:
    if given.is_typed and given.content.dtype.kind != "f":
        raise given.unknown(f"it rounds floats, the elements are {given.content.dtype}")
    return _Facts({}, given.content)  # the bits are gone; decoding changes nothing


def _packbits(given: _Given) -> _Facts:
    if given.is_typed and given.content.dtype.kind != "b":
        raise given.unknown(f"it packs bool, the elements are {given.content.dtype}")
    nbytes = 1 + -(-given.nbytes // 8)
    return _Facts({"n_elements": given.nbytes}, Content(nbytes, np.dtype(np.uint8), (nbytes,)))


def _transpose(given: _Given) -> _Facts:
    order, shape = tuple(given.config.get("order", ())), given.content.shape
    if sorted(order) != list(range(len(shape))):
        raise given.unknown(f"order {order!r} does not fit {len(shape)} axes")
    stored = tuple(shape[axis] for axis in order)
    known = {"order": order, "shape": stored, "itemsize": given.content.dtype.itemsize}
    return _Facts(known, replace(given.content, shape=stored))


def _scale_offset(given: _Given) -> _Facts:
    dtype = given.content.dtype
    if not _is_number(dtype) or dtype.kind == "b" or not dtype.isnative:
        raise given.unknown(f"it scales numbers, the elements are {dtype}")
    numbers = {key: given.scalar(given.config.get(key, usual), dtype) for key, usual in (("scale", 1), ("offset", 0))}
    if numbers["scale"] == 0:
        raise given.unknown("scale is 0")
    return _Facts({"dtype": dtype, **numbers}, given.content)


def _cast_value(given: _Given) -> _Facts:
    dtype, astype, config = given.content.dtype, given.dtype(given.config.get("data_type")), given.config
    rounding, out_of_range = config.get("rounding", "nearest-even"), config.get("out_of_range")
    if not all(_is_number(d) and d.kind != "b" and d.isnative for d in (dtype, astype)):
        raise given.unknown(f"it casts numbers, not {astype} to {dtype}")
    if rounding not in ROUNDINGS or out_of_range not in (None, "clamp", "wrap"):
        raise given.unknown(f"rounding {rounding!r} or out_of_range {out_of_range!r} is not known")
    if dtype.kind == "f" and rounding != "nearest-even" and not np.can_cast(astype, dtype):
        raise given.unknown(f"rounding {rounding!r} to {dtype} is not done here")
    pairs = dict((config.get("scalar_map") or {}).get("decode") or ())
    mapped = tuple((given.scalar(key, astype), given.scalar(value, dtype)) for key, value in pairs.items())
    known = {"dtype": dtype, "astype": astype, "rounding": rounding, "out_of_range": out_of_range, "mapped": mapped}
    return _Facts(known, given.converted(dtype, astype), _half_reason(given.name, astype, dtype))


_PARSERS: dict[str, tuple[frozenset[str], Callable[[_Given], _Facts]]] = {
    **dict.fromkeys(CHECKSUMS, (frozenset({"location"}), _checksum)),
    "fletcher32": (frozenset(), _checksum),
    "astype": (frozenset({"encode_dtype", "decode_dtype"}), _convert),
    "bitround": (frozenset({"keepbits"}), _bitround),
    "cast_value": (frozenset({"data_type", "rounding", "out_of_range", "scalar_map"}), _cast_value),
    "delta": (frozenset({"dtype", "astype"}), _delta),
    "fixedscaleoffset": (frozenset({"scale", "offset", "dtype", "astype"}), _fixed_scale_offset),
    "packbits": (frozenset(), _packbits),
    "quantize": (frozenset({"digits", "dtype", "astype"}), _convert),
    "scale_offset": (frozenset({"scale", "offset"}), _scale_offset),
    "shuffle": (frozenset({"elementsize"}), _shuffle),
    "transpose": (frozenset({"order"}), _transpose),
}
"""For each checksum and filter the parameters it may have, and who reads them."""


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Bool, integers and floats that CuPy has too."""
    return dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize <= 8)


def _same_bits(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Say whether elements are the same numbers in either dtype; times are 64-bit integers."""
    return dtype == other or (other.kind in "Mm" and dtype == np.dtype(np.int64).newbyteorder(other.byteorder))


def _half_reason(name: str, source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Reason for the host where a conversion rounds to float16."""
    rounds = target == np.float16 and source not in (np.float16, np.bool_, np.int8, np.uint8)
    return f"codec {name!r} rounds to float16, which CuPy does in two roundings" if rounds else ""
