"""How is a filter undone, for a whole batch of chunks at once, on the device or the host?

A batch is a 2-D uint8 array, one chunk a row. Every function here is one expression over the array namespace `xp`,
NumPy or CuPy, so both sides run the same code. CuPy has neither byte-swapped nor datetime dtypes: elements are loaded
into native byte order and stored back, and what is no plain number stays bytes. What touches the values of float32
goes through `xgpuzarr.float32`.

Sources: numcodecs, whose results these are, bit for bit; zarr-extensions, ``codecs/cast_value`` and
``codecs/scale_offset``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr import float32

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xgpuzarr.plan.steps import Step

__all__ = ["refusal", "undo"]

type Array = Any
"""numpy.ndarray or cupy.ndarray."""


def undo(step: Step, batch: Array, xp: Any) -> tuple[Array, Array | None]:
    """Undo one filter.

    Parameters
    ----------
    step
        A step of `CodecChain.filters`, but no checksum.
    batch
        uint8, shape ``(n_chunks, step.encoded_nbytes)``, C-contiguous.
    xp
        numpy or cupy, whichever `batch` is of. CuPy's work is queued on the current stream.

    Returns
    -------
    batch
        uint8, shape ``(n_chunks, step.decoded_nbytes)``, C-contiguous; may share memory with the given one.
    is_bad
        bool, shape ``(n_chunks,)``: the row means nothing, because the chunk holds what its codec cannot have written,
        or on the device what only the host converts as NumPy does. None where that cannot be.
    """
    with np.errstate(all="ignore"):  # as on the device, where nothing warns
        result: tuple[Array, Array | None] = _UNDO[step.codec](step.config, batch, xp)
    return result


def refusal(step: Step) -> str:
    """Say what is wrong with a chunk that `undo` finds bad on the host."""
    return f"codec {step.codec!r}: {_REFUSALS[step.codec]}"


_REFUSALS = {
    "cast_value": "a value is out of range of the dtype",
    "packbits": "the first byte is not the number of padding bits",
    "scale_offset": "a value is no multiple of the scale, or out of range of the dtype",
}


def _load(batch: Array, dtype: np.dtype[Any], xp: Any) -> Array:
    """Elements of each row, in native byte order, shape (n_chunks, n_elements)."""
    return _swapped(batch, dtype, xp).view(dtype.newbyteorder("="))


def _store(values: Array, dtype: np.dtype[Any], xp: Any) -> Array:
    """Bytes of native elements of each row, in the byte order of `dtype`."""
    return _swapped(xp.ascontiguousarray(values).view(np.uint8), dtype, xp)


def _swapped(batch: Array, dtype: np.dtype[Any], xp: Any) -> Array:
    """Turn around the bytes of every element, unless `dtype` is in native byte order."""
    if dtype.isnative:
        return batch
    words = batch.reshape(len(batch), -1, dtype.itemsize)
    return xp.ascontiguousarray(words[:, :, ::-1]).reshape(batch.shape)


def _undo_bytes(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, None]:
    stored, decoded = config["dtype"], config["decoded_dtype"]
    if stored == decoded:
        return batch, None
    return _swapped(batch, stored if decoded.isnative else decoded, xp), None


def _undo_transpose(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, None]:
    word = _WORDS.get(config["itemsize"])
    if word is None:
        elements = batch.reshape(len(batch), *config["shape"], config["itemsize"])
    else:
        elements = batch.view(word).reshape(len(batch), *config["shape"], 1)
    back = np.argsort(config["order"])
    moved = xp.ascontiguousarray(elements.transpose(0, *(1 + back).tolist(), len(back) + 1))
    return moved.reshape(len(batch), -1).view(np.uint8), None


_FLOAT64 = np.dtype(np.float64)
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def _undo_shuffle(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, None]:
    planes = batch.reshape(len(batch), config["elementsize"], -1)
    return xp.ascontiguousarray(planes.transpose(0, 2, 1)).reshape(batch.shape), None


def _undo_bitround(_config: Mapping[str, Any], batch: Array, _xp: Any) -> tuple[Array, None]:
    return batch, None


def _undo_packbits(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, Array]:
    n_elements = config["n_elements"]
    is_bad = batch[:, 0] != -n_elements % 8
    bits = batch[:, 1:, None] >> xp.arange(8, dtype=np.uint8)[::-1] & np.uint8(1)
    return xp.ascontiguousarray(bits.reshape(len(batch), -1)[:, :n_elements]), is_bad


def _undo_delta(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, None]:
    dtype, astype = config["dtype"], config["astype"]
    steps, native = _load(batch, astype, xp), dtype.newbyteorder("=")
    if np.promote_types(dtype, astype).kind == "f":
        # one sum after another, in the dtype that NumPy takes for it; only the host gets here
        values = np.empty(steps.shape, native)
        np.cumsum(steps, axis=1, out=values)
    else:
        values = xp.cumsum(steps.astype(native), axis=1, dtype=native)  # modulo 2**bits
    return _store(values, dtype, xp), None


def _undo_fixed_scale_offset(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, Array | None]:
    steps = _load(batch, config["astype"], xp)
    work = steps.dtype if steps.dtype.kind == "f" else np.dtype(np.float64)
    values = _unscaled(steps.astype(work, copy=False), work.type(config["scale"]), work.type(config["offset"]))
    return _converted(values, config["dtype"], xp)


def _unscaled(values: Array, scale: np.generic, offset: np.generic) -> Array:
    quotients = float32.arithmetic(np.divide, values, scale)
    return float32.arithmetic(np.add, quotients, offset, out=quotients)


def _undo_conversion(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, Array | None]:
    return _converted(_load(batch, config["astype"], xp), config["dtype"], xp)


def _converted(values: Array, dtype: np.dtype[Any], xp: Any) -> tuple[Array, Array | None]:
    """Bytes of the values as `dtype`, as C converts them.

    C leaves it undefined what becomes of a float outside the range of an integer. NumPy gives what the host's
    processor makes of it, and the device makes something else: there such rows are bad.
    """
    is_bad = None
    if xp is not np and values.dtype.kind == "f" and dtype.kind in "iu":
        least, beyond = _float_range(dtype)
        whole = xp.trunc(float32.convert(values, _FLOAT64))
        is_bad = ~((whole >= least) & (whole < beyond)).all(axis=1)
    return _store(float32.convert(values, dtype.newbyteorder("=")), dtype, xp), is_bad


def _float_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Least value of an integer dtype, and the number behind its greatest value, which unlike that is a float."""
    limits = np.iinfo(dtype)
    return float(limits.min), float(int(limits.max) + 1)


