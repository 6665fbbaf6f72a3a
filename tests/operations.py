"""What happens to data on the device in the operations of xarray that people use: the table and the page made of it.

`tests/test_operations.py` carries out every row on both devices, and `scripts/generate_operations.py` writes
`docs/operations.md`. Where an outcome here is wrong, the test's message names the one that was observed.
"""

from __future__ import annotations

import ast
import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

DEVICE = "device"
HOST = "host"

TO_HOST = "ds = ds.gpuzarr.to_host()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of the table.

    Attributes
    ----------
    name
        What a reader looks for.
    code
        Statements on the dataset `ds`, the last of them an expression: the result.
    lazy, dask
        Where the result of data on the device is, "device" or "host"; or the name of the error. With ``chunks=None``,
        and with dask blocks, where an error may come as late as `compute`. "" if the operation makes no sense there.
    exit
        Statements that give the CPU's answer on the host or the device where `code` gives an error.
    """

    name: str
    code: str
    lazy: str = DEVICE
    dask: str = DEVICE
    exit: str = ""

    def outcome(self, *, chunked: bool) -> str:
        """Where the result is, or the name of the error."""
        return self.dask if chunked else self.lazy


def fails(name: str, code: str, exit: str = "", *, error: str = "TypeError") -> Operation:  # noqa: A002
    """Make the row of an operation that data on the device does not take; without `exit`, it is done on the host."""
    return Operation(name=name, code=code, lazy=error, dask=error, exit=exit or f"{TO_HOST}; {code}")


def works(name: str, code: str, *, dask: str = DEVICE) -> Operation:
    """Make the row of an operation whose result is on the device."""
    return Operation(name=name, code=code, dask=dask)


def reads_first(name: str, code: str, *, lazy: str = DEVICE, dask: str = DEVICE) -> Operation:
    """Make the row of an operation that data on the device takes only once it is in memory."""
    return Operation(name=name, code=code, lazy=lazy, dask=dask, exit=f"ds = ds.compute(); {code}")


def leaves(name: str, code: str) -> Operation:
    """Make the row of an operation that is there to give something on the host."""
    return Operation(name=name, code=code, lazy=HOST, dask=HOST)


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "Selection": (
        works("integer", "ds.isel(time=3)"),
        works("list of integers", "ds.isel(lat=[0, 2])"),
        works("slice with a stride", "ds.isel(lon=slice(1, None, 2))"),
        works("reversed", "ds.isel(lat=slice(None, None, -1))"),
        works("label", "ds.sel(lat=20.0)"),
        works("nearest label", 'ds.sel(lat=21.0, method="nearest")'),
        works("slice of labels", 'ds.sel(time=slice("2000-03", "2001-02"))'),
        works("condition on a coordinate", "ds.sel(lon=ds.lon > 2)"),
        works("condition on times", "ds.sel(time=ds.time.dt.month.isin([6, 7, 8]))"),
        works("points", 'ds.t.isel(time=xr.DataArray([0, 3, 5], dims="p"), lat=xr.DataArray([1, 0, 3], dims="p"))'),
        works("brackets", "ds.t[2:9, ::2, 1]"),
        works("head, tail, thin", "ds.head(time=6).tail(time=4).thin(lon=2)"),
        reads_first("reindex", "ds.t.reindex(lat=[5.0, 10.0, 20.0])", dask="TypeError"),
        works("drop labels", "ds.drop_sel(lat=[20.0])"),
        Operation(
            name="position from data",
            code="ds.t.isel(lat=ds.t.mean(('time', 'lon')).argmax('lat'))",
            lazy="ValueError",
            dask="",
            exit="ds.t.isel(lat=int(ds.t.mean(('time', 'lon')).argmax('lat')))",
        ),
        Operation(
            name="condition on data",
            code="ds.t.isel(time=ds.n > 4)",
            lazy="TypeError",
            dask="",
            exit="ds.t.isel(time=(ds.n > 4).as_numpy())",
        ),
    ),
    "Arithmetic": (
        works("scalars", "2 * ds.t - 273.15"),
        works("variables", "ds.t + ds.p / ds.n"),
        works("with an index", "ds.t * np.cos(np.deg2rad(ds.lat))"),
        works("an index first", "np.cos(np.deg2rad(ds.lat)) * ds.t"),
        works("with a 2-D coordinate", "ds.t / ds.area"),
        works("with a NumPy array", "ds.t + np.arange(6.0)"),
        works("comparison", "ds.t > ds.area"),
        works("boolean operators", "(ds.t > 5) & ~ds.land"),
        works("power and absolute value", "abs(ds.t) ** 0.5"),
        works("NumPy function", "np.sqrt(ds.p)"),
        works("whole dataset", "ds[['t', 'p']] * ds.lat"),
        works("anomaly", "ds.t - ds.t.mean('time')"),
        works("standardise", "(ds.t - ds.t.mean('time')) / ds.t.std('time')"),
        works("round", "ds.t.round(0)"),
        works("NumPy function, then an index", "np.sqrt(ds.p) * ds.lat"),
        works("fillna, then an index", "ds.t.fillna(ds.t.dtype.type(0)) * ds.lat"),
        works("where, then an index", "ds.lat - ds.t.where(ds.t > 5)"),
        works("astype, then a 2-D coordinate", "ds.area * ds.t.astype('float32')"),
        works("mask of values and a coordinate", "ds.t.isnull() & (ds.lat > 15)"),
        works("concat, then an index", "xr.concat([ds.t, ds.p], 'kind') * ds.lat"),
        works("float32, then an index", "ds.p.fillna(np.float32(0)) * ds.lat.astype('float32')"),
        works("NumPy's number in a comparison", "np.float32(5) < ds.t"),
        works("in place", "t = ds.t; t *= 2; t"),
        works("in place, with an index", "t = ds.t.fillna(ds.t.dtype.type(0)); t *= ds.lat; t"),
        Operation(
            name="in place, on the host",
            code="a = xr.zeros_like(ds.area).rename(None); a += ds.p.max('time'); a",
            lazy="TypeError",
            exit="a = xr.zeros_like(ds.area).rename(None); a = a + ds.p.max('time'); a",
        ),
        works("assign variables", "ds.assign(f=ds.t * 1.8 + 32)"),
        works("astype", "ds.t.astype('float32')"),
        works("real and imaginary part", "(ds.t * (1 + 2j)).imag"),
    ),
    "Missing values and conditions": (
        works("where", "ds.t.where(ds.t > 5)"),
        Operation(
            name="where, with another value",
            code="ds.t.where(ds.t > 5, 0.0)",
            dask="TypeError",
            exit="ds.t.where(ds.t > 5, ds.t.dtype.type(0))",
        ),
        works("where, on a mask of the store", "ds.t.where(ds.land)"),
        works("where, on a coordinate", "ds.t.where(ds.lat > 15)"),
        works("where, on a coordinate, dropping the rest", "ds.t.where(ds.lat > 15, drop=True)"),
        works("NumPy function with a coordinate", "np.maximum(ds.t, ds.lat)"),
        Operation(
            name="where, dropping the rest",
            code="ds.t.where(ds.t > 17.5, drop=True)",
            lazy="TypeError",
            dask="",
            exit=f"{TO_HOST}; ds.t.where(ds.t > 17.5, drop=True)",
        ),
        Operation(
            name="xr.where",
            code="xr.where(ds.t > 5, ds.t, 0.0)",
            dask="TypeError",
            exit="xr.where(ds.t > 5, ds.t, ds.t.dtype.type(0))",
        ),
        Operation(name="fillna", code="ds.t.fillna(0.0)", dask="TypeError", exit="ds.t.fillna(ds.t.dtype.type(0))"),
        works("fillna from another variable", "ds.t.fillna(ds.p)"),
        works("isnull and notnull", "ds.t.isnull() | ds.p.notnull()"),
        works("dropna", "ds.t.dropna('time')"),
        works("clip", "ds.t.clip(2.0, 8.0)"),
        Operation(
            name="isin",
            code="ds.n.isin([3, 4])",
            lazy="AttributeError",
            dask="TypeError",
            exit="(ds.n == 3) | (ds.n == 4)",
        ),
        fails("interpolate_na", "ds.t.interpolate_na('lat')"),
    ),
    "Reductions": (
        works("mean", "ds.t.mean('time')"),
        works("mean of a dataset", "ds.mean(('lat', 'lon'))"),
        works("sum", "ds.t.sum(('lat', 'lon'), min_count=2)"),
        works("std and var", "ds.t.std('time') + ds.t.var('time', ddof=1)"),
        works("min and max", "ds.t.max('time') - ds.t.min()"),
        works("median", "ds.t.median('lat')"),
        works("argmax", "ds.t.argmax('lat')"),
        Operation(name="idxmax", code="ds.t.idxmax('lat')", dask="TypeError", exit=f"{TO_HOST}; ds.t.idxmax('lat')"),
        works("any and all", "(ds.t > 5).any('time') | (ds.t > 1).all('time')"),
        works("count", "ds.t.count('time')"),
        works("prod", "ds.p.prod('lat')"),
        works("cumsum", "ds.t.cumsum('time')"),
        works("cumprod", "ds.p.cumprod('lat')"),
        fails("quantile", "ds.t.quantile([0.1, 0.9], 'lat')"),
        works("quantile, of values without NaN", "ds.p.quantile([0.1, 0.9], 'lat', skipna=False)"),
        works("reduce by a NumPy function", "ds.p.reduce(np.ptp, 'lat')"),
        leaves("one number", "float(ds.t.mean())"),
        leaves("one truth value", "bool((ds.t > 100).any())"),
    ),
    "Groups and windows": (
        works("groupby, without flox", "xr.set_options(use_flox=False); ds.t.groupby('time.month').mean()"),
        fails(
            "groupby, with flox",
            "ds.t.groupby('time.month').mean()",
            "xr.set_options(use_flox=False); ds.t.groupby('time.month').mean()",
        ),
        works(
            "anomaly from a climatology",
            "xr.set_options(use_flox=False); ds.t.groupby('time.month') - ds.t.groupby('time.month').mean()",
        ),
        works("groupby_bins", "xr.set_options(use_flox=False); ds.t.groupby_bins('lat', [0, 25, 50]).max()"),
        works("groupby, map", "ds.t.groupby('time.season').map(lambda t: t - t.mean('time'))"),
        works("resample, without flox", "xr.set_options(use_flox=False); ds.t.resample(time='YS').mean()"),
        fails(
            "resample, with flox",
            "ds.t.resample(time='YS').mean()",
            "xr.set_options(use_flox=False); ds.t.resample(time='YS').mean()",
        ),
        reads_first("rolling mean", "ds.t.rolling(time=3, center=True).mean()", dask="TypeError"),
        works("rolling windows", "ds.t.rolling(time=3).construct('window')"),
        reads_first("rolling maximum", "ds.t.rolling(time=3, min_periods=1).max()", dask="TypeError"),
        works("coarsen", "ds.t.coarsen(time=12, lat=2).mean()"),
        reads_first(
            "weighted mean", "ds.t.weighted(np.cos(np.deg2rad(ds.lat))).mean(('lat', 'lon'))", dask="TypeError"
        ),
        reads_first("weighted sum, by a variable", "ds.t.weighted(ds.p[0]).sum(('lat', 'lon'))", dask="TypeError"),
        fails("weighted quantile", "ds.t.weighted(ds.lat).quantile(0.5, dim='lat')"),
    ),
    "Along a dimension": (
        fails("interp", "ds.t.interp(lat=[12.0, 27.0])"),
        fails("interp, nearest", "ds.t.interp(lat=[12.0, 27.0], method='nearest')"),
        works("diff", "ds.t.diff('time')"),
        works("shift", "ds.t.shift(time=1)"),
        works("roll", "ds.t.roll(lon=2)"),
        works("differentiate", "ds.p.differentiate('lat')"),
        reads_first("integrate", "ds.p.integrate('lat')", dask="TypeError"),
        reads_first("cumulative_integrate", "ds.p.cumulative_integrate('lat')", dask="TypeError"),
        works("pad", "ds.t.pad(lon=(1, 2))"),
        works("pad, wrapped", "ds.t.pad(lon=2, mode='wrap')"),
        fails("polyfit", "ds.p.polyfit('time', 1).polyfit_coefficients"),
        works("polyval", "xr.polyval(ds.p, xr.DataArray([1.0, 2.0], dims='degree', coords={'degree': [0, 1]}))"),
        works("correlation", "xr.corr(ds.t, ds.t.roll(lon=1), 'time')"),
        works("covariance", "xr.cov(ds.t, ds.t.roll(lon=1), 'time')"),
        works("dot", "xr.dot(ds.p, ds.p, dim='time')"),
        works("dot with a coordinate", "xr.dot(ds.p, np.cos(np.deg2rad(ds.lat)), dim='lat')"),
    ),
    "Combining and reshaping": (
        reads_first("concat", "xr.concat([ds.t[:9], ds.t[9:]], 'time')", lazy="TypeError"),
        works("concat along a new dimension", "xr.concat([ds.t, ds.p], 'kind')"),
        works("merge", "xr.merge([ds.t, ds.p], compat='override')"),
        reads_first(
            "merge, outer join",
            "xr.merge([ds.t[:, :2], ds.p[:, 1:]], join='outer', compat='override')",
            dask="TypeError",
        ),
        reads_first(
            "combine_by_coords",
            "xr.combine_by_coords([ds[['t']].isel(lat=[0, 1]), ds[['t']].isel(lat=[2, 3])])",
            lazy="TypeError",
        ),
        works("combine_first", "ds.t.combine_first(ds.p)"),
        reads_first("align", "xr.align(ds.t[:, :2], ds.p[:, 1:], join='outer')[0]", dask="TypeError"),
        works("stack", "ds.t.stack(point=('lat', 'lon'))"),
        works("stack and unstack", "ds.t.stack(point=('lat', 'lon')).unstack()"),
        works("transpose", "ds.transpose('lon', ...)"),
        works("expand_dims", "ds.t.expand_dims(member=2)"),
        works("squeeze", "ds.t.isel(lat=[1]).squeeze()"),
        works("broadcast", "xr.broadcast(ds.n, ds.t)[0]"),
        works("broadcast_like", "ds.n.broadcast_like(ds.t)"),
        works("sort by a coordinate", "ds.sortby('lat', ascending=False)"),
        fails("sort by a variable", "ds.sortby(ds.n)"),
        works("rename and swap dimensions", "ds.rename(t='temperature').swap_dims(lon='x')"),
        works("dataset to array", "ds[['t', 'p']].to_dataarray()"),
        works("coordinate from data", "ds.set_coords('p').t"),
    ),
    "Functions and blocks": (
        works("apply_ufunc", "xr.apply_ufunc(lambda t: 2 * t, ds.t, dask='allowed')"),
        works(
            "apply_ufunc along a dimension",
            "xr.apply_ufunc(lambda t: t.max(-1), ds.p, input_core_dims=[['lon']], dask='parallelized', "
            "output_dtypes=['f4'])",
        ),
        works("map", "ds[['t', 'p']].map(np.negative)"),
        works("pipe", "ds.t.pipe(lambda t: t + 1)"),
        works("map_blocks", "ds.t.map_blocks(lambda t: 2 * t)"),
        works("chunk", "ds.chunk(time=12)"),
        works("rechunk", "ds.chunk(time=12).chunk(time=8, lon=3)"),
        works("persist", "ds.persist()"),
        works("compute", "ds.compute()"),
        works("load", "ds.load()"),
        works("copy", "ds.copy(deep=True)"),
        works("zeros_like, ones_like, full_like", "xr.full_like(ds.t, 3.0)", dask=HOST),
        works("copy.deepcopy", "copy.deepcopy(ds)"),
        works("pickle", "pickle.loads(pickle.dumps(ds))"),
        works("assign to a selection", "ds.t[0] = 0.0; ds.t"),
        works("assign to labels", "ds.t.loc[dict(lat=20.0)] = ds.t.sel(lat=10.0); ds.t"),
        leaves("equals", "ds.equals(ds.copy())"),
        leaves("identical", "ds.identical(ds.copy())"),
        works("datatree", "xr.DataTree.from_dict({'/a': ds}).mean('time')['/a'].to_dataset()"),
    ),
    "Output": (
        leaves("repr", "'float64' in repr(ds)"),
        leaves("repr of a variable that was read", "'float64' in repr(ds.t.compute())"),
        leaves("HTML repr", "'float64' in ds._repr_html_()"),
        leaves("as_numpy", "ds.as_numpy()"),
        leaves("to_numpy", "ds.t.to_numpy()"),
        leaves("to_host", "ds.gpuzarr.to_host()"),
        fails("values", "ds.t.values", "ds.t.as_numpy().values"),
        leaves("values of a coordinate", "ds.lat.values"),
        fails("np.asarray", "np.asarray(ds.t)", "np.asarray(ds.t.as_numpy())"),
        Operation(name="item", code="ds.t[1, 1, 1].item()", lazy=HOST, dask=""),
        fails("to_netcdf", "ds.to_netcdf('copy.nc'); xr.load_dataset('copy.nc')"),
        fails(
            "to_zarr", "ds.to_zarr('copy.zarr', mode='w', zarr_format=2); xr.load_dataset('copy.zarr', engine='zarr')"
        ),
        fails("to_dataframe", "ds.to_dataframe()"),
        fails("to_pandas", "ds.n.to_pandas()"),
        fails("to_series", "ds.t.to_series()"),
        leaves("to_dict", "ds.n.to_dict()"),
        leaves("line plot", "ds.t.mean(('lat', 'lon')).plot()[0].get_ydata()"),
        leaves("map plot", "ds.t.isel(time=0).plot().get_array()"),
        leaves("histogram", "ds.t.plot.hist()[0]"),
        leaves("faceted plot", "ds.t.isel(time=slice(2)).plot(col='time').axs[0, 1].collections[0].get_array()"),
        fails("scatter plot", "ds.plot.scatter(x='t', y='p').get_offsets()"),
    ),
}


def dataset() -> xr.Dataset:
    """Two years of months on a small map: packed, float, integer and boolean variables, with missing values."""
    rng = np.random.default_rng(5)
    shape = {"time": 24, "lat": 4, "lon": 6}
    t = rng.integers(0, 180, tuple(shape.values())) / 10
    t[3, 1, 2] = t[7:9, 0] = np.nan
    return xr.Dataset(
        {
            "t": (tuple(shape), t, {"units": "degC"}),
            "p": (tuple(shape), rng.random(tuple(shape.values()), np.float32) + 0.5),
            "n": ("time", rng.integers(1, 9, 24).astype(np.int32)),
            "land": (("lat", "lon"), rng.random((4, 6)) > 0.4),
        },
        {
            "time": pd.date_range("2000-01-01", periods=24, freq="MS"),
            "lat": [10.0, 20.0, 30.0, 40.0],
            "lon": np.arange(6.0),
            "area": (("lat", "lon"), rng.random((4, 6)) + 1),
        },
    )


ENCODING: dict[str, dict[str, Any]] = {
    "t": {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -1, "chunks": (12, 4, 6)},
    "p": {"chunks": (12, 4, 6)},
    "n": {"chunks": (12,)},
}


def carry_out(code: str, ds: xr.Dataset) -> Any:
    """Value of the last statement, computed if it is of dask arrays."""
    names = {"ds": ds, "np": np, "xr": xr, "copy": copy, "pickle": pickle}
    *statements, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(statements, []), code, "exec"), names)
    result = eval(compile(ast.Expression(last.value), code, "eval"), names)
    return result.compute() if isinstance(result, (xr.Dataset, xr.DataArray)) else result


HEAD = """\
# What works on the device

