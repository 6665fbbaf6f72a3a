"""What does a read need of a store? Byte ranges of objects, told apart from objects that do not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xgpuzarr.plan.byte_ranges import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgpuzarr.errors import ChunkReadError, CorruptChunkError

    type ReadError = ChunkReadError | CorruptChunkError

__all__ = ["MISSING", "WHOLE", "ObjectRead", "Reader"]

WHOLE = -1
"""As `nbytes` of a range: up to the end of the object."""


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """Byte ranges wanted of one object.

    Attributes
    ----------
    key
        Key of the object in the store.
    ranges
        (offset, nbytes) of each range. A negative offset counts from the end of the object; ``nbytes=WHOLE`` reads
        to its end.
    nbytes_after
        Bytes that the object must hold after the range that ends last, whose offset and size are then given. For
        readers that do not tell the size of an object: they ask for as many bytes more, which come short if it ends.
    """

    key: str
    ranges: tuple[tuple[int, int], ...]
    nbytes_after: int = 0


class Reader(Protocol):
    """Encoded bytes of stored objects, in host memory. Safe to call from several threads at once."""

    @property
    def store_name(self) -> str:
        """The store, as an error should name it."""

    def object_nbytes(self, key: str) -> int | None:
        """Size of an object in bytes, `MISSING`, or None where asking would cost a request."""

    def read(self, wanted: Sequence[ObjectRead]) -> list[list[memoryview] | None]:
        """Bytes of each range of each object; None for an object that does not exist.

        Raises
        ------
        ChunkReadError
            An object exists but cannot be read.
        CorruptChunkError
            An object ends before a range does, or too soon after it.
        """
