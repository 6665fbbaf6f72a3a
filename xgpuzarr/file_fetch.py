"""Encoded chunks of waves, out of a local folder, into device memory by KvikIO.

Before the last bytes of one wave are there, those of the next are asked for: storage then waits for nothing from the
first byte of a read to its last. Large reads take turns at it (`KvikioReader.turn`), so that one is reading while
another plans or decodes its last wave.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.device_wave import Fetched
from xgpuzarr.readers.kvikio import KvikioReader
from xgpuzarr.store_fetch import layout_slab, spans_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from xgpuzarr.device_output import DeviceOutput
    from xgpuzarr.options import ReadOptions
    from xgpuzarr.plan.byte_ranges import ByteRanges
    from xgpuzarr.readers.kvikio import WaveRead

__all__ = ["FileFetch"]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A wave whose bytes are on their way."""

    rows: NDArray[np.int64]
    fetched: Fetched
    read: WaveRead


class FileFetch:
    """Reads the waves of one read, in the thread that makes it.

    Parameters
    ----------
    root
        Folder of the store.
    keys
        Keys of all objects of the plan.
    ranges
        Byte range of every chunk.
    waves
        Plan rows of the chunks of each wave, in the order in which they will be fetched; none is missing in `ranges`.
    output
        Unencoded chunks that are one piece of it go straight there.
    options
        How ranges are joined.

    Attributes
    ----------
    encoded_nbytes
        Encoded size of all chunks, in bytes.
    remote_reader, remote_reader_reason, n_again
        "", "" and 0: as `ReadReport` has them.
    """

    remote_reader = remote_reader_reason = ""
    n_again = 0

    def __init__(
        self,
        root: Path,
        keys: list[str],
        ranges: ByteRanges,
        waves: list[NDArray[np.int64]],
        output: DeviceOutput,
        options: ReadOptions,
    ) -> None:
        self.reader, self.keys, self.ranges = KvikioReader(root), keys, ranges
        self.output, self.options = output, options
        self.last = waves[-1] if waves else None
        self.encoded_nbytes = sum(int(ranges.nbytes[rows].sum()) for rows in waves)
        self.begun: _Begun | None = None
        self.turn = ExitStack()
        self.has_turn = False

    def fetch(
        self,
        rows: NDArray[np.int64],
        stream: cupy.cuda.Stream,
        following: tuple[NDArray[np.int64], cupy.cuda.Stream] | None,
    ) -> tuple[Fetched, NDArray[np.int64]]:
        """Read a wave; have the next on its way.

        Parameters
        ----------
        rows
            Plan rows of the chunks.
        stream
            Where the wave will be decoded; the chunks are ready on it.
        following
            The next wave, and its stream. It is left for its own turn if there is no memory for its bytes.

        Returns
        -------
        fetched
            The chunks; none where they are in the output already.
        missing
            Plan rows of chunks that do not exist: none.

        Raises
        ------
        ChunkReadError
            Naming store, key and range.
        """
        begun = self.begun
        if begun is None or begun.rows is not rows:
            self.drop()
            begun = self.begun = self._begin(rows, stream)
        begun.read.queue()
        try:
            self.begun = None if following is None else self._begin(*following)
        except cupy.cuda.memory.OutOfMemoryError:
            self.begun = None
        finally:
            begun.read.finish()
        if rows is self.last:
            self.turn.close()
        return begun.fetched, rows[:0]

    def drop(self) -> bool:
        """Give up the wave that was begun, and its memory; False if there is none."""
        begun, self.begun = self.begun, None
        if begun is not None:
            begun.read.abandon()
        return begun is not None

    def close(self) -> None:
        """End what is under way."""
        self.drop()
        self.turn.close()

    def _begin(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> _Begun:
        if not self.has_turn:
            self.turn.enter_context(self.reader.turn(self.encoded_nbytes))
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
                slab_offset=output.slab[rows],
                after=output.ready,
            )
            none = rows[:0]
            return _Begun(rows, Fetched(output.memory, none, none, none, none), read)
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
        return _Begun(rows, fetched, read)

    def _is_straight(self, rows: NDArray[np.int64]) -> bool:
        """Are the chunks unencoded, and each one piece of the output?"""
        layout = self.output.plan.layout
        return (
            layout.codec_chain.compressor is None
            and bool((self.output.slab[rows] >= 0).all())
            and bool((self.ranges.nbytes[rows] == layout.chunk_nbytes).all())
        )

    def _keys(self, object_rows: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
        """Keys of some ascending object rows, each once, and for each row the index of its key."""
        unique, index = np.unique(object_rows, return_inverse=True)
        return [self.keys[row] for row in unique.tolist()], index
