#!/usr/bin/env python3
"""Write docs/operations.md from the table of operations that the tests carry out."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    from tests.operations import page

    (ROOT / "docs/operations.md").write_text(page())


if __name__ == "__main__":
    main()
