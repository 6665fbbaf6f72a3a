"""A web server of one folder that counts requests, serves byte ranges, and misbehaves when told to."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


PAGES = {"move": 302, "page": 200, "lost": 404}
"""Faults that are answered with a page, and its status."""


@dataclass(frozen=True)
class Request:
    """One GET: the path below the server's folder, the range as the client wrote it ("" for none), and who asked."""

    path: str
    range: str
    agent: str = field(default="", compare=False)


@dataclass
class Seen:
    """What a server saw since it was last reset. A request is in flight until its answer begins."""

    requests: list[Request] = field(default_factory=list)
    n_in_flight: int = 0
    most_in_flight: int = 0


class RangeServer(ThreadingHTTPServer):
    """Serves `folder` on the loopback interface from threads of its own, until closed.

    Attributes
    ----------
    fault
        "" answers properly. "fail" answers each GET that `every` divides with status 503, "cut" ends its body half
        way; the same request made again is answered, so that tests do not depend on how requests are interleaved.
        "stall" never answers a GET of a chunk, "ignore ranges" sends whole objects, "forbid" answers with status 403,
        "move" with status 302 and a page, "page" with status 200 and a page, "short" ends ranges a few bytes too soon
        and says so, "lost" answers with status 404.
    of_kvikio
        Only requests of KvikIO, which does not say who it is, meet the fault.
    forbidden
        One path that is answered with status 403.
    gather
        Answers of chunks are held back until so many requests are in flight, and a little longer, so that one more
        would be seen.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.changed = threading.Condition()
        self.reset()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def reset(self, fault: str = "", *, every: int = 5, gather: int = 1, of_kvikio: bool = False) -> None:
        """Forget what was seen, and behave anew."""
        self.fault, self.every, self.gather, self.of_kvikio = fault, every, gather, of_kvikio
        self.failed: set[Request] = set()
        self.forbidden = ""
        self.seen = Seen()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """Stop; connections that stall are let go."""
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True
    server: RangeServer
    is_to_fail = False

    def do_GET(self) -> None:
        server = self.server
        request = Request(self.path.lstrip("/"), self.headers.get("Range", ""), self.headers.get("User-Agent", ""))
        with server.changed:
            seen = server.seen
            seen.requests.append(request)
            self.is_to_fail = len(seen.requests) % server.every == 0 and request not in server.failed
            if self.is_to_fail and server.fault in ("fail", "cut"):
                server.failed.add(request)
            seen.n_in_flight += 1
            seen.most_in_flight = max(seen.most_in_flight, seen.n_in_flight)
            server.changed.notify_all()
            if self._is_chunk and server.gather > 1:
                server.changed.wait_for(lambda: seen.most_in_flight >= server.gather, timeout=5)
                server.changed.wait(timeout=0.02)
            seen.n_in_flight -= 1  # before the answer, which the client may follow with a request at once
        self._answer(request)

    def do_HEAD(self) -> None:
        self._answer(Request(self.path.lstrip("/"), ""))

    @property
    def _is_chunk(self) -> bool:
        return re.search(r"/(c/)?\d[\d./]*$", self.path) is not None

    @property
    def _fault(self) -> str:
        return "" if self.server.of_kvikio and self.headers.get("User-Agent") else self.server.fault

    def _answer(self, request: Request) -> None:
        server, fault, file = self.server, self._fault, self.server.folder / request.path
        if fault == "stall" and self._is_chunk:
            server.closing.wait(30)
            self.close_connection = True
        elif fault == "fail" and self.is_to_fail:
            self._send(503, b"busy")
        elif (fault == "forbid" and self._is_chunk) or request.path == server.forbidden:
            self._send(403, b"no")
        elif fault in PAGES and self._is_chunk:
            self._send(PAGES[fault], b"<html>Go somewhere else.</html>")
        elif not file.is_file():
            self._send(404, b"")
        else:
            content = file.read_bytes()
            first, last = self._bounds(request.range, len(content))
            last -= 3 if fault == "short" and self._is_chunk else 0
            self._send(206 if request.range and fault != "ignore ranges" else 200, content[first:last], len(content))

    def _bounds(self, asked: str, size: int) -> tuple[int, int]:
        if not asked or self._fault == "ignore ranges":
            return 0, size
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", asked).groups()
        if not first:
            return size - int(last), size
        return int(first), int(last) + 1 if last else size

    def _send(self, status: int, body: bytes, size: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"0"')
        if status == 206:
            first, _ = self._bounds(self.headers["Range"], size)
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{size}")
        self.end_headers()
        is_cut = self._fault == "cut" and self.is_to_fail
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection |= is_cut

    def log_message(self, *args: object) -> None:
        """Say nothing."""
