"""Byte ranges of objects behind a web server or S3 into device memory, by KvikIO's remote files.

A `RemoteFile` says nothing of what a server answered: it takes every status below 400, follows no redirection, and
reports as many bytes as were asked for, however few came (KvikIO 26.10, ``remote_handle.cpp``, `RemoteHandle::read`;
more bytes than asked for are an error). So what it brings is believed only for these reasons:

1. Before a request, random bytes are put where its last bytes will go. If the last one is not overwritten, the answer
   was short. A byte of the answer may be equal by chance; then the client is asked for these last bytes.
2. Every span is asked for by at least two requests of unequal size (`xgpuzarr.plan.requests`). An answer that is not
   the range that was asked for (the whole object, where the server knows no ranges; a page that says where the object
   has moved) has one size, and cannot be taken for both.
3. Before its first use with a store, the same bytes are read by KvikIO and by the store's client, and must be equal.

All other bytes are asked for again, of the store's client. Its answer counts: bytes, a missing object or an error.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.options import MIB
from xgpuzarr.plan.requests import MIN_SPAN_NBYTES, cut
from xgpuzarr.readers.kvikio import set_threads
from xgpuzarr.readers.object_urls import object_urls
from xgpuzarr.readers.protocol import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cupy
    from numpy.typing import NDArray
    from zarr.abc.store import Store

    from xgpuzarr.options import ReadOptions
    from xgpuzarr.plan.byte_ranges import Spans
    from xgpuzarr.plan.layout import ArrayLayout
    from xgpuzarr.readers.protocol import Reader

__all__ = ["RemoteReader", "RemoteWave", "kvikio_problem"]

MAX_THREADS = 64
"""Threads of KvikIO's pool, each of which waits for one answer, and holds a page-locked buffer of 16 MiB meanwhile."""

LAST_NBYTES = 8
"""Bytes at the end of each request that are random before it."""

MAX_INDEX_NBYTES = MIB
"""Largest shard index of which as many bytes may be asked for behind the chunks."""

SAMPLE_NBYTES = 64

KVIKIO_ERRORS = (RuntimeError, OverflowError, ValueError)
"""What KvikIO's exceptions become in Python."""


def kvikio_problem(store: Store, layout: ArrayLayout, options: ReadOptions) -> str:
    """Why KvikIO does not read the chunks of an array, out of a store that is no local folder; "" if it does.

    Nothing is asked of the store. `RemoteReader.disagreement` does that, before the first use.
    """
    if options.remote_reader == "client":
        return "remote_reader='client' was asked for"
    if not layout.shard_levels:
        return "each chunk is an object, whose size only one more request would tell"
    if layout.shard_levels[0].index_nbytes > MAX_INDEX_NBYTES:
        return f"a shard index takes {layout.shard_levels[0].index_nbytes} bytes, which would be read twice"
    return object_urls(store, layout.path).problem or _setup_problem(options)


def _setup_problem(options: ReadOptions) -> str:
    """What of KvikIO, and of how it is set, is in the way."""
    try:
        import kvikio
        import kvikio.defaults
    except ImportError as error:
        return f"KvikIO cannot be loaded ({error})"
    if not kvikio.is_remote_file_available():
        return "KvikIO was built without remote files"
    setting = kvikio.defaults.get
    if (backend := setting("remote_io_backend").name) != "EASY_THREADPOOL":
        return f"KvikIO's {backend} reads into host memory only"
    if setting("task_size") < 2 * MAX_INDEX_NBYTES:
        return f"KvikIO's task_size is {setting('task_size')} bytes, less than {2 * MAX_INDEX_NBYTES}"
    longest_s = setting("http_max_attempts") * (setting("http_timeout") + 4)  # it pauses 4 s at most
    if longest_s > options.timeout_s:
        return (
            f"KvikIO's http_timeout and http_max_attempts let a request take {longest_s} s, more than "
            f"timeout_s={options.timeout_s}"
        )
    return ""


