"""Does every module import only what its row of docs/explanation/layers.md allows?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "xgpuzarr").rglob("*.py")
}
CUDA = {"cupy", "cupyx", "kvikio", "nvidia"}


def _table() -> list[tuple[list[str], bool]]:
    """Rows of the table: the modules or packages each names, and whether it is marked G."""
    block = re.search(r"```text\n(.*?)```", (ROOT / "docs/explanation/layers.md").read_text(), re.DOTALL).group(1)
    rows = []
    for line in block.splitlines():
        names, mark = re.match(r"((?:\S+(?:\.py|/) )+) *(G )?", line).groups()
        rows.append((["xgpuzarr." + name.removesuffix(".py").rstrip("/") for name in names.split()], bool(mark)))
    return rows


ROWS = _table()


def _row(module: str) -> int:
    found = [i for i, (names, _) in enumerate(ROWS) for name in names if (module + ".").startswith(name + ".")]
    assert found, f"{module} stands in no row of docs/explanation/layers.md"
    return found[0]


def _imports(module: str) -> list[tuple[str, bool]]:
    """Each import of a module, as a full name, and whether it runs when the module is imported."""
    tree = ast.parse(MODULES[module].read_text())
    later = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(scope, ast.If) and ast.unparse(scope.test) == "TYPE_CHECKING")
        for node in ast.walk(scope)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in later) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += [(f"{node.module}.{alias.name}", id(node) not in later) for alias in node.names]
    return found


def _own(name: str) -> str:
    """The module of this package that an imported name is, or lies in."""
    return name if name in MODULES else name.rpartition(".")[0]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"xgpuzarr"}))
def test_imports_only_from_above(module: str) -> None:
    row = _row(module)
    for name, _ in _imports(module):
        if name.startswith("xgpuzarr.") and _own(name) != "xgpuzarr":
            assert _row(_own(name)) <= row, f"{module} imports {_own(name)}, which is below it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_marked_rows_import_cuda(module: str) -> None:
    imported = {name.split(".")[0] for name, _ in _imports(module)} & CUDA
    assert not imported or ROWS[_row(module)][1], f"{module} imports {imported}, and its row has no G"


def test_importing_a_module_runs_no_cuda_import() -> None:
    """Modules that import CUDA when they are imported must be imported by the others only inside functions."""
    at_once = {module: [_own(name) for name, now in _imports(module) if now] for module in MODULES}
    needs_cuda = {
        module for module in MODULES if any(now and name.split(".")[0] in CUDA for name, now in _imports(module))
    }
    entry_points = {"xgpuzarr", "xgpuzarr.xarray_backend", "xgpuzarr.cli", "xgpuzarr.array", "xgpuzarr.dask_arrays"}
    reached, todo = set(), set(entry_points)
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= {name for name in at_once[module] if name in MODULES} - reached
    assert not reached & needs_cuda


def test_every_row_exists() -> None:
    for names, _ in ROWS:
        for name in names:
            assert name in MODULES, f"docs/explanation/layers.md names {name}"


def test_planning_is_pure() -> None:
    """plan/ does no I/O, and knows zarr-python only where layouts are made from its arrays."""
    impure = {"dask", "xarray", "numcodecs", "zarr", "os", "io", "pathlib"}
    for module in MODULES:
        if module.startswith("xgpuzarr.plan"):
            outside = {name.split(".")[0] for name, _ in _imports(module)} & impure
            assert outside <= ({"zarr"} if module == "xgpuzarr.plan.layout" else set()), module
