"""Every filter against its own package, bit for bit: with NumPy, a stand-in for CuPy, and CuPy with ``-m gpu``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from zarr.codecs.cast_value import CastValue
from zarr.codecs.scale_offset import ScaleOffset
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.dtype import parse_dtype

from tests.host_device import host_device, host_device_session  # noqa: F401  # fixtures
from xgpuzarr.decoders.filters import refusal, undo
from xgpuzarr.plan.codec_chain import build_codec_chain
from xgpuzarr.plan.codec_facts import make_step
from xgpuzarr.plan.steps import Content

if TYPE_CHECKING:
    from numcodecs.abc import Codec

    from xgpuzarr.plan.steps import Step

INTEGERS = [f"{order}{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8) for order in ("<>" if size > 1 else "|")]
FLOATS = [f"{order}f{size}" for size in (2, 4, 8) for order in "<>"]
NUMBERS = [*INTEGERS, *FLOATS, "|b1"]
common = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["numpy", "host_device", pytest.param("cupy", marks=pytest.mark.gpu)])
def namespace(request: pytest.FixtureRequest) -> Any:
    if request.param == "host_device":
        return request.getfixturevalue("host_device")
    return pytest.importorskip(request.param)


def as_rows(encoded: Any) -> np.ndarray:
    return np.stack([np.frombuffer(bytes(np.ascontiguousarray(e).view("u1")), "u1") for e in encoded])


def step_of(codec: Codec | str, config: dict[str, Any] | None, nbytes: int) -> Step:
    """Step of a filter of Zarr v2, on chunks of `nbytes` bytes."""
    if config is None:
        config = codec.get_config()
        codec = config.pop("id")
    step, _ = make_step(codec, config, Content(nbytes, np.dtype("u1"), (nbytes,)), kind="bytes", is_typed=False)
    assert not step.by_zarr, step.reason
    return step


def undone(step: Step, rows: np.ndarray, xp: Any) -> tuple[np.ndarray, np.ndarray]:
    """Result and flags of `undo`, on the host."""
    batch, is_bad = undo(step, xp.asarray(rows), xp)
    assert batch.dtype == np.uint8
    assert batch.shape == (len(rows), step.decoded_nbytes)
    assert batch.flags.c_contiguous
    flags = xp.zeros(len(rows), bool) if is_bad is None else is_bad
    assert flags.shape == (len(rows),)
    on_host = (lambda a: a) if xp is np else xp.asnumpy
    return on_host(batch), on_host(flags)


def assert_as_numcodecs(codec: Codec, rows: np.ndarray, nbytes: int, xp: Any) -> None:
    """Compare with numcodecs on the same encoded bytes, whoever wrote them."""
    step = step_of(codec, None, nbytes)
    if xp is not np and step.reason:
        return
    got, flags = undone(step, rows, xp)
    with np.errstate(all="ignore"):
        expected = as_rows([codec.decode(row.copy()) for row in rows])
    assert flags.tolist() == [xp is not np and becomes_no_integer(step, row) for row in rows]
    assert_same(got[~flags], expected[~flags], None if xp is np else step.config.get("dtype"))


def becomes_no_integer(step: Step, row: np.ndarray) -> bool:
    """Whether C leaves open what becomes of a float of a chunk: of NaN, or one out of range of the integer dtype."""
    dtype, astype = step.config.get("dtype", np.dtype("u1")), step.config.get("astype", np.dtype("u1"))
    if step.codec not in ("fixedscaleoffset", "quantize", "astype") or dtype.kind not in "iu":
        return False
    values = row.view(astype).astype(astype.newbyteorder("="))
    if step.codec == "fixedscaleoffset":
        work = astype.newbyteorder("=") if astype.kind == "f" else np.dtype("f8")
        with np.errstate(all="ignore"):
            values = values.astype(work) / work.type(step.config["scale"]) + work.type(step.config["offset"])
    limits = np.iinfo(dtype)
    is_float = values.dtype.kind == "f"
    return is_float and not all(math.isfinite(v) and limits.min <= int(v) <= limits.max for v in values.tolist())


def assert_same(got: np.ndarray, expected: np.ndarray, dtype: np.dtype | None) -> None:
    """The same bytes; of floats on the device, the same bits but those of NaN, which IEEE 754 leaves open."""
    if dtype is not None and dtype.kind == "f":
        got, expected = got.view(dtype), expected.view(dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        got, expected = (np.where(np.isnan(a), dtype.type(np.nan), a).view("u1") for a in (got, expected))
    np.testing.assert_array_equal(got, expected)


def encoded_rows(nbytes: int) -> st.SearchStrategy[np.ndarray]:
    return st.integers(1, 4).flatmap(lambda n: arrays(np.uint8, (n, nbytes)))


@common
@given(data=st.data(), elementsize=st.integers(0, 17), count=st.integers(1, 40))
def test_shuffle(namespace: Any, data: st.DataObject, elementsize: int, count: int) -> None:
    nbytes = max(elementsize, 1) * count
    assert_as_numcodecs(numcodecs.Shuffle(elementsize), data.draw(encoded_rows(nbytes)), nbytes, namespace)


@common
@given(data=st.data(), dtype=st.sampled_from([*INTEGERS, *FLOATS]), astype=st.sampled_from([*INTEGERS, *FLOATS, None]))
def test_delta(namespace: Any, data: st.DataObject, dtype: str, astype: str | None) -> None:
    codec = numcodecs.Delta(dtype, astype)
    count = data.draw(st.integers(1, 50))
    if namespace is not np or "f" in codec.astype.kind + codec.dtype.kind:  # no NaN or infinity becomes an integer
        steps = st.integers(-100, 100) if codec.astype.kind != "u" else st.integers(0, 100)
        values = data.draw(st.lists(steps, min_size=count, max_size=count))
        rows = np.array(values).astype(codec.astype).view("u1")[None]
    else:
        rows = data.draw(encoded_rows(count * codec.astype.itemsize))
    assert_as_numcodecs(codec, rows, count * codec.dtype.itemsize, namespace)


def test_delta_sums_floats_one_after_another() -> None:
    random = np.random.default_rng(0)
    for dtype, astype in [("<f4", "<f4"), ("<f8", "<f4"), ("<f4", "<f8"), ("<u8", "<i8")]:
        codec = numcodecs.Delta(dtype, astype)
        rows = as_rows([(random.normal(size=10_000) * 1e3).astype(astype) for _ in range(3)])
        if dtype == "<u8":
            rows = as_rows([random.integers(0, 2**61, 10_000) for _ in range(3)])
        step = step_of(codec, None, 10_000 * codec.dtype.itemsize)
        assert step.reason == "codec 'delta' sums floats, and their sum depends on the order"
        assert_as_numcodecs(codec, rows, 10_000 * codec.dtype.itemsize, np)


@common
@given(
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
    astype=st.sampled_from([*NUMBERS, None]),
    scale=st.one_of(st.integers(1, 10**12), st.floats(1e-6, 1e9), st.just(-7)),
    offset=st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e9, 1e9)),
)
def test_fixed_scale_offset(
    namespace: Any, data: st.DataObject, dtype: str, astype: str | None, scale: float, offset: float
) -> None:
    codec = numcodecs.FixedScaleOffset(offset=offset, scale=scale, dtype=dtype, astype=astype)
    count = data.draw(st.integers(1, 30))
    rows = data.draw(encoded_rows(count * codec.astype.itemsize))
    if codec.astype.kind == "b":
        rows &= 1
    assert_as_numcodecs(codec, rows, count * codec.dtype.itemsize, namespace)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("astype", ["|i1", ">u2", "<f4", "<f8"])
def test_fixed_scale_offset_of_integers(namespace: Any, dtype: str, astype: str) -> None:
    values = np.arange(100).astype(dtype)
    codec = numcodecs.FixedScaleOffset(offset=3, scale=1, dtype=dtype, astype=astype)
    assert_as_numcodecs(codec, as_rows([codec.encode(values)] * 2), values.nbytes, namespace)


@common
@given(data=st.data(), dtype=st.sampled_from(FLOATS), astype=st.sampled_from(FLOATS))
def test_quantize(namespace: Any, data: st.DataObject, dtype: str, astype: str) -> None:
    codec = numcodecs.Quantize(digits=2, dtype=dtype, astype=astype)
    count = data.draw(st.integers(1, 30))
    rows = data.draw(encoded_rows(count * codec.astype.itemsize))
    assert_as_numcodecs(codec, rows, count * codec.dtype.itemsize, namespace)


@common
@given(data=st.data(), dtype=st.sampled_from(NUMBERS), astype=st.sampled_from(NUMBERS))
def test_astype(namespace: Any, data: st.DataObject, dtype: str, astype: str) -> None:
    codec = numcodecs.AsType(encode_dtype=astype, decode_dtype=dtype)
    encode_dtype, decode_dtype = codec.encode_dtype, codec.decode_dtype
    count = data.draw(st.integers(1, 30))
    rows = data.draw(encoded_rows(count * encode_dtype.itemsize))
    if encode_dtype.kind == "b":
        rows &= 1
    elif namespace is np and encode_dtype.kind == "f" and decode_dtype.kind in "iu":  # C leaves the rest undefined
        rows = (rows[:, : encode_dtype.itemsize * count : encode_dtype.itemsize] % 100).astype(encode_dtype).view("u1")
    assert_as_numcodecs(codec, rows, count * decode_dtype.itemsize, namespace)


SUBNORMAL = np.array([1e-45, -1e-45, 1e-40, 1.1754942e-38, -1.1754944e-38, 2e-38, 0.0, -0.0, 1.0, np.nan], "f4")


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("other", ["f4", "f8", "b1", "i2"])
@pytest.mark.parametrize(("scale", "offset"), [(3, 0), (0.25, 0), (1, 1e-40), (-7, -1.1754942e-38)])
def test_subnormal_float32_is_no_zero(namespace: Any, order: str, other: str, scale: float, offset: float) -> None:
    dtype, other = f"{order}f4", np.dtype(other).newbyteorder(order).str
    rows, nbytes = as_rows([SUBNORMAL.astype(dtype)] * 2), 10 * np.dtype(other).itemsize
    if other[1:] != "b1":
        codec = numcodecs.FixedScaleOffset(offset=offset, scale=scale, dtype=other, astype=dtype)
        assert_as_numcodecs(codec, rows, nbytes, namespace)
    assert_as_numcodecs(numcodecs.AsType(encode_dtype=dtype, decode_dtype=other), rows, nbytes, namespace)
    wide = as_rows([SUBNORMAL.astype(f"{order}f8") * 0.7])
    assert_as_numcodecs(numcodecs.AsType(encode_dtype=f"{order}f8", decode_dtype=dtype), wide, 40, namespace)


def test_subnormal_float32_scaled_and_cast(namespace: Any) -> None:
    rows = np.stack([SUBNORMAL] * 2)
    for scale, offset in [(3.0, 0.0), (1.0, 1e-40)]:
        assert_as_zarr(ScaleOffset(offset=offset, scale=scale), rows, np.dtype("f4"), namespace)
    zero = {"decode": [(0.0, 5)]}
    for dtype, rounding, options in [("f8", "nearest-even", {"scalar_map": zero}), ("i2", "towards-positive", {})]:
        codec = CastValue(data_type="float32", rounding=rounding, **options)
        assert_as_zarr(codec, rows[:, :-1], np.dtype(dtype), namespace)
    wide = CastValue(data_type="float64", rounding="nearest-even")
    assert_as_zarr(wide, rows.astype("f8") * 0.7, np.dtype("f4"), namespace)


def test_floats_that_become_no_integer_are_bad_on_the_device_only(namespace: Any) -> None:
    rows = as_rows(np.array([[0, 254.9], [256, 0], [-0.9, 255], [np.nan, 1], [1, -1], [np.inf, 0]], "f4"))
    for codec in (
        numcodecs.AsType(encode_dtype="f4", decode_dtype="u1"),
        numcodecs.FixedScaleOffset(scale=1, offset=0, dtype="u1", astype="f4"),
    ):
        step = step_of(codec, None, 2)
        got, flags = undone(step, rows, namespace)
        on_device = namespace is not np
        assert flags.tolist() == [False, on_device, False, on_device, on_device, on_device]
        assert got[[0, 2]].tolist() == [[0, 254], [0, 255]]


@given(values=arrays(bool, st.integers(1, 70)))
@common
def test_packbits(namespace: Any, values: np.ndarray) -> None:
    codec = numcodecs.PackBits()
    assert_as_numcodecs(codec, as_rows([codec.encode(values), codec.encode(~values)]), values.nbytes, namespace)


def test_packbits_finds_a_wrong_number_of_padding_bits(namespace: Any) -> None:
    values = np.ones(13, bool)
    rows = as_rows([numcodecs.PackBits().encode(values)] * 3)
    rows[1, 0] += 1
    step = step_of("packbits", {}, 13)
    _, flags = undone(step, rows, namespace)
    assert flags.tolist() == [False, True, False]
    assert refusal(step) == "codec 'packbits': the first byte is not the number of padding bits"


def test_bitround_changes_nothing(namespace: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2, 80), np.uint8)
    got, flags = undone(step_of(numcodecs.BitRound(5), None, 80), rows, namespace)
    np.testing.assert_array_equal(got, rows)
    assert not flags.any()


@pytest.mark.parametrize("stored", ["<i2", ">i2", "<f8", ">f8", "<M8[s]", ">M8[s]"])
def test_bytes(namespace: Any, stored: str) -> None:
    dtype = np.dtype(stored).newbyteorder("=")
    values = np.arange(24).astype(dtype).reshape(2, 12)
    step = step_of_bytes(stored, dtype, 12)
    got, _ = undone(step, as_rows(values.astype(stored)), namespace)
    np.testing.assert_array_equal(got.view(dtype), values)


def step_of_bytes(stored: str, dtype: np.dtype, count: int) -> Step:
    endian = "big" if stored[0] == ">" else "little"
    chain = build_codec_chain([("bytes", {"endian": endian})], zarr_format=3, dtype=dtype, chunk_shape=(count,))
    return chain.steps[0]


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_transpose(namespace: Any, order: tuple[int, ...], itemsize: int) -> None:
    shape, dtype = (2, 3, 5), np.dtype(f"V{itemsize}")
    values = np.random.default_rng(0).bytes(2 * 30 * itemsize)
    chunks = np.frombuffer(values, dtype).reshape(2, *shape)
    content = Content(30 * itemsize, dtype, shape)
    step, _ = make_step("transpose", {"order": order}, content, kind="array", is_typed=True)
    got, _ = undone(step, as_rows([np.ascontiguousarray(chunk.transpose(order)) for chunk in chunks]), namespace)
    assert got.tobytes() == values


def by_zarr(codec: Any, encoded: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """What zarr-python decodes; None if it refuses the values."""
    prototype = default_buffer_prototype()
    spec = ArraySpec(
        encoded.shape, parse_dtype(dtype, zarr_format=3), 0, ArrayConfig.from_dict({"order": "C"}), prototype
    )
    try:
        with np.errstate(all="ignore"):
            return codec._decode_sync(prototype.nd_buffer.from_ndarray_like(encoded), spec).as_numpy_array()
    except ValueError:
        return None


def assert_as_zarr(codec: Any, encoded: np.ndarray, dtype: np.dtype, xp: Any) -> None:
    """Compare with zarr-python chunk by chunk; both refuse the same chunks."""
    document = codec.to_dict()
    content = Content(encoded.shape[1] * dtype.itemsize, dtype, encoded.shape[1:])
    step, _ = make_step(document["name"], document.get("configuration", {}), content, kind="array", is_typed=True)
    assert not step.by_zarr, step.reason
    if xp is not np and step.reason:
        return
    got, flags = undone(step, encoded.view("u1"), xp)
    for row, is_bad, chunk in zip(got, flags, encoded, strict=True):
        expected = by_zarr(codec, chunk, dtype)
        assert is_bad == (expected is None)
        if expected is not None:
            assert_same(row, expected.view("u1"), None if xp is np else dtype)


NATIVE = [np.dtype(name) for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]


@st.composite
def scaled(draw: st.DrawFn) -> tuple[Any, np.ndarray, np.dtype]:
    dtype = draw(st.sampled_from(NATIVE))
    rows, count = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    if dtype.kind == "f":
        numbers = st.floats(-1000, 1000, width=dtype.itemsize * 8)
        numbers = numbers.map(lambda x: x + 0.0)  # zarr-python writes no offset for -0.0
        scale = draw(numbers.filter(lambda x: x != 0))
        return ScaleOffset(offset=draw(numbers), scale=scale), draw(arrays(dtype, (rows, count))), dtype
    limits = np.iinfo(dtype)
    near = st.one_of(st.integers(-3, 3), st.integers(limits.min, limits.max)).filter(
        lambda n: limits.min <= n <= limits.max
    )
    scale, offset = draw(near.filter(bool)), draw(near)
    multiples = st.integers(-(2**63), 2**64).map(lambda n: n // scale * scale)
    elements = st.one_of(near, multiples.filter(lambda n: limits.min <= n <= limits.max), st.just(0), st.just(scale))
    return ScaleOffset(offset=offset, scale=scale), draw(arrays(dtype, (rows, count), elements=elements)), dtype


@common
@given(case=scaled())
def test_scale_offset(namespace: Any, case: tuple[Any, np.ndarray, np.dtype]) -> None:
    codec, encoded, dtype = case
    if dtype == np.int64 and _passes_64_bits(encoded, codec):
        return  # zarr-python's own sum wraps around
    assert_as_zarr(codec, encoded, dtype, namespace)


def _passes_64_bits(encoded: np.ndarray, codec: ScaleOffset) -> bool:
    sums = [int(n) // codec.scale + codec.offset for n in encoded.flat]
    return min(sums) < -(2**63) or max(sums) >= 2**63


def test_scale_offset_refuses_what_passes_64_bits(namespace: Any) -> None:
    content = Content(24, np.dtype("i8"), (3,))
    for scale, offset, good, bad in [(2, 2**62 + 1, 2**62, 2**63 - 2), (-1, 0, 5, -(2**63)), (1, -(2**63), 0, -2)]:
        step, _ = make_step("scale_offset", {"scale": scale, "offset": offset}, content, kind="array", is_typed=True)
        encoded = np.array([[good] * 3, [good, bad, good]], "i8")
        got, flags = undone(step, encoded.view("u1"), namespace)
        assert flags.tolist() == [False, True]
        assert got[0].view("i8").tolist() == [good // scale + offset] * 3


ROUNDINGS = ["nearest-even", "towards-zero", "towards-positive", "towards-negative", "nearest-away"]


@st.composite
def cast(draw: st.DrawFn) -> tuple[Any, np.ndarray, np.dtype]:
    dtype, astype = draw(st.sampled_from(NATIVE)), draw(st.sampled_from(NATIVE))
    exact = dtype.kind != "f" or np.can_cast(astype, dtype)
    rounding = draw(st.sampled_from(ROUNDINGS)) if exact else "nearest-even"
    wraps = ["wrap"] if astype.kind in "iu" and dtype.kind in "iu" else []
    out_of_range = draw(st.sampled_from([None, "clamp", *wraps]))
    elements = None
    if astype.kind == "f":
        halves = st.integers(-300, 300).map(lambda n: n / 2)
        edges = [2.0**n for n in (7, 8, 15, 16, 31, 32, 53, 63, 64)]
        edge = st.sampled_from([s * e + d for s in (-1, 1) for e in edges for d in (-1.0, -0.5, 0.0, 0.5)])
        elements = st.one_of(halves, edge, st.sampled_from([np.nan, np.inf, -np.inf, -0.0])).map(
            lambda x: float(astype.type(x))
        )
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    with np.errstate(all="ignore"):
        encoded = draw(arrays(astype, shape, elements=elements))
    scalar_map = None
    if astype.kind == "f" and draw(st.booleans()):
        scalar_map = {"decode": [("NaN", 7), (2.5, 3), ("Infinity", 5), ("-Infinity", 6)]}
    codec = CastValue(data_type=astype.name, rounding=rounding, out_of_range=out_of_range, scalar_map=scalar_map)
    return codec, encoded, dtype


@common
@given(case=cast())
def test_cast_value(namespace: Any, case: tuple[Any, np.ndarray, np.dtype]) -> None:
    assert_as_zarr(*case[:2], case[2], namespace)


@pytest.mark.parametrize("dtype", NATIVE[:8], ids=str)
def test_cast_value_wraps_floats(namespace: Any, dtype: np.dtype) -> None:
    """zarr-python takes "wrap" only for integers; its backend, which does the casting, for floats too."""
    from cast_value_rs import cast_array

    values = np.array([[300.0, -1.0, 1e20, -1e20, 2.0**63, 2.0**64 + 4096, -(2.0**63), 1.5e19, 0.5]])
    content = Content(9 * dtype.itemsize, dtype, (9,))
    step, _ = make_step(
        "cast_value", {"data_type": "float64", "out_of_range": "wrap"}, content, kind="array", is_typed=True
    )
    got, flags = undone(step, values.view("u1"), namespace)
    expected = cast_array(
        values[0], target_dtype=dtype, rounding_mode="nearest-even", out_of_range_mode="wrap", scalar_map_entries=None
    )
    assert not flags.any()
    np.testing.assert_array_equal(got[0].view(dtype), expected)
