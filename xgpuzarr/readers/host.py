"""Byte ranges of files in a local folder, into host memory.

Plain `preadv` on the calling thread: the page cache or the disk sets the speed, and callers bring the threads.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from xgpuzarr.errors import ChunkReadError, CorruptChunkError
from xgpuzarr.readers.protocol import MISSING, WHOLE, ObjectRead

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["LocalReader"]

MAX_PREAD_NBYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB at once
# without O_NONBLOCK a named pipe in place of a chunk would hang the read
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_WAYS_OUT = {
    errno.EACCES: "check the permissions of the store",
    errno.EPERM: "check the permissions of the store",
    errno.ELOOP: "a link leads back to itself",
    errno.ENOTDIR: "a file is in place of a folder; the store is damaged",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "check the disk, or the connection to the file server",
    errno.ESTALE: "the file server has replaced the store; open it again",
}


class LocalReader:
    """Reads objects that are files below `root`."""

    __slots__ = ("_prefix", "_root")

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prefix = f"{os.fspath(root)}/"

    @property
    def store_name(self) -> str:
        """The store, as errors name it."""
        return str(self._root)

    @property
    def root(self) -> Path:
        """Folder that keys are relative to."""
        return self._root

    def path(self, key: str) -> str:
        """Path of the file that holds `key`."""
        return self._prefix + key  # many times as fast as pathlib, for each object

    def read(self, wanted: Sequence[ObjectRead]) -> list[list[memoryview] | None]:
        """Bytes of each range of each object; see `Reader.read`."""
        return [self._read_object(item) for item in wanted]

    def read_into(self, key: str, out: memoryview) -> int:
        """Read an object to `out`, as far as it fits; its size in bytes, `MISSING` if it does not exist."""
        try:
            fd = os.open(self.path(key), _OPEN_FLAGS)
        except FileNotFoundError:
            self._check_links(key)
            return MISSING
        except OSError as error:
            raise self._error(key, 0, WHOLE, error) from error
        try:
            object_nbytes = self._file_nbytes(fd, key)
            self._fill(fd, key, 0, out[:object_nbytes])
        finally:
            os.close(fd)
        return object_nbytes

    def object_nbytes(self, key: str) -> int:
        """Size of an object in bytes; `MISSING` if it does not exist."""
        try:
            status = os.stat(self.path(key))  # noqa: PTH116  # called for each object
        except FileNotFoundError:
            self._check_links(key)
            return MISSING
        except OSError as error:
            raise self._error(key, 0, WHOLE, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise self._not_a_file(key)
        return status.st_size

    def _read_object(self, wanted: ObjectRead) -> list[memoryview] | None:
        try:
            fd = os.open(self.path(wanted.key), _OPEN_FLAGS)
        except FileNotFoundError:
            self._check_links(wanted.key)
            return None
        except OSError as error:
            raise self._error(wanted.key, *wanted.ranges[0], error) from error
        try:
            object_nbytes = self._file_nbytes(fd, wanted.key)
            return [self._read_range(fd, wanted.key, object_nbytes, *r) for r in wanted.ranges]
        finally:
            os.close(fd)

    def _file_nbytes(self, fd: int, key: str) -> int:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._not_a_file(key)
        return status.st_size

    def _read_range(self, fd: int, key: str, object_nbytes: int, offset: int, nbytes: int) -> memoryview:
        start = offset if offset >= 0 else object_nbytes + offset
        stop = object_nbytes if nbytes == WHOLE else start + nbytes
        if start < 0 or stop > object_nbytes:
            raise CorruptChunkError(
                f"store {self.store_name!r}, key {key!r}: bytes {offset}:{offset + nbytes} are outside the object of "
                f"{object_nbytes} bytes; it was cut short or rewritten while being read"
            )
        out = memoryview(np.empty(stop - start, np.uint8))
        self._fill(fd, key, start, out)
        return out

    def _fill(self, fd: int, key: str, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                got = os.preadv(fd, [out[done : done + MAX_PREAD_NBYTES]], offset + done)
            except OSError as error:
                raise self._error(key, offset, len(out), error) from error
            if got == 0:
                raise CorruptChunkError(
                    f"store {self.store_name!r}, key {key!r}: object ends at byte {offset + done}, "
                    f"bytes {offset}:{offset + len(out)} were asked for"
                )
            done += got

    def _check_links(self, key: str) -> None:
        """Tell an object that does not exist from one behind a link that leads nowhere, such as git-annex leaves."""
        while key:
            path = self.path(key)
            try:
                is_link = stat.S_ISLNK(os.lstat(path).st_mode)
            except FileNotFoundError:
                key = key.rpartition("/")[0]  # the folder it would be in
                continue
            if is_link and not os.path.exists(path):  # noqa: PTH110
                raise ChunkReadError(
                    f"store {self.store_name!r}, key {key!r}: a link to {os.readlink(path)!r}, which does not exist; "  # noqa: PTH115
                    "fetch or mount what it leads to"
                )
            return

    def _not_a_file(self, key: str) -> ChunkReadError:
        return ChunkReadError(
            f"store {self.store_name!r}, key {key!r}: a stored object must be a file, found a directory or device "
            "at that path; the store is damaged or the path points above the array"
        )

    def _error(self, key: str, offset: int, nbytes: int, error: OSError) -> ChunkReadError:
        span = "whole object" if nbytes == WHOLE else f"bytes {offset}:{offset + nbytes}"
        way_out = _WAYS_OUT.get(error.errno or 0)
        return ChunkReadError(
            f"store {self.store_name!r}, key {key!r} ({span}): {error.strerror or error}"
            + (f"; {way_out}" if way_out else "")
        )
