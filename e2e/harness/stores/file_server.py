"""An HTTP server of files on the loopback that injects the faults of networks and stores."""

from __future__ import annotations

import re
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one response: a status instead of the file, a cut after so many bytes, a flipped bit.

    With `silent` the connection stays open after the cut, as in a network partition.
    """

    status: int = 0
    cut_after: int | None = None
    silent: bool = False
    corrupt: bool = False
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: str
    authorization: str | None
    range: str | None
    target: str = ""
    """The path as it was sent, percent-encoded."""


@dataclass(frozen=True, slots=True)
class Response:
    """With `file`, ranges of `content` may be requested."""

    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: str | None = None


class FileServer(ABC):
    """Subclasses find the files. Each response for a file takes the first of `faults[name]`."""

    def __init__(self) -> None:
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Request] = []
        self.sent: dict[str, int] = defaultdict(int)
        """Bytes sent of each file."""
        self.bytes_per_s: float | None = None
        self.ranges = True
        """Whether ranges are supported."""
        self.url = ""
        self._lock = threading.Lock()
        self._over = threading.Event()

    @abstractmethod
    def find(self, request: Request) -> Response:
        """The requested file, or an error."""

    @contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[Self]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.files = self  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self._over.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def wait(self) -> None:
        """Block until the server stops."""
        self._over.wait()

    def take_fault(self, name: str | None) -> Fault | None:
        with self._lock:
            waiting = self.faults.get(name or "", [])
            return waiting.pop(0) if waiting else None

    def count(self, name: str | None, num_bytes: int) -> None:
        with self._lock:
            self.sent[name or ""] += num_bytes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _files(self) -> FileServer:
        return self.server.files  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        self._respond("GET")

    def do_HEAD(self) -> None:
        self._respond("HEAD")

    def _respond(self, method: str) -> None:
        parts = urlsplit(self.path)
        given = self.headers.get
        request = Request(method, unquote(parts.path), parts.query, given("authorization"), given("range"), parts.path)
        self._files.seen.append(request)
        response = self._files.find(request)
        fault = self._files.take_fault(response.file) if method == "GET" else None
        if fault is not None and fault.status:
            self._head(fault.status, {**dict(fault.headers), "Content-Length": "0"})
            return
        content, start = response.content, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", request.range or "")
        headers = dict(response.headers)
        status = response.status
        if response.file is not None and wanted and self._files.ranges:
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(status, {"Content-Length": str(len(content) - start), **headers})
        if method == "GET":
            self._send(response.file, content[start:], fault)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, name: str | None, content: bytes, fault: Fault | None) -> None:
        if fault is not None and fault.corrupt and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault is not None and fault.cut_after is not None:
            content = content[: fault.cut_after]
            self.close_connection = True
        step = len(content) or 1
        if self._files.bytes_per_s is not None:
            step = max(1, int(self._files.bytes_per_s / 20))
        for begin in range(0, len(content), step):
            piece = content[begin : begin + step]
            self._files.count(name, len(piece))  # before the client can have read it
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            if self._files.bytes_per_s is not None:
                time.sleep(len(piece) / self._files.bytes_per_s)
        if fault is not None and fault.silent:
            self._files.wait()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass
