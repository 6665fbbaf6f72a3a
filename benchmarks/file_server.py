"""A web server of files that is fast enough to measure readers with: whole objects or one byte range, by sendfile.

Run ``python benchmarks/file_server.py FOLDER``; it prints its port and serves FOLDER on the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import re
import socketserver
import time
from pathlib import Path

_RANGE = re.compile(rb"^range: *bytes=(\d*)-(\d*)\r?$", re.IGNORECASE | re.MULTILINE)


class FileServer(socketserver.ThreadingTCPServer):
    """One thread a connection; connections are kept.

    Parameters
    ----------
    folder
        What is served.
    latency_s
        Seconds that each answer is held back, as a distant store would.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.folder, self.latency_s = folder, latency_s


class _Connection(socketserver.StreamRequestHandler):
    """Answers GET and HEAD until the client closes the connection."""

    disable_nagle_algorithm = True
    server: FileServer

    def handle(self) -> None:
        while head := self._head():
            method, path = head.split(b" ", 2)[:2]
            time.sleep(self.server.latency_s)
            target = self.server.folder / os.fsdecode(path).lstrip("/")
            if not target.is_file():
                self._answer("404 Not Found", 0)
                continue
            file = os.open(target, os.O_RDONLY)
            size = os.fstat(file).st_size
            start, stop, status = 0, size, "200 OK"
            if (asked := _RANGE.search(head)) is not None:
                start, stop = _bounds(asked[1], asked[2], size)
                status = f"206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{size}"
            self._answer(status, stop - start)
            while method == b"GET" and start < stop:
                start += os.sendfile(self.connection.fileno(), file, start, stop - start)
            os.close(file)

    def _head(self) -> bytes:
        lines = []
        while (line := self.rfile.readline()) not in (b"", b"\r\n"):
            lines.append(line)
        return b"".join(lines)

    def _answer(self, status: str, nbytes: int) -> None:
        self.wfile.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {nbytes}\r\nAccept-Ranges: bytes\r\n"
            'Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: "0"\r\n\r\n'.encode()
        )


def _bounds(first: bytes, last: bytes, size: int) -> tuple[int, int]:
    """Start and stop of ``bytes=first-last``; of the last bytes without `first`, up to the end without `last`."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def main() -> None:
    """Serve a folder until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    with FileServer(arguments.folder, arguments.latency_ms / 1000) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
