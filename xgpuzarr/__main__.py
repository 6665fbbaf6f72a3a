"""``python -m xgpuzarr``: the command `xgpuzarr`, for an environment whose scripts are not on the path."""

import sys

from xgpuzarr.cli import main

if __name__ == "__main__":
    sys.exit(main())
