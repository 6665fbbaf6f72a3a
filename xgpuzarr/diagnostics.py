"""What did a read do? Every read makes one `ReadReport`; `collect` gathers those of a stretch of code.

>>> import xgpuzarr.diagnostics as diagnostics
>>> with diagnostics.collect() as reports:
...     pass  # read something
>>> diagnostics.total(reports).decoded_nbytes
0
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ReadReport", "collect", "emit", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """One read.

    Attributes
    ----------
    array
        Path of the array in its store.
    route
        Where its chunks were decoded: "device" or "host".
    remote_reader
        Who read chunks to the device, out of a store that is no local folder: "kvikio" or the store's "client"; "" for
        reads of folders, and for chunks that were decoded on the host.
    remote_reader_reason
        Why the client, and not KvikIO.
    n_again
        Spans that KvikIO did not bring, and the client was asked for again.
    n_reads
        Reads that the report covers.
    n_chunks, n_missing
        Chunks touched, and how many of them do not exist and read as the fill value.
    n_host_chunks
        Chunks of a device read that were decoded on the host after all: frames the device decoder does not take.
    encoded_nbytes, decoded_nbytes, out_nbytes
        Bytes read from the store, bytes after decoding, bytes of the result.
    read_s, decode_s, place_s
        Seconds spent reading, decoding, and copying chunks to their place. On the host they are summed over threads;
        on the device the reads and the decoding of different batches overlap. Their sum is not `total_s`.
    total_s
        Seconds from the call to the finished result.
    """

    array: str
    route: str
    remote_reader: str = ""
    remote_reader_reason: str = ""
    n_again: int = 0
    n_reads: int = 1
    n_chunks: int = 0
    n_missing: int = 0
    n_host_chunks: int = 0
    encoded_nbytes: int = 0
    decoded_nbytes: int = 0
    out_nbytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    place_s: float = 0.0
    total_s: float = 0.0


NAMES = {"array": ", ", "route": ", ", "remote_reader": ", ", "remote_reader_reason": "; "}
"""Attributes that are text, and what stands between several of them."""

_collectors: list[list[ReadReport]] = []
_lock = threading.Lock()


@contextmanager
def collect() -> Iterator[list[ReadReport]]:
    """Gather the reports of every read of this process, on any thread, until the block ends."""
    reports: list[ReadReport] = []
    with _lock:
        _collectors.append(reports)
    try:
        yield reports
    finally:
        with _lock:
            # by identity: two collectors with equal reports are still two
            _collectors[:] = [c for c in _collectors if c is not reports]


def emit(report: ReadReport) -> None:
    """Give a finished read's report to whoever collects."""
    with _lock:
        for reports in _collectors:
            reports.append(report)


def total(reports: Iterable[ReadReport]) -> ReadReport:
    """One report with the sums; names that differ are joined."""
    result = ReadReport(array="", route="", n_reads=0)
    for report in reports:
        changes: dict[str, object] = {
            field.name: getattr(result, field.name) + getattr(report, field.name)
            for field in fields(report)
            if field.name not in NAMES
        }
        for name, separator in NAMES.items():
            known = getattr(result, name).split(separator) if getattr(result, name) else []
            if getattr(report, name) not in ("", *known):
                known.append(getattr(report, name))
            changes[name] = separator.join(known)
        result = replace(result, **changes)  # type: ignore[arg-type]
    return result
