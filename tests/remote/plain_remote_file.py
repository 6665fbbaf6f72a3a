"""A stand-in for KvikIO's remote files, into host memory, as careless about answers as they are."""

from __future__ import annotations

import http.client
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


class PlainRemoteFile:
    """Stands in for `kvikio.RemoteFile`: takes any status below 400, and reports the size that was asked for."""

    pool: ThreadPoolExecutor

    def __init__(self, url: str, nbytes: int) -> None:
        self._url, self._nbytes = urlsplit(url), nbytes

    @classmethod
    def open_http(cls, url: str, nbytes: int) -> PlainRemoteFile:
        return cls(url, nbytes)

    def pread(self, room: Any, size: int, offset: int) -> Any:
        if offset + size > self._nbytes:
            raise ValueError("cannot read past the end")
        assert size <= SETTINGS["task_size"]
        future = self.pool.submit(self._read, np.asarray(room).view(np.ndarray), size, offset)
        return SimpleNamespace(get=future.result)

    def _read(self, room: np.ndarray, size: int, offset: int) -> int:
        connection = http.client.HTTPConnection(self._url.netloc, timeout=10)
        try:
            target = f"{self._url.path}?{self._url.query}".rstrip("?")
            connection.request("GET", target, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
            answer = connection.getresponse()
            if answer.status >= 400:
                raise RuntimeError(f"The requested URL returned error: {answer.status}")
            body = answer.read()
        except (http.client.HTTPException, OSError) as error:
            raise RuntimeError(str(error)) from error
        finally:
            connection.close()
        if len(body) > size:
            raise OverflowError("maybe the server doesn't support file ranges?")
        room[: len(body)] = np.frombuffer(body, np.uint8)
        return size


SETTINGS = {
    "num_threads": 1,
    "task_size": 4 << 20,
    "http_max_attempts": 3,
    "http_timeout": 60,
    "remote_io_backend": SimpleNamespace(name="EASY_THREADPOOL"),
}


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `import kvikio` give the stand-in."""
    settings = dict(SETTINGS)
    kvikio, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
    kvikio.RemoteFile, kvikio.defaults = PlainRemoteFile, defaults
    kvikio.is_remote_file_available = lambda: True
    defaults.get, defaults.set = settings.__getitem__, settings.update
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    with ThreadPoolExecutor(16) as pool:
        monkeypatch.setattr(PlainRemoteFile, "pool", pool, raising=False)
        yield
