"""Waves whose encoded bytes are on their way into device memory before they are asked for, one wave ahead.

Before the last bytes of one wave are there, those of the next are asked for: storage then waits for nothing from the
first byte of a read to its last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import cupy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from xgpuzarr.device_wave import Fetched

__all__ = ["AheadFetch", "Begun"]


class Abandonable(Protocol):
    """Reads into a slab, which go on writing to it until they are waited for."""

    def abandon(self) -> None:
        """Wait for what is under way, and begin nothing more."""


@dataclass(frozen=True, slots=True)
class Begun[Read: Abandonable]:
    """A wave whose bytes are on their way."""

    rows: NDArray[np.int64]
    fetched: Fetched
    read: Read


class AheadFetch[Read: Abandonable](ABC):
    """Reads the waves of one read, in the thread that makes it.

    Attributes
    ----------
    encoded_nbytes
        Encoded size of the chunks, in bytes, once all are fetched.
    remote_reader, remote_reader_reason
        As `xgpuzarr.diagnostics.ReadReport` has them.
    """

    remote_reader = remote_reader_reason = ""
    _begun: Begun[Read] | None = None
    encoded_nbytes = 0

    @property
    def n_again(self) -> int:
        """Spans that KvikIO did not bring, and the client was asked for."""
        return 0

    def ask(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> None:
        """Have all bytes of a wave on their way; parameters as of `fetch`, which comes next."""
        if self._begun is None or self._begun.rows is not rows:
            self.drop()
            self._begun = self._begin(rows, stream)
        self._queue(self._begun.read)

    def fetch(
        self,
        rows: NDArray[np.int64],
        stream: cupy.cuda.Stream,  # noqa: ARG002  # of the bytes asked for; `StoreFetch` asks here
        following: NDArray[np.int64] | None,
        ahead: cupy.cuda.Stream | None,
    ) -> tuple[Fetched, NDArray[np.int64]]:
        """Read a wave; have the next on its way.

        Parameters
        ----------
        rows
            Plan rows of the chunks, as asked for.
        stream
            Where the wave will be decoded; the chunks are ready on it.
        following, ahead
            The next wave, and its stream; without either, nothing is begun. The next wave is left for its own turn if
            there is no memory for its bytes.

        Returns
        -------
        fetched
            The chunks; none where they are in the output already.
        missing
            Plan rows of chunks that do not exist: none.

        Raises
        ------
        ChunkReadError, CorruptChunkError
            Naming store, key and range.
        """
        begun, self._begun = self._begun, None
        assert begun is not None and begun.rows is rows  # it was asked for  # noqa: PT018
        try:
            if following is not None and ahead is not None:
                self._begun = self._begin(following, ahead)
        except cupy.cuda.memory.OutOfMemoryError:
            pass  # there may be more when its turn comes, and who fetches it knows what to do if not
        except BaseException:
            begun.read.abandon()
            raise
        self._finish(begun)
        return begun.fetched, rows[:0]

    def drop(self) -> bool:
        """Give up the wave that was begun, and its memory; False if there is none."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.read.abandon()
        return begun is not None

    def close(self) -> None:
        """End what is under way."""
        self.drop()

    @abstractmethod
    def _begin(self, rows: NDArray[np.int64], stream: cupy.cuda.Stream) -> Begun[Read]:
        """Have the bytes of a wave on their way."""

    @abstractmethod
    def _queue(self, read: Read) -> None:
        """Ask for what `_begin` has left, before anything of the next wave is asked for."""

    @abstractmethod
    def _finish(self, begun: Begun[Read]) -> None:
        """Return when all bytes of a wave are on the device."""
