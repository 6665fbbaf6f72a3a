"""Byte ranges of objects in any zarr-python store (fsspec, obstore, icechunk, zip, memory), into host memory.

A store is asked on zarr-python's event loop, where its connections live, and many requests are in flight at once.
`StoreReader.read_each` hands what arrives to a pool of threads while the rest is under way.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import wait
from typing import TYPE_CHECKING

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.readers.protocol import WHOLE, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer

    from xgpuzarr.options import ReadOptions
    from xgpuzarr.readers.protocol import ReadError

    type Parts = list[memoryview] | None

__all__ = ["StoreReader"]

HELD_NBYTES = 1 << 30
"""Bytes that may have arrived and wait to be taken, or be about to arrive."""

FIRST_PAUSE_S = 0.1
"""Before a request is made again; four times as long before each further time."""


class StoreReader:
    """Reads objects through the asynchronous interface of a zarr-python store. Made for one read.

    Parameters
    ----------
    store
        An open store. Its own retries and time-outs come first.
    options
        `concurrency`, `n_retries` and `timeout_s` are what concerns stores.
    """

    __slots__ = ("_limit", "_options", "_store")

    def __init__(self, store: Store, options: ReadOptions) -> None:
        self._store = store
        self._options = options
        self._limit = asyncio.Semaphore(options.concurrency)

    @property
    def store_name(self) -> str:
        """The store, as errors name it."""
        return str(self._store)

    def object_nbytes(self, key: str) -> int | None:  # noqa: ARG002
        """None: most stores answer with a request, or by reading the object."""
        return None

    def read(self, wanted: Sequence[ObjectRead]) -> list[Parts]:
        """Bytes of each range of each object; see `Reader.read`."""
        found: list[Parts] = [None] * len(wanted)

        async def keep(item: ObjectRead, index: int) -> None:
            found[index] = await self._read_object(item)

        numbered = ((item, index) for index, item in enumerate(wanted))
        sync(self._read_each(numbered, keep, min(self._options.concurrency, len(wanted))))
        return found

    def read_each[T](
        self,
        wanted: Iterable[tuple[ObjectRead, T]],
        take: Callable[[T, Parts], Sequence[Callable[[], None]]],
        failed: Callable[[T, ReadError], ReadError],
        executor: Executor,
        *,
        item_nbytes: int,
    ) -> None:
        """Read many objects, and work on each as soon as it is there, while others are under way.

        Parameters
        ----------
        wanted
            What to read, and what `take` is told of it; the next item is drawn when its request is about to be made.
        take
            Called in the order of arrival, on the event loop, with what `read` would give for an item. It returns at
            once, with calls that do the work.
        failed
            Makes the error of an item out of one that `read` would raise, which names store and key only.
        executor
            Makes these calls.
        item_nbytes
            What one item brings, about, in bytes. Fewer large ones are under way at a time, to bound memory.

        Raises
        ------
        ChunkReadError, CorruptChunkError
            What `failed` makes; and whatever a call raises. No call is running any more when this returns or raises.
        """
        running: set[Future[None]] = set()
        is_over = False

        async def work(wanted: ObjectRead, item: T) -> None:
            try:
                parts = await self._read_object(wanted)
            except (ChunkReadError, CorruptChunkError) as error:
                raise failed(item, error) from error
            if is_over:
                return
            calls = [executor.submit(call) for call in take(item, parts)]
            running.update(calls)
            await asyncio.gather(*map(asyncio.wrap_future, calls))
            running.difference_update(calls)

        n_at_once = min(self._options.concurrency, max(2, HELD_NBYTES // max(1, item_nbytes)))
        try:
            sync(self._read_each(wanted, work, n_at_once))
        finally:
            is_over = True  # after an interrupt the event loop would go on
            left = list(running)
            for call in left:
                call.cancel()
            wait(left)

    def read_ahead[T](
        self, batches: Sequence[T], wanted: Callable[[T], Sequence[ObjectRead]], *, batch_nbytes: int
    ) -> Generator[list[Parts]]:
        """Read batch after batch; while the caller works on one, those after it are under way.

        Parameters
        ----------
        batches
            What `wanted` takes.
        wanted
            Gives the reads of a batch, at least one; called on the event loop when the first is about to be made.
        batch_nbytes
            What one batch brings, at most, in bytes. Fewer large ones are under way at a time, to bound memory.

        Yields
        ------
        list
            For each batch in turn, what `read` would give.

        Raises
        ------
        ChunkReadError, CorruptChunkError
            As `read`, of any batch, as soon as it is known. No request is under way any more when this raises or is
            closed.
        """
        ahead = _Ahead(batches, wanted, max(1, HELD_NBYTES // max(1, batch_nbytes)))

        async def keep(item: ObjectRead, place: tuple[_Turn, int]) -> None:
            turn, index = place
            await turn.may_begin.wait()
            turn.keep(index, await self._read_object(item))

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self._read_each(ahead.items(), keep, self._options.concurrency))

        async def end() -> None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        reading = sync(begin())
        try:
            for number in range(len(batches)):
                yield sync(ahead.take(number, reading))
        finally:
            sync(end())

    async def _read_each[T](
        self, wanted: Iterable[tuple[ObjectRead, T]], work: Callable[[ObjectRead, T], Awaitable[None]], n_at_once: int
    ) -> None:
        todo = iter(wanted)
        workers = [asyncio.create_task(self._work(todo, work)) for _ in range(n_at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)  # no request is left under way

    async def _work[T](
        self, todo: Iterator[tuple[ObjectRead, T]], work: Callable[[ObjectRead, T], Awaitable[None]]
    ) -> None:
        """Take one item after the other, of those that no other worker has taken."""
        for wanted, item in todo:
            await work(wanted, item)

    async def _read_object(self, wanted: ObjectRead) -> Parts:
        last = max(wanted.ranges, key=sum)
        parts = await asyncio.gather(
            *(self._get(wanted.key, *place, wanted.nbytes_after if place is last else 0) for place in wanted.ranges)
        )
        present = [part for part in parts if part is not None]
        if present and len(present) < len(parts):
            raise ChunkReadError(f"store {self.store_name!r}, key {wanted.key!r}: object vanished while being read")
        return present or None

    async def _get(self, key: str, offset: int, nbytes: int, nbytes_after: int) -> memoryview | None:
        async with self._limit:
            buffer = await self._answer(key, offset, nbytes + nbytes_after)
        if buffer is None:
            return None
        got = memoryview(buffer.as_numpy_array())
        if nbytes == WHOLE:
            return got
        if len(got) > nbytes + nbytes_after:
            raise ChunkReadError(f"{self._where(key, offset, nbytes)}: got {len(got)} bytes; it does not serve ranges")
        if len(got) < nbytes:
            raise CorruptChunkError(
                f"{self._where(key, offset, nbytes)}: got {len(got)} bytes; the object was cut short"
            )
        if len(got) < nbytes + nbytes_after:
            raise CorruptChunkError(
                f"{self._where(key, offset, nbytes)}: {len(got) - nbytes} bytes follow, the shard index takes "
                f"{nbytes_after}; the index leads into itself, or the object was cut short"
            )
        return got[:nbytes]

    async def _answer(self, key: str, offset: int, nbytes: int) -> Buffer | None:
        """What the store gives, within the time and the tries that the options allow."""
        timeout_s, n_retries = self._options.timeout_s, self._options.n_retries
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for n_failed in range(n_retries + 1):
            answer = asyncio.ensure_future(
                self._store.get(key, default_buffer_prototype(), _request(offset, nbytes)), loop=loop
            )
            try:
                await asyncio.wait((answer,), timeout=deadline - loop.time())
            finally:
                answer.cancel()  # without effect on one that is complete
            if not answer.done():
                raise ChunkReadError(
                    f"{self._where(key, offset, nbytes)}: no answer within {timeout_s} s; look at the network, or "
                    "raise timeout_s in ReadOptions"
                )
            error = answer.exception()
            if error is None:
                return answer.result()
            if n_failed == n_retries or not _may_pass(error):
                reason = str(error).partition("\n")[0] or type(error).__name__  # obstore's goes on for pages
                tried = f", {n_failed + 1} times" if n_failed else ""
                raise ChunkReadError(f"{self._where(key, offset, nbytes)}: {reason}{tried}") from error
            await asyncio.sleep(min(FIRST_PAUSE_S * 4**n_failed, max(0.0, deadline - loop.time())))
        raise AssertionError  # the last try returns or raises

    def _where(self, key: str, offset: int, nbytes: int) -> str:
        if offset < 0:
            span = f"last {-offset} bytes"
        elif nbytes == WHOLE:
            span = "whole object" if not offset else f"bytes from {offset} on"
        else:
            span = f"bytes {offset}:{offset + nbytes}"
        return f"store {self.store_name!r}, key {key!r} ({span})"


class _Turn:
    """What has arrived of one batch that is read ahead."""

    __slots__ = ("_found", "_n_left", "is_complete", "may_begin")

    def __init__(self) -> None:
        self._found: list[Parts] = []
        self._n_left = 0
        self.may_begin, self.is_complete = asyncio.Event(), asyncio.Event()

    def expect(self, n_items: int) -> None:
        self._found, self._n_left = [None] * n_items, n_items

    def keep(self, index: int, parts: Parts) -> None:
        self._found[index] = parts
        self._n_left -= 1
        if not self._n_left:
            self.is_complete.set()

    def hand_out(self) -> list[Parts]:
        found, self._found = self._found, []
        return found


class _Ahead[T]:
    """Batches that are read ahead: the first `n_ahead` of those that have not been taken may begin."""

    def __init__(self, batches: Sequence[T], wanted: Callable[[T], Sequence[ObjectRead]], n_ahead: int) -> None:
        self._batches, self._wanted, self._n_ahead = batches, wanted, n_ahead
        self._turns = [_Turn() for _ in batches]

    def items(self) -> Iterator[tuple[ObjectRead, tuple[_Turn, int]]]:
        """All reads, in order, and where what they bring belongs."""
        for turn, batch in zip(self._turns, self._batches, strict=True):
            reads = self._wanted(batch)
            turn.expect(len(reads))
            yield from ((item, (turn, index)) for index, item in enumerate(reads))

    async def take(self, number: int, reading: asyncio.Task[None]) -> list[Parts]:
        """Wait for one batch, or for the error that ends `reading`."""
        self._let_begin(number)
        complete = asyncio.create_task(self._turns[number].is_complete.wait())
        await asyncio.wait((reading, complete), return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        if reading.done():
            reading.result()  # raises what went wrong, in this batch or in one ahead
        self._let_begin(number + 1)  # while the caller works on this one
        return self._turns[number].hand_out()

    def _let_begin(self, number: int) -> None:
        for turn in self._turns[number : number + self._n_ahead]:
            turn.may_begin.set()


def _request(offset: int, nbytes: int) -> ByteRequest | None:
    if offset < 0:
        return SuffixByteRequest(-offset)
    if nbytes == WHOLE:
        return OffsetByteRequest(offset) if offset else None
    return RangeByteRequest(offset, offset + nbytes)


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later.

    True for lost connections and busy servers as Python and aiohttp report them, which fsspec's HTTP does not try
    again. Clients with retries of their own (s3fs, gcsfs, obstore, icechunk) raise errors of their own after these.
    """
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    client = sys.modules.get("aiohttp")
    passing = (client.ClientConnectionError, client.ClientPayloadError) if client else ()
    return isinstance(error, (ConnectionError, TimeoutError, *passing))
