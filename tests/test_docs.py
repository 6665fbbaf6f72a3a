"""Does the code in the documentation run, on a machine without a GPU?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import xgpuzarr
from xgpuzarr import array

ROOT = Path(__file__).parents[1]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

pytestmark = pytest.mark.filterwarnings(
    "ignore:reading into host memory:UserWarning",
    "ignore:Consolidated metadata is currently not part in the Zarr format 3:zarr.errors.ZarrUserWarning",
)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(array, "device_problem", lambda: "the documentation is tested on the host")


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/how-to.md"])
def test_python_blocks_run(page: str) -> None:
    """Blocks of one page run in order and share their names; those marked `no-run` need data that is not there."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run(notebook: Path) -> None:
    document = json.loads(notebook.read_text())
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names: dict[str, object] = {}
    for cell in code:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_reference_names_every_public_name() -> None:
    reference = (ROOT / "docs/reference.md").read_text()
    for name in xgpuzarr.__all__:
        module = getattr(getattr(xgpuzarr, name), "__module__", "")
        if module != "xgpuzarr.errors" and name != "__version__":
            assert f"::: {module}.{name}" in reference
