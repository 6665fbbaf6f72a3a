"""Every knob of a read, in one place: its unit, its default, and why that default."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Device", "ReadOptions", "checked_options"]

Device = Literal["auto", "cuda", "cpu"]

KIB = 1 << 10
MIB = 1 << 20


def usable_cpus() -> int:
    """CPUs this process may run on; containers and batch systems often allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _route_of_environment() -> Any:
    """Read the default route; whether it is one is looked at where options are made."""
    return os.environ.get("XGPUZARR_ROUTE", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How chunks are read and decoded. Results never depend on it; speed and memory do.

    Attributes
    ----------
    route
        "auto" decodes where the codec chain allows, the device first, unless the host's cores would be done sooner
        (`xgpuzarr.plan.cost`). "host" decodes everything on the host, then copies. "device" raises
        `UnsupportedError` for an array that would need the host. Default: the environment's ``XGPUZARR_ROUTE``, or
        "auto".
    n_threads
        Host threads that read and decode. None: as many as the CPUs that the reading process may run on.
    concurrency
        Requests to a store that is not a local folder, in flight at once for one read.
    n_retries
        How often a request to such a store is made again after the connection was lost, the answer was cut short, or
        the server was busy (HTTP status 408, 429 or 5xx). For stores without retries of their own, as fsspec's HTTP;
        others have given up by then. The pauses are 0.1 s, 0.4 s, 1.6 s, ...
    timeout_s
        Seconds after which such a request is an error, with all retries. It bounds a read where a store has no bound
        of its own. 300 s is enough for a full read on a slow line.
    remote_reader
        Who reads the chunks of such a store to the device. "client": the store's client, into host memory. "kvikio":
        KvikIO's remote files, straight into device memory; `UnsupportedError` for an array that they cannot read as the
        client would (`ZarrArray.remote_reader_reason`). "auto": KvikIO where it can, and where the requests of a read
        are large enough for it to be faster; else the client.
    max_gap_bytes
        Two byte ranges of one file closer than this are read as one. 64 KiB costs a local disk less than a
        second request does.
    max_remote_gap_bytes
        The same for objects of other stores, where a request costs as much as 1 MiB or more.
    max_read_bytes
        Largest read made by joining byte ranges. Larger single chunks are still read whole.
    max_batch_bytes
        Device bytes one read may use beyond its result (encoded bytes, scratch, undelivered chunks).
        None: half of the device memory that is free when the read starts, or what part of it the reads leave that
        other threads of the process make at the same time.
    target_block_bytes
        Decoded bytes that one dask block aims at, in whole chunks or shards. None: a 16th of the GPU's memory, at least
        256 MiB and at most 8 GiB, for a read takes some milliseconds however small it is
        (``benchmarks/dask_mean.py``); of 64 GiB where this process has none. On the host 128 MiB, which is dask's own.
    """

    route: Literal["auto", "device", "host"] = field(default_factory=_route_of_environment)
    n_threads: int | None = None
    concurrency: int = 64
    n_retries: int = 3
    timeout_s: float = 300.0
    remote_reader: Literal["auto", "client", "kvikio"] = "auto"
    max_gap_bytes: int = 64 * KIB
    max_remote_gap_bytes: int = MIB
    max_read_bytes: int = 16 * MIB
    max_batch_bytes: int | None = None
    target_block_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.route not in ("auto", "device", "host"):
            raise ValueError(f"route must be 'auto', 'device' or 'host', got {self.route!r}")
        if self.remote_reader not in ("auto", "client", "kvikio"):
            raise ValueError(f"remote_reader must be 'auto', 'client' or 'kvikio', got {self.remote_reader!r}")
        for name, least in (
            ("n_threads", 1),
            ("concurrency", 1),
            ("n_retries", 0),
            ("max_gap_bytes", 0),
            ("max_remote_gap_bytes", 0),
            ("max_read_bytes", 1),
            ("target_block_bytes", 1),
        ):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0 s, got {self.timeout_s}")
        if self.max_batch_bytes is not None and self.max_batch_bytes < MIB:
            raise ValueError(f"max_batch_bytes must be at least {MIB} bytes, got {self.max_batch_bytes}")

    @property
    def threads(self) -> int:
        """Host threads to use in this process."""
        return self.n_threads or usable_cpus()


def checked_options(options: Any) -> ReadOptions:
    """Give the options that a user passed; None stands for the defaults.

    Raises
    ------
    TypeError
        They are no `ReadOptions`.
    """
    if options is None:
        return ReadOptions()
    if not isinstance(options, ReadOptions):
        raise TypeError(f"options must be an xgpuzarr.ReadOptions, such as ReadOptions(n_threads=4), got {options!r}")
    return options
