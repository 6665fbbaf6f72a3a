"""What every test shares: where GPU tests run and what a missing tool means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

REQUIRE_ALL = os.environ.get("XGPUZARR_REQUIRE_ALL") == "1" or os.environ.get("CI") == "true"

# Deadlines are timings, and those depend on what else the machine does.
hypothesis.settings.register_profile("xgpuzarr", deadline=None, print_blob=True)
hypothesis.settings.load_profile("xgpuzarr")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out unless -m names them."""
    if "gpu" in config.option.markexpr:
        return
    deselected = [item for item in items if item.get_closest_marker("gpu")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything is required, a test that can't run has failed; xarray's own tests may skip as xarray decides."""
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail") and "xarray_suite" not in item.path.parts:
        report.outcome = "failed"
        report.longrepr = f"skipped, although XGPUZARR_REQUIRE_ALL is set: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for modules that skip as a whole."""
    report = yield
    if REQUIRE_ALL and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, although XGPUZARR_REQUIRE_ALL is set: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _usable_device(request: pytest.FixtureRequest) -> None:
    """Fail a GPU test at once, with CUDA's own message, where no device is usable."""
    if request.node.get_closest_marker("gpu"):
        import cupy

        cupy.cuda.Device(0).use()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Both devices that a read can be asked for; "cuda" only with -m gpu."""
    return request.param