def _undo_scale_offset(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, Array | None]:
    dtype, scale, offset = config["dtype"], config["scale"], config["offset"]
    values = _load(batch, dtype, xp)
    if dtype.kind == "f":
        return _store(_unscaled(values, scale, offset), dtype, xp), None
    is_wrong = values % scale != 0
    if dtype.itemsize < 8:  # 64 bits hold every sum
        wide = values.astype(np.int64) // np.int64(scale) + np.int64(offset)
        limits = np.iinfo(dtype)
        is_wrong |= (wide < limits.min) | (wide > limits.max)
        return _store(wide.astype(dtype), dtype, xp), is_wrong.any(axis=1)
    if scale == -1:  # the quotient of the least number is none, but its sum may be one
        sums = offset - values
        is_wrong |= ((offset ^ values) & (offset ^ sums)) < 0
    else:
        quotients = values // scale
        sums = quotients + offset  # modulo 2**64: a sum that passed the end lies on the wrong side
        is_wrong |= (sums < quotients) if offset >= 0 else (sums > quotients)
    return _store(sums, dtype, xp), is_wrong.any(axis=1)


def _undo_cast_value(config: Mapping[str, Any], batch: Array, xp: Any) -> tuple[Array, Array | None]:
    dtype, astype = config["dtype"], config["astype"]
    given = _load(batch, astype, xp)
    if dtype.kind == "f":
        values, is_wrong = _to_float(given, dtype, config["out_of_range"], xp)
    else:
        values, is_wrong = _to_integer(given, dtype, config["rounding"], config["out_of_range"], xp)
    for key, value in reversed(config["mapped"]):
        is_key = given != given if key != key else float32.equal(given, key)  # noqa: PLR0124  # NaN
        values = xp.where(is_key, value, values)
        is_wrong = is_wrong & ~is_key
    return _store(values.astype(dtype, copy=False), dtype, xp), is_wrong.any(axis=1)


