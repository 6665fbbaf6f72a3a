"""Carrying out a read plan on the host's cores, decoded chunks straight on to the device.

A thread decodes a chunk into page-locked memory and queues its copy to the device, so that the bus works while the
cores do. What is one piece of the result is copied to its place there; the rest goes to scratch, from where a kernel
takes it.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.device_output import DeviceOutput
from xgpuzarr.diagnostics import ReadReport, emit
from xgpuzarr.host_tasks import HostTasks
from xgpuzarr.readers.staging import PinnedPool

if TYPE_CHECKING:
    from xgpuzarr.execute import Source
    from xgpuzarr.plan.read_plan import ReadPlan

__all__ = ["read_staged"]

STAGING_NBYTES = 8 << 20
"""Size of a page-locked buffer. A larger chunk is decoded into ordinary memory, and copied through such buffers."""

SCRATCH_NBYTES = 512 << 20
"""Most device memory for chunks on their way to a place that is not one piece."""


def read_staged(plan: ReadPlan, source: Source) -> cupy.ndarray:
    """Grouped output of a plan, decoded on the host, on the current device.

    Returns
    -------
    cupy.ndarray
        Ready for work on any stream: the host has waited for it.

    Raises
    ------
    CorruptChunkError, ChunkReadError, DeviceMemoryError
        Naming array, chunk and key.
    """
    output = DeviceOutput(plan)
    if output.nbytes:
        _StagedRead(plan, source, output).read()
    return output.result()


class _StagedRead(HostTasks):
    """One read; all its device work is on the stream that is current when it is made."""

    def __init__(self, plan: ReadPlan, source: Source, output: DeviceOutput) -> None:
        super().__init__(plan, source)
        self.output = output
        self.device, self.stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()
        self.pool = _pinned_pool(source.options.threads + 2)
        self.straight_offset = output.decoded_straight_offset
        self.scratch = cupy.empty(0, np.uint8)
        self.scratch_at = np.zeros(plan.n_chunks, np.int64)
        self.missing: list[int] = []
        self.encoded_nbytes: list[int] = []

    def read(self) -> None:
        """Read everything; on return the stream has passed."""
        began = time.perf_counter()
        nbytes = self.plan.layout.chunk_nbytes
        straight, others = np.flatnonzero(self.straight_offset >= 0), np.flatnonzero(self.straight_offset < 0)
        try:
            self.run(straight)
            n_at_once = max(1, SCRATCH_NBYTES // nbytes)
            self.scratch = cupy.empty(min(n_at_once, len(others)) * nbytes, np.uint8)
            for start in range(0, len(others), n_at_once):
                rows = others[start : start + n_at_once]
                self.scratch_at[rows] = np.arange(len(rows)) * nbytes
                self.run(rows)
                placed = np.setdiff1d(rows, self.missing)
                if len(placed):
                    self.output.place(self.scratch, placed, self.scratch_at[placed])
            if self.missing:
                self.source.check_still_there()
                self.output.fill(np.array(sorted(self.missing), np.int64))
        finally:
            self.stream.synchronize()  # nothing writes to the output any more, whatever happened
        self._report(time.perf_counter() - began)

    def place(self, row: int, encoded: memoryview, offset: int | None = None) -> None:
        """Decode one chunk and send it on."""
        self.encoded_nbytes.append(len(encoded))
        nbytes = self.plan.layout.chunk_nbytes
        straight = self.straight_offset[row] >= 0
        target = self.output.memory if straight else self.scratch
        at = int(self.straight_offset[row] if straight else self.scratch_at[row])
        with self.device:
            if nbytes > self.pool.buffer_nbytes:
                chunk = np.empty(nbytes, np.uint8)
                self.decode(row, encoded, chunk, offset)
                self.pool.copy_to_device([memoryview(chunk)], target, np.array([at]), stream=self.stream)
                return
            with self.pool.buffer() as buffer:
                self.decode(row, encoded, buffer.array[:nbytes], offset)
                buffer.send(0, nbytes, target, at, stream=self.stream)

    def fill(self, row: int) -> None:
        """Note that a chunk does not exist."""
        self.missing.append(row)

    def _report(self, total_s: float) -> None:
        plan = self.plan
        emit(
            ReadReport(
                array=plan.layout.path,
                route="host",
                n_chunks=plan.n_chunks,
                n_missing=len(self.missing),
                n_host_chunks=plan.n_chunks - len(self.missing),
                encoded_nbytes=sum(self.encoded_nbytes),
                decoded_nbytes=plan.decoded_nbytes,
                out_nbytes=plan.out_nbytes,
                total_s=total_s,
            )
        )


@cache
def _pinned_pool(n_buffers: int) -> PinnedPool:
    return PinnedPool(STAGING_NBYTES, n_buffers)
