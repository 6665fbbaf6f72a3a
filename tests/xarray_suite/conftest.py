"""Runs xarray's own tests: their marks, their warnings, and the redirection of their reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from xarray.tests.conftest import *  # noqa: F403  # the fixtures of xarray's tests

from tests.xarray_suite.redirect import ENGINE, Redirection

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that name Zarr, in their class, function or parameters.

    Their warnings are left to them: they state the ones they expect. Those that this package gives stay errors.
    """
    ours = [item for item in items if HERE in item.path.parents]
    unrelated = {item for item in ours if "zarr" not in item.nodeid.partition("::")[2].lower()}
    items[:] = [item for item in items if item not in unrelated]
    for item in ours:
        item.add_marker(pytest.mark.filterwarnings("ignore", "error:::xgpuzarr"), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply `skip_if_param(NAME=VALUE, ..., reason=..., condition=True)`, which xarray's own configuration defines."""
    for mark in item.iter_markers("skip_if_param"):
        wanted = dict(mark.kwargs)
        reason, condition = wanted.pop("reason"), wanted.pop("condition", True)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if condition and all(name in params and params[name] == value for name, value in wanted.items()):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def redirection(monkeypatch: pytest.MonkeyPatch) -> Redirection:
    """Send what the test reads through engine="zarr" to this package's engine."""
    redirection = Redirection()
    if ENGINE != "zarr":
        redirection.install(monkeypatch)
    return redirection


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep files that a test writes to the current folder out of the checkout."""
    monkeypatch.chdir(tmp_path)