def _to_float(given: Array, dtype: np.dtype[Any], out_of_range: str | None, xp: Any) -> tuple[Array, Array]:
    """Nearest floats; what becomes infinite is out of range, unless it was or is clamped."""
    values = float32.convert(given, dtype)
    if out_of_range == "clamp":
        return values, xp.zeros(values.shape, np.bool_)
    was_finite = xp.isfinite(given) if given.dtype.kind == "f" else True
    return values, xp.isinf(values) & was_finite


def _to_integer(
    given: Array, dtype: np.dtype[Any], rounding: str, out_of_range: str | None, xp: Any
) -> tuple[Array, Array]:
    limits = np.iinfo(dtype)
    if given.dtype.kind != "f":
        return _integer_to_integer(given, dtype, out_of_range, xp)
    rounded = _ROUND[rounding](float32.convert(given, _FLOAT64), xp)
    is_wrong = ~xp.isfinite(rounded)
    least, beyond = _float_range(dtype)
    is_low, is_high = rounded < least, rounded >= beyond
    if out_of_range == "wrap":
        return _wrapped(xp.where(is_wrong, 0.0, rounded), dtype, xp), is_wrong
    is_outside = is_low | is_high
    inside = xp.where(is_outside | is_wrong, 0.0, rounded).astype(dtype)
    values = xp.where(is_high, dtype.type(limits.max), xp.where(is_low, dtype.type(limits.min), inside))
    return values, is_wrong if out_of_range == "clamp" else is_wrong | is_outside


def _integer_to_integer(given: Array, dtype: np.dtype[Any], out_of_range: str | None, xp: Any) -> tuple[Array, Array]:
    limits, had = np.iinfo(dtype), np.iinfo(given.dtype)
    nothing = xp.zeros(given.shape, np.bool_)
    is_low = given < given.dtype.type(limits.min) if had.min < limits.min else nothing
    is_high = given > given.dtype.type(limits.max) if had.max > limits.max else nothing
    values = given.astype(dtype)  # modulo 2**bits
    if out_of_range == "clamp":
        values = xp.where(is_high, dtype.type(limits.max), xp.where(is_low, dtype.type(limits.min), values))
    return values, nothing if out_of_range is not None else is_low | is_high


def _wrapped(rounded: Array, dtype: np.dtype[Any], xp: Any) -> Array:
    """Whole floats modulo 2**bits, exactly."""
    rest = xp.fmod(rounded, 2.0**64)
    magnitude = xp.abs(rest).astype(np.uint64)
    return xp.where(rest < 0, np.uint64(0) - magnitude, magnitude).astype(dtype)


def _nearest_away(values: Array, xp: Any) -> Array:
    whole = xp.trunc(values)
    return whole + xp.where(xp.abs(values - whole) >= 0.5, xp.sign(values), 0.0)


_ROUND: dict[str, Callable[[Array, Any], Array]] = {
    "nearest-even": lambda values, xp: xp.rint(values),
    "towards-zero": lambda values, xp: xp.trunc(values),
    "towards-positive": lambda values, xp: xp.ceil(values),
    "towards-negative": lambda values, xp: xp.floor(values),
    "nearest-away": _nearest_away,
}

_UNDO: dict[str, Callable[[Mapping[str, Any], Array, Any], tuple[Array, Array | None]]] = {
    "astype": _undo_conversion,
    "bitround": _undo_bitround,
    "bytes": _undo_bytes,
    "cast_value": _undo_cast_value,
    "delta": _undo_delta,
    "fixedscaleoffset": _undo_fixed_scale_offset,
    "packbits": _undo_packbits,
    "quantize": _undo_conversion,
    "scale_offset": _undo_scale_offset,
    "shuffle": _undo_shuffle,
    "transpose": _undo_transpose,
}
