"""The result of a device read while it is being filled: its memory, its fill values, and where each chunk goes.

dtypes that CuPy lacks travel as bytes: the output then has one more axis, the bytes of an element, and the result is
turned into NumPy's dtype on the host.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from xgpuzarr.decoders.frames import GUARD_NBYTES
from xgpuzarr.errors import DeviceMemoryError
from xgpuzarr.kernels import launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgpuzarr.plan.read_plan import ReadPlan

__all__ = ["DeviceOutput", "out_of_memory"]


class DeviceOutput:
    """Grouped output of a plan in device memory, allocated on the current stream.

    Parameters
    ----------
    plan
        The read.

    Raises
    ------
    DeviceMemoryError
        The result does not fit the device.
    """

    def __init__(self, plan: ReadPlan) -> None:
        layout = plan.layout
        self.plan = plan
        self.as_bytes = bool(layout.host_result_reason)
        self.itemsize = 1 if self.as_bytes else layout.dtype.itemsize
        self.nbytes = plan.selection.size * layout.dtype.itemsize
        self._missing: list[NDArray[np.int64]] = []
        # What several streams will use is queued before the event that they wait for.
        try:
            self.memory = cupy.empty(self.nbytes + GUARD_NBYTES, np.uint8)
            self.status = launch.new_status()
            self._gather_tables = self._upload_gather_tables() if self.nbytes and not plan.is_of_slices else None
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise out_of_memory(f"array {layout.path!r}: the result", self.nbytes) from error
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.ready.record()

    @cached_property
    def array(self) -> cupy.ndarray:
        """What kernels write to: one axis a group (at least one), and the bytes of an element where it has them."""
        sizes = self.plan.selection.grouped_shape or (1,)
        if self.as_bytes:
            return self.memory[: self.nbytes].reshape(*sizes, self.plan.layout.dtype.itemsize)
        return self.memory[: self.nbytes].view(self.plan.layout.dtype).reshape(sizes)

    @cached_property
    def word_nbytes(self) -> int:
        """Bytes of each run to reverse on the way; 1 where the stored byte order is the result's."""
        dtype, stored = self.plan.layout.dtype, self.plan.layout.codec_chain.stored_dtype
        if self.as_bytes or stored is None or stored == dtype:
            return 1
        return dtype.itemsize // (2 if dtype.kind == "c" else 1)

    @cached_property
    def decoded_straight_offset(self) -> NDArray[np.int64]:
        """For each plan row the byte of the output at which its decoded chunk lies as it is; -1 for the others."""
        layout = self.plan.layout
        in_order = layout.codec_chain.axes(layout.ndim) == tuple(range(layout.ndim))
        if self.word_nbytes != 1 or not in_order:
            return np.full(self.plan.n_chunks, -1, np.int64)
        offset = self.plan.straight_offset(slice(None))
        return np.where(offset >= 0, offset * layout.dtype.itemsize, -1)

    @cached_property
    def straight_offset(self) -> NDArray[np.int64]:
        """As `decoded_straight_offset`, for chunks only decompressed: -1 where filters are still to be undone."""
        if self.plan.layout.codec_chain.filters:
            return np.full(self.plan.n_chunks, -1, np.int64)
        return self.decoded_straight_offset

    def place(self, batch: cupy.ndarray, rows: NDArray[np.int64], chunk_offset: NDArray[np.int64]) -> None:
        """Copy the regions of decoded chunks to the output, on the current stream.

        Parameters
        ----------
        batch
            uint8, 1-D: holds the decoded chunks, whole, as the codec chain leaves them.
        rows
            Plan rows of the chunks.
        chunk_offset
            Byte of `batch` at which each chunk starts.
        """
        columns = self._slice_columns(rows)
        if columns is None:
            self._gather(batch, rows, chunk_offset)
            return
        out_start, count, inner_start, step = columns
        launch.scatter_slices(
            batch,
            self.array,
            out_start=out_start,
            count=count,
            inner_start=inner_start,
            step=step,
            chunk_shape=self._chunk_shape,
            chunk_strides=self._chunk_strides,
            chunk_offset=chunk_offset,
            word_nbytes=self.word_nbytes,
            status=self.status,
        )

    def fill(self, rows: NDArray[np.int64]) -> None:
        """Write the fill value where chunks do not exist, on the current stream."""
        if not len(rows):
            return
        if self.as_bytes:
            self._missing.append(rows)  # filled on the host, which has the dtype
            return
        fill_value: Any = np.asarray(self.plan.layout.fill_value).astype(self.plan.layout.dtype)[()]
        columns = self._slice_columns(rows)
        if columns is not None:
            launch.fill_slices(self.array, fill_value, out_start=columns[0], count=columns[1], status=self.status)
        else:
            slot = np.full(self.plan.n_chunks, launch.SLOT_SKIP, np.int32)
            slot[rows] = launch.SLOT_FILL
            nothing = cupy.empty(0, np.uint8)
            self._launch_gather(nothing, slot, np.empty(0, np.int64), fill_value)

    def result(self) -> Any:
        """The finished grouped output; waits for the current stream and checks every launch."""
        launch.check_status(self.status, f"array {self.plan.layout.path!r}")
        shape, dtype = self.plan.selection.grouped_shape, self.plan.layout.dtype
        if not self.as_bytes:
            return self.array.reshape(shape)
        stored = self.plan.layout.codec_chain.stored_dtype
        host = self.memory[: self.nbytes].get().view(stored).reshape(shape).astype(dtype, copy=False)
        for rows in self._missing:
            for row in rows.tolist():
                positions, _ = self.plan.region(row)
                host[np.ix_(*(np.r_[p] for p in positions))] = self.plan.layout.fill_value
        return host

    @cached_property
    def _axes(self) -> list[int]:
        """Array axes in the order of the groups."""
        return [axis for group in self.plan.selection.groups for axis in group.axes]

    @cached_property
    def _strides(self) -> list[int]:
        """Distance between neighbours along each array axis in a decoded chunk, in elements of the output."""
        layout = self.plan.layout
        strides, distance = [0] * layout.ndim, layout.dtype.itemsize // self.itemsize
        for axis in reversed(layout.codec_chain.axes(layout.ndim)):
            strides[axis] = distance
            distance *= layout.chunk_shape[axis]
        return strides

    @property
    def _chunk_shape(self) -> list[int]:
        shape = [self.plan.layout.chunk_shape[axis] for axis in self._axes] or [1]
        return [*shape, self.plan.layout.dtype.itemsize] if self.as_bytes else shape

    @property
    def _chunk_strides(self) -> list[int]:
        strides = [self._strides[axis] for axis in self._axes] or [1]
        return [*strides, 1] if self.as_bytes else strides

    def _slice_columns(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], tuple[int, ...]] | None:
        """Regions as columns with the axes of `array`; None if a group is not a slice."""
        columns = self.plan.slice_columns(rows)
        if columns is None:
            return None
        out_start, count, inner_start, step = columns.out_start, columns.count, columns.inner_start, columns.step
        extra = ([1] if not self.plan.selection.groups else []) + (
            [self.plan.layout.dtype.itemsize] if self.as_bytes else []
        )
        for length in extra:
            out_start = np.pad(out_start, ((0, 0), (0, 1)))
            inner_start = np.pad(inner_start, ((0, 0), (0, 1)))
            count = np.pad(count, ((0, 0), (0, 1)), constant_values=length)
            step = (*step, 1)
        return out_start, count, inner_start, step

    def _gather(self, batch: cupy.ndarray, rows: NDArray[np.int64], chunk_offset: NDArray[np.int64]) -> None:
        slot = np.full(self.plan.n_chunks, launch.SLOT_SKIP, np.int32)
        slot[rows] = np.arange(len(rows), dtype=np.int32)
        zero: Any = np.zeros((), self.array.dtype)[()]
        self._launch_gather(batch, slot, chunk_offset, zero)

    def _launch_gather(
        self, batch: cupy.ndarray, slot: NDArray[np.int32], chunk_offset: NDArray[np.int64], fill_value: np.generic
    ) -> None:
        tables = self._gather_tables
        assert tables is not None  # slices have columns
        launch.gather_elements(
            batch,
            self.array,
            group_row=tables[0],
            group_inner=tables[1],
            n_group_rows=tables[2],
            slot=slot,
            chunk_nbytes=self.plan.layout.chunk_nbytes,
            chunk_offset=chunk_offset,
            fill_value=fill_value,
            word_nbytes=self.word_nbytes,
            status=self.status,
        )

    def _upload_gather_tables(self) -> tuple[list[Any], list[Any], list[int]]:
        """Chunk row and element offset in the chunk for each position of each group, and rows of each group."""
        tables = self.plan.gather_tables()
        group_row = [np.ascontiguousarray(rows) for rows in tables.chunk_row]
        group_inner = [np.zeros(len(rows), np.int64) for rows in group_row]
        for axis, group in enumerate(tables.axis_group):
            group_inner[group] += self._strides[axis] * tables.inner[axis]
        n_rows = [len(table.chunk_coords) for table in self.plan.group_chunks]
        if self.as_bytes:
            itemsize = self.plan.layout.dtype.itemsize
            group_row.append(np.zeros(itemsize, np.int32))
            group_inner.append(np.arange(itemsize, dtype=np.int64))
            n_rows.append(1)
        return [cupy.asarray(t) for t in group_row], [cupy.asarray(t) for t in group_inner], n_rows


def out_of_memory(what: str, nbytes: int) -> DeviceMemoryError:
    """The error that says what did not fit, and how much there was."""
    free, whole = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    return DeviceMemoryError(
        f"{what} needs {nbytes} bytes of device memory; {free} of {whole} bytes are free, and CuPy's pool holds "
        f"{pool.free_bytes()} more; read less at once, smaller dask chunks for example, or free arrays first"
    )
