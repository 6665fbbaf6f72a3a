"""Encoded chunks of waves, out of a local folder, into device memory by KvikIO.

Large reads take turns (`KvikioReader.turn`), so that one is reading while another plans or decodes its last wave.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.ahead_fetch import AheadFetch, Begun
from xgpuzarr.device_wave import Fetched
from xgpuzarr.readers.kvikio import KvikioReader, WaveRead
from xgpuzarr.store_fetch import layout_slab, spans_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from xgpuzarr.device_output import DeviceOutput
    from xgpuzarr.options import ReadOptions
    from xgpuzarr.plan.byte_ranges import ByteRanges

__all__ = ["FileFetch"]


class FileFetch(AheadFetch[WaveRead]):
    """Reads the waves of one read out of a local folder.

    Parameters
    ----------
    root
        Folder of the store.
    keys
        Keys of all objects of the plan.
    ranges
        Byte range of every chunk that will be fetched, looked up by then; of which none is missing.
    output
        Unencoded chunks that are one piece of it go straight there.
    options
        How ranges are joined.
    """

    def __init__(
        self,
        root: Path,
        keys: list[str],
        ranges: ByteRanges,
        output: DeviceOutput,
        options: ReadOptions,
    ) -> None:
        self.reader, self.keys, self.ranges = KvikioReader(root), keys, ranges
        self.output, self.options = output, options
        self.turn = ExitStack()
        self.has_turn = False

    def close(self) -> None:
        """End what is under way, and the turn."""
        super().close()
        self.turn.close()

    def _begin(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> Begun[WaveRead]:
        if not self.has_turn:
            self.turn.enter_context(self.reader.turn(self.output.plan.decoded_nbytes))
            self.has_turn = True
        ranges, output = self.ranges, self.output
        if self._is_straight(rows):
            object_keys, object_row = self._keys(ranges.object_row[rows])
            read = self.reader.begin(
                object_keys,
                output.memory,
                object_row=object_row,
                offset=ranges.offset[rows],
                nbytes=ranges.nbytes[rows],
                slab_offset=output.straight_offset[rows],
                after=output.ready,
            )
            none = rows[:0]
            return Begun(rows, Fetched(output.memory, none, none, none, none), read)
        spans = spans_of(ranges, rows, self.options.max_gap_bytes, self.options.max_read_bytes)
        with stream:
            span_at, fetched = layout_slab(ranges, rows, spans)
            allocated = cupy.cuda.Event(disable_timing=True)
            allocated.record(stream)
        object_keys, object_row = self._keys(spans.object_row)
        read = self.reader.begin(
            object_keys,
            fetched.slab,
            object_row=object_row,
            offset=spans.offset,
            nbytes=spans.nbytes,
            slab_offset=span_at,
            after=allocated,
        )
        return Begun(rows, fetched, read)

    def _queue(self, read: WaveRead) -> None:
        read.queue()

    def _finish(self, begun: Begun[WaveRead]) -> None:
        begun.read.finish()
        self.encoded_nbytes += int(self.ranges.nbytes[begun.rows].sum())

    def _is_straight(self, rows: NDArray[np.int64]) -> bool:
        """Are the chunks unencoded, and each one piece of the output?"""
        layout = self.output.plan.layout
        return (
            layout.codec_chain.compressor is None
            and bool((self.output.straight_offset[rows] >= 0).all())
            and bool((self.ranges.nbytes[rows] == layout.chunk_nbytes).all())
        )

    def _keys(self, object_rows: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
        """Keys of some ascending object rows, each once, and for each row the index of its key."""
        unique, index = np.unique(object_rows, return_inverse=True)
        return [self.keys[row] for row in unique.tolist()], index
