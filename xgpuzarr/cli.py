"""The command `xgpuzarr`: look into stores, ask what this machine can do, see it work. None of it needs a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from xgpuzarr import __version__
from xgpuzarr.errors import XGpuZarrError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Arguments after the program's name; None takes those of this process.

    Returns
    -------
    int
        Exit code: 0, or 1 after an error that was printed. Wrong arguments end the process with 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (XGpuZarrError, OSError) as error:
        from xgpuzarr.inspection import printable

        print(f"xgpuzarr: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xgpuzarr", description="Read Zarr stores into GPU memory.")
    parser.add_argument("--version", action="version", version=f"xgpuzarr {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect", help="list a store's arrays: shapes, codecs, sizes, and where they are decoded"
    )
    inspect.add_argument("store", help="folder, .zip file or URL")
    inspect.add_argument("--json", action="store_true", help="write JSON; sizes in bytes")
    inspect.set_defaults(run=_inspect)

    doctor = commands.add_parser("doctor", help="say what this machine can do, and what is missing")
    doctor.add_argument("store", nargs="?", help="local store, whose file system matters to GPUDirect Storage")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="convert two climate runs to Zarr, read them and draw the warming")
    demo.add_argument("--output", type=Path, default=Path("demo-output"), help="folder to write to (%(default)s)")
    demo.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to compute (%(default)s)"
    )
    demo.set_defaults(run=_demo)
    _add_bench(commands.add_parser("bench", help="measure how fast this machine reads, beside other Zarr readers"))
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to read to (%(default)s)"
    )
    bench.add_argument("--encodings", nargs="+", metavar="NAME", help="how the data is stored; all by default")
    bench.add_argument("--fields", type=_count, default=384, help="fields of 721 x 1440 float32 (%(default)s)")
    bench.add_argument("--repeats", type=_count, default=5, help="timed reads; the median counts (%(default)s)")
    bench.add_argument("--no-peers", action="store_true", help="time this package only")
    bench.add_argument(
        "--route", choices=("auto", "device", "host"), default="auto", help="where this package decodes (%(default)s)"
    )
    bench.add_argument("--folder", type=Path, help="where to write the data; a temporary folder by default")
    bench.add_argument("--threads", type=_count, help="host threads of every reader; all usable CPUs by default")
    bench.add_argument("--json", type=Path, help="write the results to this file")
    bench.add_argument("--commit", default="", help="version to record; asked of git by default")
    bench.set_defaults(run=_bench)


def _count(text: str) -> int:
    """Parse an argument that is a number of things."""
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


# Each command imports what it needs: inspect, say, must not wait for dask.


def _inspect(arguments: argparse.Namespace) -> None:
    from xgpuzarr.inspection import as_text, inspect_store

    entries = inspect_store(arguments.store)
    if arguments.json:
        print(json.dumps({"store": arguments.store, "arrays": [asdict(entry) for entry in entries]}, indent=2))
    else:
        print(as_text(arguments.store, entries))


def _doctor(arguments: argparse.Namespace) -> None:
    from xgpuzarr.system import format_report, probe

    if arguments.store is not None and not Path(arguments.store).exists():
        raise FileNotFoundError(f"nothing is at {arguments.store}; give the path of a local store, or none")
    print(format_report(probe(arguments.store)))


def _bench(arguments: argparse.Namespace) -> None:
    from xgpuzarr.bench import run

    _check_device(arguments.device)
    run(arguments)


def _demo(arguments: argparse.Namespace) -> None:
    from xgpuzarr.demo import run_demo

    _check_device(arguments.device)
    run_demo(arguments.output, device=arguments.device)


def _check_device(device: str) -> None:
    from xgpuzarr.system import device_problem

    problem = device_problem() if device == "cuda" else ""
    if problem:
        raise XGpuZarrError(f"no device can be used: {problem}; leave out --device, or give --device cpu")