class RemoteReader:
    """Reads objects of one array of a store into device memory. Made for one read, by one thread.

    Parameters
    ----------
    store
        An open store, of which `kvikio_problem` says nothing.
    client
        Its reader, which is asked for what KvikIO does not bring.
    layout
        Layout of the array.
    n_at_once
        Requests that may be under way at once.

    Attributes
    ----------
    n_again
        Spans that the client was asked for, because KvikIO did not bring them.
    """

    def __init__(self, store: Store, client: Reader, layout: ArrayLayout, *, n_at_once: int) -> None:
        import kvikio.defaults

        self._store, self._urls, self.client = store, object_urls(store, layout.path), client
        self._n_at_once = n_at_once
        self._todo: deque[_Request] = deque()
        self._flying: deque[_Request] = deque()
        self.n_again = 0
        self.max_request_nbytes = int(kvikio.defaults.get("task_size"))  # KvikIO makes several of a larger one
        set_threads(min(n_at_once, MAX_THREADS))

    def disagreement(self, key: str, offset: int, nbytes: int) -> str:
        """Why KvikIO does not read what the client reads, at the start of a byte range of one object; "" if it does.

        Found out once for a store in a process, by one request of the client and two of KvikIO.

        Raises
        ------
        ChunkReadError
            The client cannot read the object.
        """
        known = _disagreements.get(id(self._store))
        if known is None:
            size = min(nbytes, SAMPLE_NBYTES)
            (parts,) = self.client.read([ObjectRead(key, ((offset, size),))])
            if parts is None:
                return ""  # it has vanished; whoever reads on will say so
            found = self._sample_problem(key, offset, np.frombuffer(parts[0], np.uint8))
            weakref.finalize(self._store, _disagreements.pop, id(self._store), None)
            known = _disagreements[id(self._store)] = found
        return known

    def _sample_problem(self, key: str, offset: int, expected: NDArray[np.uint8]) -> str:
        import kvikio

        got = ~expected  # every byte differs until it is read
        middle = len(got) // 2 + 1
        try:
            file = kvikio.RemoteFile.open_http(*self._urls.of([key]), offset + len(got))
            for part, start in ((got[:middle], 0), (got[middle:], middle)):
                if len(part):
                    file.pread(part, len(part), offset + start).get()
        except KVIKIO_ERRORS as error:
            reason = re.sub(r"https?://\S+", "(URL)", str(error).splitlines()[-1])  # it may hold a signature
            return f"KvikIO cannot read what the store's client reads: {reason}"
        if not np.array_equal(got, expected):
            return "KvikIO gets other bytes than the store's client: the server may have sent it somewhere else"
        return ""

    def begin(
        self, wanted: Sequence[ObjectRead], spans: Spans, slab: cupy.ndarray, at: NDArray[np.int64]
    ) -> RemoteWave:
        """Have spans on their way into a slab of device memory.

        Parameters
        ----------
        wanted
            For each span, how the client would be asked for it. Bytes that must follow a span are part of it.
        spans
            Byte ranges of objects.
        slab
            uint8 array of shape (slab_nbytes,) on the current device.
        at
            Where each span goes in the slab, in bytes, shape (n,).

        Returns
        -------
        RemoteWave
            To be finished or abandoned by this thread, in any case.

        Notes
        -----
        The host waits for the current stream, for KvikIO writes by streams of its own, which wait for no other.
        """
        wave = RemoteWave(self, wanted, spans, slab, at)
        self._todo.extend(wave.requests_to_make(self._urls.of))
        self.top_up()
        return wave

    def top_up(self) -> None:
        """Make requests until as many are under way as may be."""
        while self._todo and len(self._flying) < self._n_at_once:
            request = self._todo.popleft()
            request.submit()
            self._flying.append(request)

    def advance(self) -> None:
        """Wait for the oldest request that is under way."""
        request = self._flying[0]
        request.wait()
        self._flying.popleft()
        request.wave.n_left -= 1
        self.top_up()

    def give_up(self, wave: RemoteWave) -> None:
        """Make no more requests for a wave."""
        mine = [request for request in self._todo if request.wave is wave]
        self._todo = deque(request for request in self._todo if request.wave is not wave)
        wave.n_left -= len(mine)


_disagreements: dict[int, str] = {}
"""By the identity of a store: what `RemoteReader.disagreement` has found."""


