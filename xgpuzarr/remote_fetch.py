"""Encoded chunks of waves, out of stores that are no local folder, into device memory: by KvikIO, or by their client.

KvikIO brings what it can read as the store's client would (`xgpuzarr.readers.remote`) straight into the slab of a wave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xgpuzarr.ahead_fetch import AheadFetch, Begun
from xgpuzarr.errors import UnsupportedError
from xgpuzarr.plan.shard_index import bytes_after
from xgpuzarr.readers.remote import RemoteReader, RemoteWave, kvikio_problem
from xgpuzarr.store_fetch import StoreFetch, check_none_vanished, layout_slab, reads_of, spans_of

if TYPE_CHECKING:
    import cupy
    import numpy as np
    from numpy.typing import NDArray

    from xgpuzarr.execute import Source
    from xgpuzarr.plan.byte_ranges import ByteRanges
    from xgpuzarr.plan.read_plan import ReadPlan

__all__ = ["RemoteFetch", "fetch_of_store"]

MIN_MEAN_NBYTES = 512 << 10
"""Spans that are smaller, on average, are left to the client, which asks for each by one request, KvikIO by two."""


def fetch_of_store(
    plan: ReadPlan, source: Source, ranges: ByteRanges | None, waves: list[NDArray[np.int64]]
) -> StoreFetch | RemoteFetch:
    """What reads the waves of one read, out of a store that is no local folder; parameters as of `StoreFetch`.

    Raises
    ------
    UnsupportedError
        `ReadOptions.remote_reader` is "kvikio", and KvikIO does not read this store as its client does.
    ChunkReadError
        The client cannot read the first object.
    """
    options, layout = source.options, plan.layout
    reason = kvikio_problem(source.array.store, layout, options)
    if not reason and ranges is not None and waves:
        spans = spans_of(ranges, waves[0], options.max_remote_gap_bytes, options.max_read_bytes)
        if options.remote_reader == "auto" and spans.nbytes.mean() < MIN_MEAN_NBYTES:
            reason = f"requests of {int(spans.nbytes.mean())} bytes are not faster by KvikIO"
        else:
            reader = RemoteReader(source.array.store, source.reader, layout, n_at_once=options.concurrency)
            (key,) = plan.keys(spans.object_row[:1])
            reason = reader.disagreement(key, int(spans.offset[0]), int(spans.nbytes[0]))
            if not reason:
                return RemoteFetch(plan, source, ranges, reader)
    if reason and options.remote_reader == "kvikio":
        raise UnsupportedError(
            f"array {layout.path!r} of store {layout.store_name!r}: remote_reader='kvikio' was asked for, but {reason}"
        )
    return StoreFetch(plan, source, ranges, waves, reason)


class RemoteFetch(AheadFetch[RemoteWave]):
    """Reads the waves of one read by KvikIO; made by `fetch_of_store`.

    Parameters
    ----------
    plan
        The read, of a sharded array.
    source
        From where.
    ranges
        Byte range of every chunk.
    reader
        Reader of the array's store.
    """

    remote_reader = "kvikio"

    def __init__(self, plan: ReadPlan, source: Source, ranges: ByteRanges, reader: RemoteReader) -> None:
        self.plan, self.source, self.ranges, self.reader = plan, source, ranges, reader

    @property
    def n_again(self) -> int:
        """Spans that KvikIO did not bring."""
        return self.reader.n_again

    def _begin(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> Begun[RemoteWave]:
        options = self.source.options
        spans = spans_of(self.ranges, rows, options.max_remote_gap_bytes, options.max_read_bytes)
        wanted = reads_of(self.plan, spans)
        # What must follow a span is read with it: none is brought by an object that ends too soon.
        spans = replace(spans, nbytes=spans.nbytes + bytes_after(spans, self.plan.layout.shard_levels[0]))
        with stream:
            at, fetched = layout_slab(self.ranges, rows, spans)
            return Begun(rows, fetched, self.reader.begin(wanted, spans, fetched.slab, at))

    def _queue(self, read: RemoteWave) -> None:
        """Nothing: the reader makes the requests of its waves in turn."""

    def _finish(self, begun: Begun[RemoteWave]) -> None:
        missing = begun.read.finish()
        check_none_vanished(self.plan, self.source, begun.read.spans, missing)
        self.encoded_nbytes += int(begun.fetched.nbytes.sum())
