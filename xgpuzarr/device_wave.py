"""One wave of chunks on the device: checked, decoded, filtered, placed; looked at again once its stream has passed.

What the device decoder does not take (several frames in a chunk, a dictionary), and whatever it fails on, is decoded on
the host instead, which also tells a corrupt chunk from an unusual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cupy
import numpy as np

from xgpuzarr.decoders.blosc import decode_blosc
from xgpuzarr.decoders.checksums import NBYTES as CHECKSUM_NBYTES
from xgpuzarr.decoders.checksums import check_on_device
from xgpuzarr.decoders.filters import undo
from xgpuzarr.decoders.frames import GUARD_NBYTES, Places
from xgpuzarr.decoders.host import decode_chunk
from xgpuzarr.decoders.opaque_frames import batch_type
from xgpuzarr.errors import CorruptChunkError
from xgpuzarr.kernels import launch
from xgpuzarr.options import usable_cpus
from xgpuzarr.plan.codec_facts import CHECKSUMS, DEVICE_ONLY
from xgpuzarr.pool import run_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgpuzarr.decoders.frames import FrameBatch
    from xgpuzarr.device_output import DeviceOutput
    from xgpuzarr.plan.read_plan import ReadPlan
    from xgpuzarr.plan.steps import Step

__all__ = ["Fetched", "Wave"]

HOST_DECODED_NBYTES = 256 << 20
"""Decoded bytes of chunks that the host decodes at a time for the device."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Encoded chunks in device memory.

    Attributes
    ----------
    slab
        uint8, 1-D, on the device.
    rows
        Plan rows of the chunks.
    at, nbytes
        Where each chunk starts in `slab`, and its encoded size, in bytes.
    object_offset
        Where each chunk starts in its object, in bytes.
    """

    slab: cupy.ndarray
    rows: NDArray[np.int64]
    at: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    object_offset: NDArray[np.int64]

    def ordered(self, is_later: NDArray[np.bool_]) -> Fetched:
        """The same chunks with some of them (bool, one a chunk) behind the others."""
        if not is_later.any() or is_later.all():
            return self
        order = np.argsort(is_later, kind="stable")
        return Fetched(self.slab, self.rows[order], self.at[order], self.nbytes[order], self.object_offset[order])


class Wave:
    """Decoding of some fetched chunks into an output.

    Parameters
    ----------
    fetched
        The chunks. Those that are decoded straight into the output come first from here on.
    output
        Where they go.
    stream
        Stream of all work of this wave; the slab is ready on it.
    """

    def __init__(self, fetched: Fetched, output: DeviceOutput, stream: cupy.cuda.Stream) -> None:
        self.fetched, self.output, self.stream = (
            fetched.ordered(output.straight_offset[fetched.rows] < 0),
            output,
            stream,
        )
        self.plan: ReadPlan = output.plan
        self.chain = self.plan.layout.codec_chain
        self.n_host_chunks = 0
        self._done = cupy.cuda.Event(disable_timing=True)
        # where the bytes lie without the checksums around them
        self.at, self.nbytes = self.fetched.at, self.fetched.nbytes
        # chunks that are one piece of the output are decoded there, the others in scratch
        self.straight_at = output.straight_offset[self.fetched.rows]
        self.n_direct = int(np.count_nonzero(self.straight_at >= 0))
        self._frames: FrameBatch | None = None
        self._flags: list[cupy.ndarray] = []

    def start(self) -> None:
        """Queue everything; waits at most for what a decoder must know of the chunks first."""
        with self.stream:
            skip = self._check_encoded()
            if self.chain.compressor is None:
                scratch, at = self._take_plain()
            elif self.chain.compressor.codec == "blosc":
                scratch, at = self._decode_blosc(skip)
            else:
                scratch, at = self._decode_frames(self.chain.compressor.codec, skip)
            if self.chain.filters:
                scratch, at = self._undo_filters(scratch, at)
            if self.n_direct < len(at):
                self.output.place(scratch, self.fetched.rows[self.n_direct :], at[self.n_direct :])
            self._done.record(self.stream)

    def finish(self) -> None:
        """Wait for the stream, then look at every status, size, checksum and guard zone.

        Raises
        ------
        CorruptChunkError
            A chunk does not decode on the host either.
        """
        self._done.synchronize()
        is_suspect = np.zeros(len(self.at), np.bool_)
        for flags in self._flags:
            is_suspect |= flags.get() != 0
        if self._frames is not None:
            is_suspect[self._frames.suspects()] = True
        suspects = np.flatnonzero(is_suspect)
        if len(suspects):
            self._refuse_device_only(suspects)
            with self.stream:
                self._decode_on_host(suspects)
            self.stream.synchronize()

    def abandon(self) -> None:
        """Wait until no work of this wave can touch the output any more."""
        self.stream.synchronize()

    def problem_on_host(self, encoded: memoryview) -> str:
        """What the host finds wrong with an encoded chunk; "" if it decodes."""
        return decode_chunk(self.chain, encoded, np.empty(self.plan.layout.chunk_nbytes, np.uint8))

    def _check_encoded(self) -> cupy.ndarray | None:
        """Look at the checksums of the encoded bytes before a decoder sees these; int32, not 0 for chunks to skip."""
        skip = None
        for step in self.chain.checks:
            for index in np.flatnonzero(self.nbytes < CHECKSUM_NBYTES)[:1].tolist():
                raise self._corrupt(index, f"{self.nbytes[index]} bytes have no room for a {step.codec} checksum")
            slab, status = self.fetched.slab, self.output.status
            self.at, self.nbytes, is_bad = check_on_device(step, slab, self.at, self.nbytes, status=status)
            skip = is_bad if skip is None else skip | is_bad
        if skip is not None:
            self._flags.append(skip)
        return skip

    def _refuse_device_only(self, suspects: NDArray[np.int64]) -> None:
        """Name a chunk that the device did not decode, where the host has no decoder to look again with."""
        compressor = self.chain.compressor
        if self._frames is None or compressor is None or compressor.codec not in DEVICE_ONLY:
            return
        index = int(suspects[0])
        if index in self._frames.suspects():
            raise self._corrupt(index, self._frames.describe(index))
        raise self._corrupt(
            index,
            f"what codec {compressor.codec!r} decoded does not suit the filters before it: a checksum differs, or a "
            "value is out of range of its dtype",
        )

    def _take_plain(self) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Chunks that are stored as they are, or with filters only."""
        expected = self.chain.unfiltered_nbytes
        for index in np.flatnonzero(self.nbytes != expected)[:1].tolist():
            raise self._corrupt(index, f"{self.nbytes[index]} bytes are stored, the chunk shape needs {expected}")
        self.n_direct = 0  # they lie in the slab
        return self.fetched.slab, self.at

    def _decode_blosc(self, skip: cupy.ndarray | None) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Blosc checks itself: no stream leaves its place, and a problem is noted for each chunk."""
        for index in np.flatnonzero(skip.get())[:1].tolist() if skip is not None else ():
            raise self._corrupt(index, self.problem_on_host(self._encoded(index)))
        n, nbytes = len(self.at), self.chain.unfiltered_nbytes
        out, at = self.output.memory, self.straight_at
        if self.n_direct < n:
            self.n_direct = 0
            out, at = cupy.empty(n * nbytes, np.uint8), np.arange(n, dtype=np.int64) * nbytes
        problem = decode_blosc(
            self.fetched.slab,
            self.at,
            self.nbytes,
            chunk_nbytes=nbytes,
            out=out,
            out_offset=at,
            status=self.output.status,
        )
        self._flags.append(problem)
        return out, at

    def _decode_frames(self, codec: str, skip: cupy.ndarray | None) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Frames of one algorithm, by nvCOMP."""
        self._frames = batch_type(codec)(
            codec,
            self.fetched.slab,
            self.at,
            self.nbytes,
            decoded_nbytes=self.chain.unfiltered_nbytes,
            status=self.output.status,
        )
        if self._frames.room_nbytes > self.chain.unfiltered_nbytes:
            self.n_direct = 0  # there is no room behind a chunk in the output
        stride = -(-self._frames.room_nbytes // 16) * 16 + GUARD_NBYTES
        n_in_scratch = len(self.at) - self.n_direct
        at = np.r_[self.straight_at[: self.n_direct], np.arange(n_in_scratch, dtype=np.int64) * stride]
        scratch = cupy.empty(n_in_scratch * stride, np.uint8)
        self._frames.decode(Places(self.output.memory, scratch, self.n_direct, at), skip)
        return scratch, at

    def _undo_filters(self, scratch: cupy.ndarray, at: NDArray[np.int64]) -> tuple[cupy.ndarray, NDArray[np.int64]]:
        """Undo filters on all chunks at once; what they make of a chunk that was not decoded is never looked at."""
        n, nbytes = len(at), self.chain.unfiltered_nbytes
        batch = cupy.empty((n, nbytes), np.uint8)
        launch.copy_bytes(
            scratch,
            batch.reshape(-1),
            source_offset=at,
            out_offset=np.arange(n, dtype=np.int64) * nbytes,
            nbytes=np.full(n, nbytes),
            mean_nbytes=nbytes,
            status=self.output.status,
        )
        for step in self.chain.filters:
            if step.codec in CHECKSUMS:
                batch, is_bad = self._check_decoded(step, batch)
            else:
                batch, is_bad = undo(step, batch, cupy)
            if is_bad is not None:
                self._flags.append(is_bad)
        return batch.reshape(-1), np.arange(n, dtype=np.int64) * batch.shape[1]

    def _check_decoded(self, step: Step, batch: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
        n, width = batch.shape
        at, nbytes = np.arange(n, dtype=np.int64) * width, np.full(n, width)
        at, nbytes, is_bad = check_on_device(step, batch.reshape(-1), at, nbytes, status=self.output.status)
        start = int(at[0])
        return cupy.ascontiguousarray(batch[:, start : start + int(nbytes[0])]), is_bad

    def _decode_on_host(self, index: NDArray[np.int64]) -> None:
        """Decode some chunks on the host, and bring their elements to their place."""
        nbytes = self.plan.layout.chunk_nbytes
        self.n_host_chunks += len(index)
        n_at_once = max(1, HOST_DECODED_NBYTES // nbytes)
        for start in range(0, len(index), n_at_once):
            part = index[start : start + n_at_once]
            decoded = np.empty((len(part), nbytes), np.uint8)
            self._decode_into(part, decoded)
            n_direct = int(np.count_nonzero(part < self.n_direct))
            for number, at in enumerate(self.straight_at[part[:n_direct]].tolist()):
                self.output.memory[at : at + nbytes].set(decoded[number])
            if n_direct < len(part):
                batch = cupy.asarray(decoded[n_direct:]).reshape(-1)
                rows = self.fetched.rows[part[n_direct:]]
                self.output.place(batch, rows, np.arange(len(rows), dtype=np.int64) * nbytes)

    def _decode_into(self, index: NDArray[np.int64], decoded: NDArray[np.uint8]) -> None:
        encoded = [self._encoded(i) for i in index.tolist()]

        def decode(number: int) -> None:
            problem = decode_chunk(self.chain, encoded[number], decoded[number])
            if problem:
                raise self._corrupt(int(index[number]), problem)

        run_all(decode, range(len(index)), usable_cpus())

    def _encoded(self, index: int) -> memoryview:
        """Encoded bytes of one chunk, in host memory."""
        start, nbytes = int(self.fetched.at[index]), int(self.fetched.nbytes[index])
        return memoryview(self.fetched.slab[start : start + nbytes].get())

    def _corrupt(self, index: int, problem: str) -> CorruptChunkError:
        fetched = self.fetched
        label = self.plan.label(int(fetched.rows[index]), int(fetched.object_offset[index]), int(fetched.nbytes[index]))
        return CorruptChunkError(f"{label}: {problem}")
