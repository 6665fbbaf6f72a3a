"""Does a reader of any store keep requests under way, bound what it holds, and end cleanly?"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.options import ReadOptions
from xgpuzarr.readers.protocol import WHOLE, ObjectRead
from xgpuzarr.readers.store import HELD_NBYTES, StoreReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype


class FakeStore(MemoryStore):
    """Objects "0", "1", ... of ten bytes. Counts requests under way, and raises what `errors` holds for a key."""

    def __init__(self, n_objects: int = 40) -> None:
        make = default_buffer_prototype().buffer.from_bytes
        super().__init__({str(number): make(bytes([number]) * 10) for number in range(n_objects)})
        self.errors: dict[str, list[Exception]] = {}
        self.asked: list[str] = []
        self.n_under_way = self.most_under_way = 0
        self.is_cut = False

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        self.asked.append(key)
        self.n_under_way += 1
        self.most_under_way = max(self.most_under_way, self.n_under_way)
        try:
            await asyncio.sleep(0.001)
            if self.errors.get(key):
                raise self.errors[key].pop()
            found = await super().get(key, prototype, byte_range)
            return found[:-1] if self.is_cut and found is not None else found
        finally:
            self.n_under_way -= 1


def whole(*numbers: int) -> list[ObjectRead]:
    return [ObjectRead(str(number), ((0, WHOLE),)) for number in numbers]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def read_each(
    reader: StoreReader, numbers: range, pool: ThreadPoolExecutor, call: Callable[[int, Any], None], nbytes: int = 10
) -> None:
    wanted = zip(whole(*numbers), numbers, strict=True)
    reader.read_each(
        wanted,
        lambda number, parts: [partial(call, number, parts)],
        lambda number, error: type(error)(f"item {number}: {error}"),
        pool,
        item_nbytes=nbytes,
    )


def test_ranges_of_objects() -> None:
    reader = StoreReader(FakeStore(), ReadOptions())
    wanted = [ObjectRead("3", ((0, WHOLE), (8, WHOLE), (2, 4), (-3, 3))), ObjectRead("99", ((0, WHOLE),))]
    first, missing = reader.read(wanted)
    assert [bytes(part) for part in first] == [b"\3" * 10, b"\3" * 2, b"\3" * 4, b"\3" * 3]
    assert missing is None
    assert reader.read([]) == []


def test_a_range_cut_short_is_corrupt() -> None:
    store = FakeStore()
    store.is_cut = True
    with pytest.raises(CorruptChunkError, match=r"key '3' \(bytes 2:6\): got 3 bytes; the object was cut short"):
        StoreReader(store, ReadOptions()).read([ObjectRead("3", ((2, 4),))])


def test_bytes_that_must_follow_are_asked_for_and_not_given() -> None:
    reader = StoreReader(FakeStore(), ReadOptions())
    ((first, second),) = reader.read([ObjectRead("3", ((4, 3), (0, 9)), nbytes_after=1)])
    assert (len(first), len(second)) == (3, 9)
    with pytest.raises(CorruptChunkError, match=r"key '3' \(bytes 2:9\): 1 bytes follow, the shard index takes 2"):
        reader.read([ObjectRead("3", ((0, 1), (2, 7)), nbytes_after=2)])
    with pytest.raises(CorruptChunkError, match=r"key '3' \(bytes 2:12\): got 8 bytes; the object was cut short"):
        reader.read([ObjectRead("3", ((2, 10),), nbytes_after=2)])


def test_each_object_is_worked_on_once_on_the_pool(pool: ThreadPoolExecutor) -> None:
    store, found, threads = FakeStore(), {}, set()

    def call(number: int, parts: Any) -> None:
        found[number] = parts and bytes(parts[0])
        threads.add(threading.current_thread())

    read_each(StoreReader(store, ReadOptions(concurrency=8)), range(50), pool, call)
    assert found == {number: bytes([number]) * 10 if number < 40 else None for number in range(50)}
    assert sorted(store.asked) == sorted(map(str, range(50)))
    assert store.most_under_way == 8
    assert threads <= set(pool._threads)


def test_requests_wait_for_work_so_that_memory_is_bounded(pool: ThreadPoolExecutor) -> None:
    store, may_go = FakeStore(), threading.Event()

    def call(number: int, parts: Any) -> None:  # noqa: ARG001
        if number == 0:
            may_go.wait(0.05)
            assert len(store.asked) <= 2 + 1  # large items: two under way or held, and the one that another freed

    read_each(StoreReader(store, ReadOptions(concurrency=8)), range(2), pool, call, nbytes=HELD_NBYTES)
    read_each(StoreReader(store, ReadOptions(concurrency=8)), range(10), pool, lambda *_: None, nbytes=HELD_NBYTES)
    assert store.most_under_way == 2


def test_an_error_of_a_call_ends_the_read_and_no_call_runs_on(pool: ThreadPoolExecutor) -> None:
    running, ended = [], []

    def call(number: int, parts: Any) -> None:  # noqa: ARG001
        running.append(number)
        try:
            if number == 1:
                raise CorruptChunkError("chunk 1")
            threading.Event().wait(0.02)
        finally:
            ended.append(number)

    store = FakeStore()
    with pytest.raises(CorruptChunkError, match="chunk 1"):
        read_each(StoreReader(store, ReadOptions(concurrency=4)), range(40), pool, call)
    assert sorted(running) == sorted(ended)
    assert len(store.asked) < 40


def test_an_error_of_a_request_is_named_by_the_caller(pool: ThreadPoolExecutor) -> None:
    store = FakeStore()
    store.errors = {"9": [PermissionError("no")]}
    with pytest.raises(ChunkReadError, match=r"^item 9: store .*, key '9' \(whole object\): no$"):
        read_each(StoreReader(store, ReadOptions(concurrency=4)), range(40), pool, lambda *_: None)


def read_ahead(store: FakeStore, batches: list[range], nbytes: int = 10) -> Generator[list[Any]]:
    reader = StoreReader(store, ReadOptions(concurrency=3))
    return reader.read_ahead(batches, lambda numbers: whole(*numbers), batch_nbytes=nbytes)


def test_batches_come_in_turn() -> None:
    batches = [range(5), range(5, 6), range(20, 37), range(35, 45)]
    found = [[parts and bytes(parts[0]) for parts in batch] for batch in read_ahead(FakeStore(), batches)]
    assert found == [[bytes([number]) * 10 if number < 40 else None for number in batch] for batch in batches]
    assert list(read_ahead(FakeStore(), [])) == []


def test_batches_are_read_ahead_as_far_as_memory_allows() -> None:
    store = FakeStore()
    batches = read_ahead(store, [range(start, start + 4) for start in range(0, 40, 4)], HELD_NBYTES // 2)
    next(batches)
    for _ in range(100):
        threading.Event().wait(0.01)
        if len(store.asked) == 12 and not store.n_under_way:
            break
    threading.Event().wait(0.02)
    assert sorted(store.asked, key=int) == [str(number) for number in range(12)]  # the one taken, and two ahead
    next(batches)
    batches.close()
    assert store.most_under_way == 3


def test_an_error_ahead_ends_all_reading() -> None:
    store = FakeStore()
    store.errors = {"9": [PermissionError("no")]}
    batches = read_ahead(store, [range(start, start + 4) for start in range(0, 40, 4)])
    with pytest.raises(ChunkReadError, match=r"key '9' \(whole object\): no$"):
        list(batches)
    assert store.n_under_way == 0
    assert len(store.asked) < 20


def test_no_request_is_under_way_once_reading_ahead_is_closed() -> None:
    store = FakeStore()
    batches = read_ahead(store, [range(start, start + 4) for start in range(0, 40, 4)])
    next(batches)
    batches.close()
    n_asked = len(store.asked)
    assert store.n_under_way == 0
    threading.Event().wait(0.02)
    assert len(store.asked) == n_asked < 40


def test_errors_that_may_pass_are_tried_again_and_others_not() -> None:
    store = FakeStore()
    store.errors = {"0": [ConnectionResetError("reset"), TimeoutError()], "1": [PermissionError("no")]}
    reader = StoreReader(store, ReadOptions(n_retries=2))
    assert reader.read(whole(0)) == [[b"\0" * 10]]
    with pytest.raises(ChunkReadError, match=r"key '1' \(whole object\): no$"):
        reader.read(whole(1))
    assert store.asked == ["0", "0", "0", "1"]


def test_an_error_after_all_tries_says_how_many() -> None:
    store = FakeStore()
    store.errors = {"0": [ConnectionResetError("reset"), ConnectionResetError("reset")]}
    with pytest.raises(ChunkReadError, match=r"key '0' \(whole object\): reset, 2 times$") as failed:
        StoreReader(store, ReadOptions(n_retries=1)).read(whole(0))
    assert isinstance(failed.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"n_retries": -1}, {"max_remote_gap_bytes": -1}])
def test_options_of_stores_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ReadOptions(**options)
