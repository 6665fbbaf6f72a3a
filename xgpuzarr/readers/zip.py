"""Byte ranges of the members of a local zip file, into host memory.

Stored members are read where they lie, on the calling thread, like files; deflated ones are inflated whole. Format:
APPNOTE 6.3.10, sections 4.3.7 (local file header) and 4.4.5 (compression methods).
"""

from __future__ import annotations

import os
import struct
import weakref
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zarr.storage import ZipStore

__all__ = ["ZipReader", "zip_reader"]

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_SIGNATURE = b"PK\x03\x04"
_IS_ENCRYPTED = 1


def zip_reader(store: ZipStore) -> ZipReader | None:
    """Reader of a store, of the file that it was when this was first called; as `ZipReader.of`."""
    key = id(store)
    assert store.path is not None  # the caller looked
    if key not in _readers:
        reader = ZipReader.of(Path(store.path))
        _readers[key] = weakref.ref(store, lambda _: _readers.pop(key, None)), reader
    return _readers[key][1]


class ZipReader:
    """Reads objects that are members of the zip file at `path`, as it was in `state`; made by `ZipReader.of`."""

    __slots__ = ("_members", "_path", "_state")

    def __init__(self, path: Path, state: tuple[int, ...], members: Mapping[str, zipfile.ZipInfo]) -> None:
        self._path, self._state = path, state
        self._members = members

    @classmethod
    def of(cls, path: Path) -> ZipReader | None:
        """Make the reader of a zip file; None where a member is encrypted, or compressed by anything but deflate."""
        path = path.absolute()
        state = _state(path.stat())
        members = _members(path, state)
        return None if members is None else cls(path, state, members)

    @property
    def store_name(self) -> str:
        """The store, as errors name it."""
        return str(self._path)

    def object_nbytes(self, key: str) -> int:
        """Size of an object in bytes; `MISSING` if it does not exist."""
        member = self._members.get(key)
        return MISSING if member is None else member.file_size

    def read(self, wanted: Sequence[ObjectRead]) -> list[list[memoryview] | None]:
        """Bytes of each range of each object; see `Reader.read`."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ChunkReadError(f"store {self.store_name!r}: {error.strerror}; was it moved?") from error
        try:
            if _state(os.fstat(fd)) != self._state:
                raise ChunkReadError(
                    f"store {self.store_name!r}: it was written anew since it was opened; open it again"
                )
            return [self._read_object(fd, item) for item in wanted]
        finally:
            os.close(fd)

    def _read_object(self, fd: int, wanted: ObjectRead) -> list[memoryview] | None:
        member = self._members.get(wanted.key)
        if member is None:
            return None
        header = self._pread(fd, wanted.key, member.header_offset, _LOCAL_HEADER.size)
        signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if signature != _SIGNATURE:
            raise self._corrupt(wanted.key, f"no member starts at byte {member.header_offset} of the zip file")
        start = member.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        inflated = self._inflate(fd, member, start) if member.compress_type == zipfile.ZIP_DEFLATED else None
        return [self._read_range(fd, member, start, inflated, *place) for place in wanted.ranges]

    def _read_range(
        self, fd: int, member: zipfile.ZipInfo, start: int, inflated: memoryview | None, offset: int, nbytes: int
    ) -> memoryview:
        first = offset if offset >= 0 else member.file_size + offset
        stop = member.file_size if nbytes == WHOLE else first + nbytes
        if first < 0 or stop > member.file_size:
            raise self._corrupt(
                member.filename,
                f"bytes {offset}:{offset + nbytes} are outside the member of {member.file_size} bytes",
            )
        if inflated is not None:
            return inflated[first:stop]
        found = self._pread(fd, member.filename, start + first, stop - first)
        if len(found) == member.file_size:
            self._check(member, found)
        return found

    def _inflate(self, fd: int, member: zipfile.ZipInfo, start: int) -> memoryview:
        deflated = self._pread(fd, member.filename, start, member.compress_size)
        try:
            # one byte more than the member should have shows a longer one, and bounds memory
            found = memoryview(zlib.decompressobj(-zlib.MAX_WBITS).decompress(deflated, member.file_size + 1))
        except zlib.error as error:
            raise self._corrupt(member.filename, f"the member does not inflate ({error})") from error
        self._check(member, found)
        return found

    def _check(self, member: zipfile.ZipInfo, found: memoryview) -> None:
        if len(found) != member.file_size or zlib.crc32(found) != member.CRC:
            raise self._corrupt(
                member.filename, "the member's size or CRC-32 is not what the zip file's directory says"
            )

    def _pread(self, fd: int, key: str, offset: int, nbytes: int) -> memoryview:
        out = memoryview(np.empty(nbytes, np.uint8))
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(fd, [out[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise ChunkReadError(f"store {self.store_name!r}, key {key!r}: {error.strerror}") from error
            if got == 0:
                raise self._corrupt(key, f"the zip file ends at byte {offset + done}, inside the member")
            done += got
        return out

    def _corrupt(self, key: str, problem: str) -> CorruptChunkError:
        return CorruptChunkError(f"store {self.store_name!r}, key {key!r}: {problem}")


_readers: dict[int, tuple[weakref.ref[ZipStore], ZipReader | None]] = {}
"""By the identity of the store."""


def _state(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is written anew, or another takes its place."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _members(path: Path, state: tuple[int, ...]) -> dict[str, zipfile.ZipInfo] | None:  # noqa: ARG001
    """Members of a zip file by name, read once for each state of it; None where some cannot be read here."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
    readable = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if any(member.compress_type not in readable or member.flag_bits & _IS_ENCRYPTED for member in members.values()):
        return None
    return members
