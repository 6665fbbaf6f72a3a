"""How many arrays of real stores are decoded on the device, codec by codec? Those of its codecs all are."""

from __future__ import annotations

from collections import Counter

import pytest

import xgpuzarr
from tests import real_stores
from xgpuzarr.diagnostics import collect, total

pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
    pytest.mark.filterwarnings("ignore:Object at .* is not recognized"),
]

ON_DEVICE = {
    "adler32",
    "bitround",
    "blosc",
    "crc32",
    "crc32c",
    "delta",
    "fixedscaleoffset",
    "fletcher32",
    "gzip",
    "lz4",
    "packbits",
    "quantize",
    "shuffle",
    "zlib",
    "zstd",
}
ON_HOST = {"base64", "bz2", "lzma", "vlen-bytes", "vlen-utf8"}


def arrays(device: str) -> list[xgpuzarr.ZarrArray]:
    found = []
    for parameter in real_stores.records(readable=True):
        if parameter.marks:
            pytest.skip(parameter.marks[0].kwargs["reason"])
        (record,) = parameter.values
        store, path = real_stores.place(record)
        zarr_format = record["zarr_format"]
        found.append(xgpuzarr.open_array(store, path=path, zarr_format=zarr_format, device=device))
    return found


def codecs(array: xgpuzarr.ZarrArray) -> set[str]:
    return {step.codec for step in array.layout.codec_chain} - {"bytes", "transpose"}


def test_every_array_of_a_device_codec_goes_to_the_device() -> None:
    routes: Counter[tuple[str, str]] = Counter()
    for array in arrays("cpu"):
        chain = array.layout.codec_chain
        assert chain.route == ("host" if codecs(array) & ON_HOST else "device"), (array, chain.reasons)
        routes.update((codec, chain.route) for codec in codecs(array))
    assert {codec for codec, route in routes if route == "device"} == ON_DEVICE
    assert {codec for codec, route in routes if route == "host"} == ON_HOST | {"blosc", "zstd"}  # behind strings
    counts = {codec: routes[codec, "device"] for codec in ("blosc", "lz4", "shuffle", "fixedscaleoffset", "quantize")}
    assert counts == {"blosc": 248, "lz4": 31, "shuffle": 19, "fixedscaleoffset": 10, "quantize": 8}


@pytest.mark.gpu
def test_the_device_decodes_them() -> None:
    on_host: Counter[str] = Counter()
    for array in arrays("cuda"):
        if array.route == "host" or not array.size:
            continue
        # also what the host's cores would inflate sooner
        on_device = array.on("cuda", xgpuzarr.ReadOptions(route="device"))
        with collect() as reports:
            on_device[...]
        report = total(reports)
        assert report.route == "device", array
        on_host.update(dict.fromkeys(codecs(array), report.n_host_chunks))
    # frames that the device does not take: several in a chunk, or of a size that they do not state
    assert {codec for codec, n in on_host.items() if n} <= {"gzip", "zstd"}
