"""The main job on real data: two climate runs to Zarr, then the warming between two periods, computed where data lands.

The data are two runs of a Met Office climate model over North America, 1860-2099, from the package iris-sample-data
(Open Government Licence): A1B, whose emissions go on growing, and E1, whose emissions are cut early.
"""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgpuzarr import diagnostics
from xgpuzarr.errors import MissingDependencyError
from xgpuzarr.inspection import inspect_store
from xgpuzarr.plan.read_plan import format_nbytes
from xgpuzarr.system import device_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import xarray as xr

    from xgpuzarr.options import Device

__all__ = ["run_demo"]

VARIABLE = "air_temperature"
BEFORE = slice("1860", "1889")
AFTER = slice("2070", "2099")
PERIODS = f"{AFTER.start}-{AFTER.stop} minus {BEFORE.start}-{BEFORE.stop}"
STORES = {"A1B": "a1b-v2-blosc-lz4.zarr", "E1": "e1-v3-sharded-zstd.zarr"}
COLORS = {"A1B": "#c1272d", "E1": "#1f6fb4"}


def run_demo(output: Path, *, device: Device = "auto") -> dict[str, dict[str, xr.DataArray]]:
    """Convert, read, compute and draw; print what went where and how long each stage took.

    Parameters
    ----------
    output
        Folder for the stores and the picture, `warming.png`; those of an earlier demo are replaced.
    device
        Where to compute. "auto" takes the host where no device is usable, and says why.

    Returns
    -------
    dict
        For each run, "warming" over latitude and longitude, and "series" over time, both in K and on the host.

    Raises
    ------
    MissingDependencyError
        A package of the extra `demo` is not installed.
    """
    dask, sample_data, xr, *_ = _packages("dask", "iris_sample_data", "xarray", "matplotlib", "netCDF4")
    if device == "auto":
        problem = device_problem()
        device = "cpu" if problem else "cuda"
        print(f"No GPU is used: {problem}." if problem else "Data goes to the GPU.")
    stages = _Stages()
    stores = {run: output / name for run, name in STORES.items()}

    with stages.timed("write both stores"):
        for run, store in stores.items():
            with xr.open_dataset(Path(sample_data.path, f"{run}_north_america.nc"), decode_cf=False) as source:
                _write(source, store)
    print("\n".join(["", *_route_table(stores.values()), ""]))

    with stages.timed("open both"):
        runs = {
            run: xr.open_dataset(store, engine="gpuzarr", device=device, chunks={}, consolidated=False)[VARIABLE]
            for run, store in stores.items()
        }
    with stages.timed("read, decode, compute"):
        (computed,) = dask.compute({run: {"warming": warming(t), "series": area_mean(t)} for run, t in runs.items()})
        results = {run: {name: array.as_numpy() for name, array in found.items()} for run, found in computed.items()}
    with stages.timed("draw"):
        _draw(results, output / "warming.png")

    print("\n".join([*stages.table(), ""]))
    for run, found in results.items():
        print(f"{run}: {float(area_mean(found['warming'])):+.1f} K, {PERIODS}")
    print(f"\n{output / 'warming.png'}")
    return results


def warming(temperature: xr.DataArray) -> xr.DataArray:
    """Mean over the last period minus mean over the first, at each place, in K."""
    return temperature.sel(time=AFTER).mean("time") - temperature.sel(time=BEFORE).mean("time")


def area_mean(temperature: xr.DataArray) -> xr.DataArray:
    """Mean over the region, cells weighted by their area, in K; computed where the temperatures are."""
    import numpy as np
    import xarray as xr

    cosines = np.cos(np.deg2rad(temperature["latitude"].values))
    blocks = getattr(temperature.data, "_meta", temperature.data)
    weights = xr.DataArray(np.asarray(cosines, like=blocks), dims="latitude")  # a CuPy array beside CuPy blocks
    return (temperature * weights).mean(("latitude", "longitude")) / weights.mean()


def _packages(*names: str) -> list[Any]:
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise MissingDependencyError(f"the demo needs {error.name}; pip install 'xgpuzarr[demo]'") from error


def _write(source: xr.Dataset, store: Path) -> None:
    from numcodecs import Blosc
    from zarr.codecs import ZstdCodec

    shutil.rmtree(store, ignore_errors=True)
    encoding: dict[str, Any] = {"chunks": (24, 37, 49), "compressors": Blosc(cname="lz4", shuffle=Blosc.SHUFFLE)}
    zarr_format = 2
    if store.name == STORES["E1"]:
        encoding = {"chunks": (8, 37, 49), "shards": (48, 37, 49), "compressors": ZstdCodec(level=3)}
        zarr_format = 3
    source.drop_encoding().to_zarr(store, zarr_format=zarr_format, consolidated=False, encoding={VARIABLE: encoding})


def _route_table(stores: Iterable[Path]) -> Iterator[str]:
    yield "array, codec chain, and where a machine with a GPU decodes it"
    for store in stores:
        for entry in inspect_store(store):
            if entry.path == VARIABLE:
                route = f"{entry.route}: {entry.reason}" if entry.reason else entry.route
                yield f"  {store.name}/{entry.path}\n    {entry.codec_chain}\n    {route}"


class _Stages:
    """Seconds and bytes of each stage."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, diagnostics.ReadReport]] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with diagnostics.collect() as reports:
            yield
        self._rows.append((name, time.perf_counter() - start, diagnostics.total(reports)))

    def table(self) -> Iterator[str]:
        yield f"{'stage':24}{'seconds':>8}{'read':>12}{'decoded':>12}"
        for name, seconds, report in self._rows:
            sizes = [format_nbytes(n) if n else "" for n in (report.encoded_nbytes, report.decoded_nbytes)]
            yield f"{name:24}{seconds:8.2f}{sizes[0]:>12}{sizes[1]:>12}".rstrip()


def _draw(results: Mapping[str, Mapping[str, xr.DataArray]], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplot_mosaic([list(results), ["series"] * len(results)], height_ratios=[1.1, 1])
    top = max(float(found["warming"].max()) for found in results.values())
    for run, found in results.items():
        grid = found["warming"]
        mesh = axes[run].pcolormesh(grid["longitude"] - 360, grid["latitude"], grid, cmap="YlOrRd", vmin=0, vmax=top)
        axes[run].set_title(f"{run}: warming, {PERIODS}", fontsize=11)
        axes[run].xaxis.set_major_formatter(lambda longitude, _: f"{-longitude:.0f}°W")
        axes[run].yaxis.set_major_formatter(lambda latitude, _: f"{latitude:.0f}°N")
        years = [when.year for when in found["series"]["time"].values]
        axes["series"].plot(years, found["series"] - 273.15, color=COLORS[run], linewidth=1.2, label=run)
    figure.colorbar(mesh, ax=[axes[run] for run in results], label="K", shrink=0.9)
    axes["series"].set_title("Annual mean air temperature over the region", fontsize=11)
    axes["series"].set_ylabel("°C")
    axes["series"].set_xlim(years[0], years[-1])
    axes["series"].legend(frameon=False)
    axes["series"].spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)