class RemoteWave:
    """Spans on their way into a slab: made by `RemoteReader.begin`."""

    def __init__(
        self,
        reader: RemoteReader,
        wanted: Sequence[ObjectRead],
        spans: Spans,
        slab: cupy.ndarray,
        at: NDArray[np.int64],
    ) -> None:
        import cupy

        self._reader, self._wanted, self.spans, self._slab, self._at = reader, wanted, spans, slab, at
        self._requests = requests = cut(spans.nbytes, reader.max_request_nbytes)
        self.n_left = len(requests.span)
        self.is_short = np.ones(self.n_left, np.bool_)
        last = (at[requests.span] + requests.stop)[:, None] - np.arange(LAST_NBYTES, 0, -1)
        self._last = cupy.asarray(last)
        self._random = _random_bytes(last.shape)
        slab[self._last] = cupy.asarray(self._random)
        cupy.cuda.get_current_stream().synchronize()

    def requests_to_make(self, urls: Any) -> list[_Request]:
        """All requests of the wave."""
        import kvikio

        spans, requests = self.spans, self._requests
        objects, index, counts = np.unique(spans.object_row, return_inverse=True, return_counts=True)
        stop = np.zeros(len(objects), np.int64)
        np.maximum.at(stop, index, spans.offset + spans.nbytes)
        first = np.cumsum(counts) - counts  # spans are ordered by object
        keys = [self._wanted[span].key for span in first.tolist()]
        files = [kvikio.RemoteFile.open_http(url, size) for url, size in zip(urls(keys), stop.tolist(), strict=True)]
        file_of = index[requests.span].tolist()
        offset = (spans.offset[requests.span] + requests.start).tolist()
        at = (self._at[requests.span] + requests.start).tolist()
        return [
            _Request(self, number, files[file], self._slab[start : start + size], size, offset)
            for number, (file, start, size, offset) in enumerate(
                zip(file_of, at, requests.nbytes.tolist(), offset, strict=True)
            )
        ]

    def finish(self) -> list[int]:
        """Return when all bytes are on the device, in order on the current stream.

        Returns
        -------
        list of int
            Rows of spans whose object does not exist.

        Raises
        ------
        ChunkReadError, CorruptChunkError
            As the client's reader.
        """
        try:
            while self.n_left:
                self._reader.advance()
        except BaseException:
            self.abandon()  # nothing may write to the slab once it is let go
            raise
        spans = self._to_ask_for()
        arrived = self._reader.client.read([self._wanted[span] for span in spans]) if spans else []
        for span, parts in zip(spans, arrived, strict=True):
            if parts is not None:
                start = int(self._at[span])
                self._slab[start : start + len(parts[0])].set(np.frombuffer(parts[0], np.uint8))
        return [span for span, parts in zip(spans, arrived, strict=True) if parts is None]

    def abandon(self) -> None:
        """Wait for the requests that are under way, which go on writing to the slab, and make no others."""
        self._reader.give_up(self)
        while self.n_left:
            self._reader.advance()

    def _to_ask_for(self) -> list[int]:
        """Spans that KvikIO has not brought, whole."""
        got = self._slab[self._last].get()
        is_written = got[:, -1] != self._random[:, -1]
        doubtful = np.flatnonzero(~is_written & ~self.is_short)
        self.is_short[doubtful] = [not same for same in self._are_last(doubtful, got)]
        failed = np.unique(self._requests.span[self.is_short])
        self._reader.n_again += len(failed)
        return sorted({*failed.tolist(), *np.flatnonzero(self.spans.nbytes < MIN_SPAN_NBYTES).tolist()})

    def _are_last(self, numbers: NDArray[np.int64], got: NDArray[np.uint8]) -> list[bool]:
        """Whether requests have brought their last bytes, by the client."""
        if not len(numbers):
            return []
        span = self._requests.span[numbers]
        offset = self.spans.offset[span] + self._requests.stop[numbers] - LAST_NBYTES
        places = zip(span.tolist(), offset.tolist(), strict=True)
        last = [ObjectRead(self._wanted[span].key, ((offset, LAST_NBYTES),)) for span, offset in places]
        try:
            found = self._reader.client.read(last)
        except (ChunkReadError, CorruptChunkError):  # to be said of the whole span, which is asked for next
            return [False] * len(last)
        return [
            parts is not None and bytes(parts[0]) == got[number].tobytes()
            for number, parts in zip(numbers.tolist(), found, strict=True)
        ]


def _random_bytes(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.random.default_rng().integers(0, 256, shape, np.uint8)


class _Request:
    """One request of a wave. KvikIO's future must not outlive the file that it reads."""

    __slots__ = ("_file", "_future", "_nbytes", "_number", "_offset", "_room", "wave")

    def __init__(self, wave: RemoteWave, number: int, file: Any, room: Any, nbytes: int, offset: int) -> None:
        self.wave, self._number, self._file, self._room = wave, number, file, room
        self._nbytes, self._offset = nbytes, offset
        self._future: Any = None

    def submit(self) -> None:
        try:
            self._future = self._file.pread(self._room, self._nbytes, self._offset)
        except KVIKIO_ERRORS:
            self._future = None  # the client will be asked

    def wait(self) -> None:
        if self._future is not None:
            with suppress(*KVIKIO_ERRORS):  # the client will be asked
                self.wave.is_short[self._number] = self._future.get() != self._nbytes
            self._future = None
