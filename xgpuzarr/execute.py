"""Carrying out a read plan: read the encoded chunks, decode them, put every element in its place.

`read` is the one entry, and chooses where chunks are decoded: on the device in batches (`xgpuzarr.execute_device`), or
on the host's cores, for a NumPy array (`xgpuzarr.execute_host`) or straight on to the device
(`xgpuzarr.execute_staged`). All fill the grouped output: one axis a group, C order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xgpuzarr.decoders.host import INFLATE_GBPS, ChunkDecoder
from xgpuzarr.errors import ChunkReadError
from xgpuzarr.execute_host import read_by_zarr, read_host
from xgpuzarr.opening import reader_for, reopen_zarr_array
from xgpuzarr.plan.cost import Decision, decide
from xgpuzarr.plan.layout import chunk_codecs
from xgpuzarr.readers.host import LocalReader

if TYPE_CHECKING:
    import zarr

    from xgpuzarr.options import ReadOptions
    from xgpuzarr.plan.layout import ArrayLayout
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.readers.protocol import Reader

__all__ = ["Source", "decide_route", "read", "read_by_zarr", "read_host"]


@dataclass(frozen=True)
class Source:
    """What a plan is carried out against: the open array, its reader and its options."""

    array: zarr.Array[Any]
    layout: ArrayLayout
    options: ReadOptions

    @cached_property
    def reader(self) -> Reader:
        """Reader of the array's store."""
        return reader_for(self.array, self.options)

    def check_still_there(self) -> None:
        """Tell a chunk that was never written from a store that is gone; for local folders, where it costs nothing.

        Raises
        ------
        ChunkReadError
            The array's metadata does not exist any more.
        """
        if isinstance(self.reader, LocalReader):
            layout, folder = self.layout, self.reader.root / self.layout.path
            if any((folder / name).exists() for name in ("zarr.json", ".zarray")):
                return
            try:
                folder.stat()
                # by consolidated metadata
                reopen_zarr_array(self.reader.root, layout.path, layout.zarr_format, lambda _: True)
            except FileNotFoundError as error:
                raise ChunkReadError(
                    f"array {layout.path!r} of store {layout.store_name!r} is gone: its metadata was there when it was "
                    "opened"
                ) from error

    @cached_property
    def chunk_decoder(self) -> ChunkDecoder:
        """What decodes chunks that are left to zarr-python."""
        return ChunkDecoder(self.array, chunk_codecs(self.array), self.layout)


def read(plan: ReadPlan, source: Source, *, on_device: bool) -> Any:
    """Grouped output of a plan.

    Parameters
    ----------
    plan
        What to read.
    source
        From where, and how.
    on_device
        True for results on the device.

    Returns
    -------
    array
        Shape ``plan.selection.grouped_shape``. A CuPy array ordered on the current stream if `on_device` and CuPy has
        the dtype, else a NumPy array.

    Raises
    ------
    CorruptChunkError, ChunkReadError, DeviceMemoryError
        Naming array, chunk and key.
    """
    layout = plan.layout
    if not on_device:
        return read_host(plan, source)
    from xgpuzarr import execute_device, execute_staged  # the rest of the package runs without CUDA

    decision = plan.decision or decide_route(plan, source.options)
    if decision.route == "device":
        return execute_device.read_device(plan, source)
    if layout.host_result_reason:
        return read_host(plan, source)
    if layout.codec_chain.by_zarr:
        return execute_device.to_device(read_host(plan, source))
    return execute_staged.read_staged(plan, source)


def decide_route(plan: ReadPlan, options: ReadOptions) -> Decision:
    """Where a read to the device decodes its chunks, by its codecs, its options, and what would be done sooner."""
    layout = plan.layout
    return decide(
        layout.codec_chain,
        n_chunks=plan.n_chunks,
        chunk_nbytes=layout.chunk_nbytes,
        itemsize=layout.dtype.itemsize,
        n_threads=options.threads,
        inflate_gbps=INFLATE_GBPS,
        wanted=options.route,
    )
