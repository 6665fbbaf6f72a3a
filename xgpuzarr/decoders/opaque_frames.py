"""Frames whose headers only nvCOMP reads, and zarrs' pages of gdeflate: checked by what stands around them.

Nothing is known here of what is inside a frame, so nvCOMP is trusted more than elsewhere: with the size that it reads
from a frame, with statuses, and with the guard zone behind each output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.decoders import nvcomp
from xgpuzarr.decoders.frames import FRAMING, GUARD_NBYTES, PREFIX_NBYTES, EncodedFrames, FrameBatch, aligned
from xgpuzarr.kernels import launch
from xgpuzarr.kernels.arguments import upload
from xgpuzarr.plan import gdeflate
from xgpuzarr.plan.frames import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgpuzarr.decoders.frames import Places

__all__ = ["OpaqueFrames", "batch_type"]


def batch_type(codec: str) -> type[FrameBatch]:
    """What holds chunks of a codec, any but Blosc."""
    if FRAMING[codec].check:
        return EncodedFrames
    return _Pages if codec == "gdeflate" else OpaqueFrames


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """One call of nvCOMP, a row a frame: its source, the chunk and the room of each frame, and what became of it."""

    source: cupy.ndarray
    chunk: NDArray[np.int64]
    room: NDArray[np.int64]
    actual: cupy.ndarray
    statuses: cupy.ndarray

    def failed(self) -> NDArray[np.int64]:
        """Chunks of frames that failed; valid once the stream has passed."""
        failed: NDArray[np.int64] = self.chunk[(self.statuses.get() != 0) | (self.actual.get() != self.room)]
        return failed


class OpaqueFrames(FrameBatch):
    """Chunks of a format that only nvCOMP knows; decoding waits for what stands before them."""

    @property
    def header_nbytes(self) -> int:
        """Bytes before the first frame."""
        return PREFIX_NBYTES

    @property
    def size_nbytes(self) -> int:
        """Bytes of the decoded size, which these start with."""
        return PREFIX_NBYTES

    def decode(self, places: Places, skip: cupy.ndarray | None = None) -> None:
        """Queue the decoding of all sound chunks; as `FrameBatch.decode`."""
        self._heads = self._read_heads(self.header_nbytes)
        self._problems = self._check()
        is_sound = self._problems == Problem.NONE
        if skip is not None:
            is_sound &= skip.get() == 0
        index = np.flatnonzero(is_sound)
        (offset,) = upload(places.offset[places.n_in_result :] + self.decoded_nbytes)
        launch.write_guards(places.scratch, offset, GUARD_NBYTES, status=self.status)
        self._batch = self._queue(index, places) if len(index) else None
        self._broken = launch.check_guards(places.scratch, offset, GUARD_NBYTES)

    def suspects(self) -> NDArray[np.int64]:
        """Chunks that are not sound, or were not decoded as they should; valid once the stream has passed."""
        if self._broken.get().any():
            return np.arange(len(self.at))  # whatever was overrun may be a neighbour
        is_decoded = np.zeros(len(self.at), np.bool_)
        if self._batch is not None:
            is_decoded[self._batch.chunk] = True
            is_decoded[self._batch.failed()] = False
        return np.flatnonzero(~is_decoded)

    def describe(self, index: int) -> str:
        """Say what is wrong with a chunk."""
        head, expected = self._heads[index], self.decoded_nbytes
        match Problem(int(self._problems[index])):
            case Problem.NONE:
                return super().describe(index)
            case Problem.TOO_SHORT:
                nbytes = int(self.nbytes[index])
                return (
                    f"{self.codec}: {nbytes} encoded bytes are too few for {expected} decoded bytes; it was cut short"
                )
            case Problem.SIZE:
                stated = int.from_bytes(head[: self.size_nbytes].tobytes(), "little")
                return f"{self.codec} frame says {stated} bytes, the chunk shape needs {expected}"
        return f"{self.codec}: header breaks the format, got {head[:16].tobytes().hex(' ')}"

    def _check(self) -> NDArray[np.uint8]:
        """A `Problem` for each chunk."""
        stated = self._heads[:, :PREFIX_NBYTES].copy().view("<u4")[:, 0]
        return np.select(
            [self.nbytes <= PREFIX_NBYTES, stated != self.decoded_nbytes],
            [np.uint8(Problem.TOO_SHORT), np.uint8(Problem.SIZE)],
            np.uint8(Problem.NONE),
        )

    def _read_heads(self, width: int) -> NDArray[np.uint8]:
        """First bytes of every chunk in host memory, with zeros behind a shorter one."""
        n = len(self.at)
        heads = cupy.zeros((n, width), np.uint8)
        launch.copy_bytes(
            self.slab,
            heads.reshape(-1),
            source_offset=self.at,
            out_offset=np.arange(n, dtype=np.int64) * width,
            nbytes=np.minimum(self.nbytes, width),
            mean_nbytes=width,
            status=self.status,
        )
        host: NDArray[np.uint8] = heads.get()
        return host

    def _queue(self, index: NDArray[np.int64], places: Places) -> _Batch:
        """Queue one frame a chunk."""
        at, nbytes = self.at[index] + PREFIX_NBYTES, self.nbytes[index] - PREFIX_NBYTES
        room = np.full(len(index), self.decoded_nbytes)
        return self._decompress(index, at, nbytes, self._addresses(index, places), room)

    def _addresses(self, index: NDArray[np.int64], places: Places) -> NDArray[np.uint64]:
        base = np.where(index < places.n_in_result, places.result.data.ptr, places.scratch.data.ptr)
        addresses: NDArray[np.uint64] = (base + places.offset[index]).astype(np.uint64)
        return addresses

    def _decompress(
        self,
        chunk: NDArray[np.int64],
        at: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        address: NDArray[np.uint64],
        room: NDArray[np.int64],
    ) -> _Batch:
        """Queue one call of nvCOMP, a row a frame; frames of another size than their room are left out."""
        algorithm, stream = self.framing.algorithm, cupy.cuda.get_current_stream()
        source, at = aligned(self.slab, at, nbytes, algorithm, self.status)
        columns = cupy.asarray(np.array([source.data.ptr + at, nbytes, address, room], np.uint64))
        if algorithm != "gdeflate":  # whose frames do not state their size
            stated = nvcomp.decompressed_nbytes(algorithm, columns[0], columns[1], stream=stream).get()
            fits = np.flatnonzero(stated == room)
            if len(fits) < len(room):
                columns = columns[:, cupy.asarray(fits)]
            chunk, room = chunk[fits], room[fits]
        actual, statuses = nvcomp.decompress_batch(
            algorithm,
            *columns,
            max_chunk_nbytes=int(room.max(initial=0)),
            total_nbytes=int(room.sum()),
            stream=stream,
        )
        return _Batch(source, chunk, room, actual, statuses)


class _Pages(OpaqueFrames):
    """Chunks of zarrs' ``gdeflate``: each is many frames, whose places stand before the first."""

    @property
    def header_nbytes(self) -> int:
        """Bytes before the first page."""
        return gdeflate.header_nbytes(self.decoded_nbytes)

    @property
    def size_nbytes(self) -> int:
        """As in `OpaqueFrames`."""
        return gdeflate.SIZE_NBYTES

    def _check(self) -> NDArray[np.uint8]:
        self._headers = self._heads.view("<u8").astype(np.uint64)
        return gdeflate.check_headers(self._headers, self.nbytes, self.decoded_nbytes)

    def _queue(self, index: NDArray[np.int64], places: Places) -> _Batch:
        """Queue one frame a page."""
        headers, n_pages = self._headers[index], gdeflate.n_pages(self.decoded_nbytes)
        start = np.arange(n_pages, dtype=np.int64) * gdeflate.PAGE_NBYTES
        at = self.at[index][:, None] + gdeflate.page_offsets(headers, self.decoded_nbytes)
        return self._decompress(
            np.repeat(index, n_pages),
            at.reshape(-1),
            headers[:, 2:].astype(np.int64).reshape(-1),
            (self._addresses(index, places)[:, None] + start.astype(np.uint64)).reshape(-1),
            np.tile(np.minimum(self.decoded_nbytes - start, gdeflate.PAGE_NBYTES), len(index)),
        )
