"""Byte ranges of objects in any zarr-python store (memory, zip, fsspec, obstore, icechunk), into host memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.readers.protocol import WHOLE, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import ByteRequest, Store

__all__ = ["StoreReader"]


class StoreReader:
    """Reads objects through the asynchronous interface of a zarr-python store.

    Parameters
    ----------
    store
        An open store. Its own retries and time-outs apply.
    concurrency
        Requests in flight at once.
    """

    __slots__ = ("_concurrency", "_store")

    def __init__(self, store: Store, concurrency: int) -> None:
        self._store = store
        self._concurrency = concurrency

    @property
    def store_name(self) -> str:
        """The store, as errors name it."""
        return str(self._store)

    def read(self, wanted: Sequence[ObjectRead]) -> list[list[memoryview] | None]:
        """Bytes of each range of each object; see `Reader.read`."""
        return sync(self._read(wanted))

    def object_nbytes(self, key: str) -> int | None:  # noqa: ARG002
        """None: most stores answer with a request, or by reading the object."""
        return None

    async def _read(self, wanted: Sequence[ObjectRead]) -> list[list[memoryview] | None]:
        limit = asyncio.Semaphore(self._concurrency)
        flat = [(item.key, offset, nbytes) for item in wanted for offset, nbytes in item.ranges]
        parts = iter(await asyncio.gather(*(self._get(limit, *request) for request in flat)))
        result: list[list[memoryview] | None] = []
        for item in wanted:
            got = [next(parts) for _ in item.ranges]
            present = [part for part in got if part is not None]
            if present and len(present) < len(got):
                raise ChunkReadError(f"store {self.store_name!r}, key {item.key!r}: object vanished while being read")
            result.append(present or None)
        return result

    async def _get(self, limit: asyncio.Semaphore, key: str, offset: int, nbytes: int) -> memoryview | None:
        async with limit:
            try:
                buffer = await self._store.get(key, default_buffer_prototype(), _request(offset, nbytes))
            except (OSError, TimeoutError) as error:
                raise ChunkReadError(
                    f"store {self.store_name!r}, key {key!r}, bytes {offset}:{offset + nbytes}: {error}"
                ) from error
            except BaseException as error:
                # a store's own errors stay what they are, and gain the place
                error.add_note(
                    f"while reading store {self.store_name!r}, key {key!r}, bytes {offset}:{offset + nbytes}"
                )
                raise
        if buffer is None:
            return None
        got = memoryview(buffer.as_numpy_array())
        if nbytes != WHOLE and len(got) != nbytes:
            raise CorruptChunkError(
                f"store {self.store_name!r}, key {key!r}: bytes {offset}:{offset + nbytes} were asked for, "
                f"got {len(got)} bytes; the object was cut short"
            )
        return got


def _request(offset: int, nbytes: int) -> ByteRequest | None:
    if offset < 0:
        return SuffixByteRequest(-offset)
    if nbytes == WHOLE:
        return OffsetByteRequest(offset) if offset else None
    return RangeByteRequest(offset, offset + nbytes)