<!-- Written by scripts/generate_operations.py from the table in tests/operations.py. -->

A test carries out each operation on the CPU, where it gives what `engine="zarr"` gives, and on a GPU, with the outcome
that the columns say:

- **device**: the same result, on the device.
- **host**: the same result, on the host: that is what the operation is for.
- **the name of an error**: nothing is copied to the host unless it is asked for. The last column gives the same result.

`ds` is `xr.open_dataset(path, engine="gpuzarr")`. The variables `t` and `p` (time, lat, lon), `n` (time) and `land`
(lat, lon) are on the device; the coordinates `time`, `lat`, `lon` and `area` (lat, lon) are on the host. *lazy* is
without `chunks=`; *dask* is with it, and an error may then come as late as `compute`. An outcome is missing where
xarray has no such operation.
"""


def page() -> str:
    """Text of `docs/operations.md`."""
    return HEAD + "".join(_section(title, rows) for title, rows in OPERATIONS.items())


def _section(title: str, rows: tuple[Operation, ...]) -> str:
    lines = ["", f"## {title}", "", "| operation | code | lazy | dask | instead |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        first = row.exit.removesuffix(f"; {row.code}")
        instead = f"{_cell(first)} first" if first != row.exit else _cell(row.exit)
        lines.append(f"| {row.name} | {_cell(row.code)} | {row.lazy} | {row.dask} | {instead} |")
    return "\n".join([*lines, ""])


def _cell(code: str) -> str:
    return "<br>".join(f"`{statement}`" for statement in code.replace("|", "\\|").split("; ") if statement)
