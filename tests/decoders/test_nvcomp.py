"""nvCOMP through ctypes: what it refuses, on any machine; with -m gpu, what it decodes and encodes."""

from __future__ import annotations

import gzip
import sys
import types
import zlib

import numpy as np
import pytest
from numcodecs import LZ4, GZip, Zlib, Zstd

from tests.zstd_writer import skippable_frame, zstd_frame
from xgpuzarr.decoders import nvcomp, nvcomp_library
from xgpuzarr.decoders.nvcomp_formats import FORMATS
from xgpuzarr.errors import MissingDependencyError, UnsupportedError, XGpuZarrError

SIZES = [1, 3, 4097, 65536, 1_000_003, 4 << 20]
GUARD_NBYTES = 256
GUARD = 0xA5


class FakeLibrary:
    """An nvCOMP library of some other version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def nvcompGetProperties(self, properties):  # noqa: N802  # the library's name
        properties._obj.version = self.version
        return 0


@pytest.fixture
def _no_library_loaded():
    """Forget what was loaded, before and after."""
    for cached in (nvcomp_library._library, nvcomp.library_version):
        cached.cache_clear()
    yield
    for cached in (nvcomp_library._library, nvcomp.library_version):
        cached.cache_clear()


def install_fake(monkeypatch, library):
    package = types.ModuleType("nvidia")
    package.libnvcomp = types.SimpleNamespace(load_library=lambda: library)
    monkeypatch.setitem(sys.modules, "nvidia", package)


@pytest.mark.usefixtures("_no_library_loaded")
def test_absent_nvcomp_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(
        MissingDependencyError, match=r"nvCOMP 6 is needed .* pip install 'xgpuzarr\[cu13\]' .*\[cu12\]"
    ):
        nvcomp.library_version()


@pytest.mark.usefixtures("_no_library_loaded")
@pytest.mark.parametrize(("version", "text"), [(5100, "5.1.0"), (5302, "5.3.2"), (7000, "7.0.0")])
def test_other_major_versions_are_refused(monkeypatch, version, text):
    install_fake(monkeypatch, FakeLibrary(version))
    with pytest.raises(MissingDependencyError, match=f"nvCOMP 6 is needed .* got {text}: pip install"):
        nvcomp.library_version()


@pytest.mark.usefixtures("_no_library_loaded")
def test_library_that_does_not_load_is_named(monkeypatch):
    install_fake(monkeypatch, None)
    with pytest.raises(MissingDependencyError, match="its library does not load"):
        nvcomp.library_version()


@pytest.mark.parametrize(
    "column",
    [np.zeros(3, "int64"), np.zeros(2, "uint64"), np.zeros((3, 1), "uint64"), np.zeros(6, "uint64")[::2]],
)
def test_columns_of_another_kind_are_refused(column):
    good = np.zeros(3, "uint64")
    with pytest.raises(ValueError, match=r"contiguous uint64 arrays of shape \(3,\)"):
        nvcomp.decompress_batch("lz4", good, column, good, good, max_chunk_nbytes=1, total_nbytes=3, stream=None)


@pytest.mark.parametrize(
    ("algorithm", "limit"), [("ans", 1 << 25), ("cascaded", (1 << 24) + 8), ("zstd", (1 << 31) - 1)]
)
def test_chunks_too_large_for_the_decoder_are_refused(algorithm, limit):
    column = np.zeros(1, "uint64")
    with pytest.raises(UnsupportedError, match=f"decodes to at most {limit} bytes, got {limit + 1}; read .*'cpu'"):
        nvcomp.decompress_batch(
            algorithm, column, column, column, column, max_chunk_nbytes=limit + 1, total_nbytes=limit + 1, stream=None
        )


@pytest.mark.parametrize(("algorithm", "of_frames"), [("cascaded", 8), ("lz4", 4)])
def test_cascaded_frames_lie_at_multiples_of_8_whatever_the_library_asks_for(monkeypatch, algorithm, of_frames):
    """Frames of 8-byte values depend on their address modulo 8; nvCOMP 6.0 asks for multiples of 4."""

    def asks_for_4(_options, result):
        result._obj.input, result._obj.output, result._obj.temp = 4, 4, 1
        return 0

    monkeypatch.setattr(nvcomp, "entry_point", lambda _symbol, _call: asks_for_4)
    # the functions without their caches, which must not remember this answer
    assert nvcomp.decode_alignment.__wrapped__(algorithm) == nvcomp.Alignment(of_frames, 4, 1)
    assert nvcomp.encode_alignment.__wrapped__(algorithm) == nvcomp.Alignment(4, of_frames, 1)


def contents(sizes, seed=0):
    """Chunks of each size: compressible, noise, one value, and runs far apart."""
    rng = np.random.default_rng(seed)
    chunks = []
    for size in sizes:
        wave = (np.sin(np.arange(size) / 50) * 100 + rng.integers(0, 3, size)).astype("i1")
        chunks += [wave.tobytes(), rng.bytes(size), bytes(size), (b"0123456789abcdef" * (size // 16 + 1))[:size]]
    return chunks


class Placed:
    """Chunks, or room for them, in one slab of device memory, each followed by a guard zone."""

    def __init__(self, sizes, alignment):
        import cupy

        offsets, at = [], alignment  # not at 0: the slab itself is aligned better than was asked for
        for size in sizes:
            offsets.append(at)
            at += -(-(size + GUARD_NBYTES) // alignment) * alignment
        self.sizes, self.offsets = list(sizes), offsets
        self.slab = cupy.full(at, GUARD, cupy.uint8)
        self.ptrs = cupy.asarray(np.array(offsets, np.uint64) + np.uint64(self.slab.data.ptr))
        self.nbytes = cupy.asarray(np.array(sizes, np.uint64))

    @classmethod
    def of(cls, chunks, alignment):
        import cupy

        placed = cls([len(chunk) for chunk in chunks], alignment)
        host = placed.slab.get()
        for offset, chunk in zip(placed.offsets, chunks, strict=True):
            host[offset : offset + len(chunk)] = np.frombuffer(chunk, np.uint8)
        placed.slab[:] = cupy.asarray(host)
        return placed

    def chunks(self, sizes=None):
        """The bytes of each, after a check that no guard zone was written to."""
        host = self.slab.get()
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            assert (host[offset + size : offset + size + GUARD_NBYTES] == GUARD).all()
        sizes = self.sizes if sizes is None else sizes
        return [host[offset : offset + size].tobytes() for offset, size in zip(self.offsets, sizes, strict=True)]


def decode(algorithm, frames, sizes):
    import cupy

    alignment = nvcomp.decode_alignment(algorithm)
    source, out = Placed.of(frames, alignment.input), Placed(sizes, alignment.output)
    stream = cupy.cuda.get_current_stream()
    actual, statuses = nvcomp.decompress_batch(
        algorithm,
        source.ptrs,
        source.nbytes,
        out.ptrs,
        out.nbytes,
        max_chunk_nbytes=max(sizes),
        total_nbytes=sum(sizes),
        stream=stream,
    )
    stream.synchronize()
    assert statuses.get().tolist() == [0] * len(sizes)
    assert actual.get().tolist() == list(sizes)
    return out.chunks()


def encode(algorithm, chunks, options=None):
    import cupy

    alignment = nvcomp.encode_alignment(algorithm, options)
    largest = max(len(chunk) for chunk in chunks)
    source = Placed.of(chunks, alignment.input)
    out = Placed([nvcomp.max_encoded_nbytes(algorithm, largest, options)] * len(chunks), alignment.output)
    stream = cupy.cuda.get_current_stream()
    encoded, statuses = nvcomp.compress_batch(
        algorithm,
        source.ptrs,
        source.nbytes,
        out.ptrs,
        max_chunk_nbytes=largest,
        total_nbytes=sum(len(chunk) for chunk in chunks),
        stream=stream,
        options=options,
    )
    stream.synchronize()
    assert statuses.get().tolist() == [0] * len(chunks)
    return out.chunks(encoded.get().tolist())


def host_encoders():
    return {
        "lz4": [lambda chunk: bytes(LZ4().encode(chunk))[4:]],
        "zstd": [
            Zstd(1).encode,
            Zstd(9).encode,
            Zstd(19).encode,
            Zstd(3, checksum=True).encode,
            lambda chunk: zstd_frame(chunk, window_log=27, size_nbytes=8),
            lambda chunk: zstd_frame(chunk) + skippable_frame(b"abc"),
        ],
        "gzip": [GZip(0).encode, GZip(1).encode, GZip(9).encode],
        "deflate": [lambda chunk: bytes(Zlib(1).encode(chunk))[2:-4], lambda chunk: bytes(Zlib(9).encode(chunk))[2:-4]],
    }


@pytest.mark.gpu
def test_version_is_read_from_the_library():
    assert nvcomp.library_version()[0] == 6


@pytest.mark.gpu
def test_alignments_are_what_callers_rely_on():
    inputs = {name: nvcomp.decode_alignment(name).input for name in nvcomp.ALGORITHMS}
    assert inputs == {
        "ans": 16,
        "bitcomp": 8,
        "cascaded": 8,
        "deflate": 4,
        "gdeflate": 4,
        "gzip": 1,
        "lz4": 1,
        "snappy": 1,
        "zstd": 1,
    }


@pytest.mark.gpu
def test_options_arrive_where_the_library_reads_them():
    """A backend that does not exist is refused, so the struct is passed as the library expects it."""
    import ctypes

    for algorithm, form in FORMATS.items():
        words = (7, *form.decode_words[1:])
        status = nvcomp_library.entry_point(form.symbol, "DecompressGetTempSize")(
            1,
            100,
            nvcomp_library.Options.from_buffer_copy(nvcomp_library.pack_options(words)),
            ctypes.byref(ctypes.c_size_t()),
            100,
            None,
        )
        assert status in (10, 11), algorithm


@pytest.mark.gpu
def test_scratch_of_zstd_follows_the_decoded_bytes():
    small, large = (nvcomp.temp_nbytes("zstd", n, 1 << 22, n << 22) for n in (16, 64))
    assert 2.5 * (16 << 22) < small < 3.5 * (16 << 22)
    assert large > 3.9 * small
    assert nvcomp.temp_nbytes("lz4", 64, 1 << 22, 64 << 22) < 1 << 20
    with pytest.raises(XGpuZarrError, match=r"sizing the scratch .* \(nvCOMP status 18\)"):
        nvcomp.temp_nbytes("zstd", 1, 1 << 31, 1 << 31)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "encoder"),
    [pytest.param(name, i, id=f"{name}-{i}") for name, all_ in host_encoders().items() for i in range(len(all_))],
)
def test_what_the_host_encoded_decodes(algorithm, encoder):
    chunks = contents(SIZES)
    frames = [bytes(host_encoders()[algorithm][encoder](chunk)) for chunk in chunks]
    assert decode(algorithm, frames, [len(chunk) for chunk in chunks]) == chunks


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", sorted(nvcomp.ALGORITHMS))
def test_round_trip_on_the_device(algorithm):
    chunks = contents(SIZES)
    assert decode(algorithm, encode(algorithm, chunks), [len(chunk) for chunk in chunks]) == chunks


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", sorted(nvcomp.ALGORITHMS))
def test_round_trip_of_many_chunks(algorithm):
    chunks = contents([5000] * 750, seed=1)
    assert decode(algorithm, encode(algorithm, chunks), [5000] * 3000) == chunks


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "data_type"),
    [(name, kind) for name in ("ans", "bitcomp", "cascaded", "lz4") for kind in sorted(FORMATS[name].data_types)],
)
def test_round_trip_of_typed_values(algorithm, data_type):
    rng = np.random.default_rng(2)
    chunks = [(rng.normal(size=n).cumsum() * 10).astype(data_type).tobytes() for n in (1, 7, 1000, 100_000)]
    options = nvcomp.encode_options(algorithm, data_type=data_type)
    assert decode(algorithm, encode(algorithm, chunks, options), [len(chunk) for chunk in chunks]) == chunks


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["bitcomp", "cascaded", "deflate", "gdeflate", "gzip"])
def test_every_level_round_trips(algorithm):
    chunks = contents([70_000])
    for level in FORMATS[algorithm].levels:
        options = nvcomp.encode_options(algorithm, level=level)
        assert decode(algorithm, encode(algorithm, chunks, options), [70_000] * 4) == chunks, level


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "decoder"),
    [
        ("lz4", lambda frame, size: LZ4().decode(size.to_bytes(4, "little") + frame)),
        ("zstd", lambda frame, _: Zstd().decode(frame)),
        ("gzip", lambda frame, _: gzip.decompress(frame)),
        ("deflate", lambda frame, _: zlib.decompress(frame, wbits=-15)),
    ],
)
def test_what_the_device_encoded_decodes_on_the_host(algorithm, decoder):
    chunks = contents(SIZES)
    frames = encode(algorithm, chunks)
    assert [bytes(decoder(frame, len(chunk))) for frame, chunk in zip(frames, chunks, strict=True)] == chunks


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", sorted(nvcomp.ALGORITHMS))
def test_frames_tell_their_decoded_size(algorithm):
    import cupy

    chunks = contents([1000, 65536])
    frames = Placed.of(encode(algorithm, chunks), nvcomp.decode_alignment(algorithm).input)
    sizes = nvcomp.decompressed_nbytes(algorithm, frames.ptrs, frames.nbytes, stream=cupy.cuda.get_current_stream())
    assert sizes.get().tolist() == [len(chunk) for chunk in chunks]


@pytest.mark.gpu
def test_empty_batch():
    import cupy

    none = cupy.zeros(0, cupy.uint64)
    actual, statuses = nvcomp.decompress_batch(
        "zstd", none, none, none, none, max_chunk_nbytes=1, total_nbytes=0, stream=cupy.cuda.get_current_stream()
    )
    assert (actual.shape, statuses.shape) == ((0,), (0,))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", sorted(nvcomp.ALGORITHMS - {"bitcomp"}))
def test_call_returns_before_the_work_is_done(algorithm):
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ticks)'
        "{ long long start = clock64(); while (clock64() - start < ticks); }",
        "spin",
    )
    chunks = contents([50_000])
    frames = Placed.of(encode(algorithm, chunks), nvcomp.decode_alignment(algorithm).input)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def call():
        out = Placed([50_000] * 4, nvcomp.decode_alignment(algorithm).output)
        cupy.cuda.Device().synchronize()
        with stream:
            spin((1,), (1,), (1_000_000_000,))  # half a second or more
        results = nvcomp.decompress_batch(
            algorithm,
            frames.ptrs,
            frames.nbytes,
            out.ptrs,
            out.nbytes,
            max_chunk_nbytes=50_000,
            total_nbytes=200_000,
            stream=stream,
        )
        is_done = stream.done
        stream.synchronize()
        assert results[1].get().tolist() == [0] * 4
        assert out.chunks() == chunks
        return is_done

    call()  # loads the kernels and fills the memory pool, which may wait for the device
    assert call() is False


@pytest.mark.gpu
def test_scratch_is_not_shared_by_streams():
    import cupy

    chunks = contents([1 << 20] * 4, seed=3)
    frames = Placed.of([bytes(Zstd(1).encode(chunk)) for chunk in chunks], 1)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [Placed([1 << 20] * 16, 1) for _ in range(12)]
    cupy.cuda.Device().synchronize()
    statuses = [
        nvcomp.decompress_batch(
            "zstd",
            frames.ptrs,
            frames.nbytes,
            out.ptrs,
            out.nbytes,
            max_chunk_nbytes=1 << 20,
            total_nbytes=16 << 20,
            stream=streams[i % 3],
        )[1]
        for i, out in enumerate(outs)
    ]
    cupy.cuda.Device().synchronize()
    for out, status in zip(outs, statuses, strict=True):
        assert not status.get().any()
        assert out.chunks() == chunks
