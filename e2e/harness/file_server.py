"""An HTTP server of files on the loopback that can misbehave as networks and stores do."""

from __future__ import annotations

import re
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
    """What goes wrong with one answer: a status instead of the file, a cut after so many bytes, a flipped byte.

    With `silent` the connection stays open after the cut, as over a network that went away.
    """

    status: int = 0
    cut_after: int | None = None
    silent: bool = False
    corrupt: bool = False
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    query: str
    authorization: str | None
    range: str | None
    target: str = ""
    """The path as it was sent, percent-encoded."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`content` is a file's where ranges of it may be asked for."""

    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: str | None = None


class FileServer(ABC):
    """Subclasses say what is where. `faults[name]` are used up one answer each, from the first on."""

    def __init__(self) -> None:
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Asked] = []
        self.sent: dict[str, int] = defaultdict(int)
        """Bytes of each file that went out."""
        self.bytes_per_s: float | None = None
        self.ranges = True
        """Whether parts of files are given away."""
        self.url = ""
        self._lock = threading.Lock()
        self._over = threading.Event()

    @abstractmethod
    def find(self, asked: Asked) -> Reply:
        """The file that is meant, or the refusal."""

    @contextmanager
    def serving(self) -> Iterator[Self]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.files = self  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self._over.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def wait(self) -> None:
        """Until the server is to end, which it must not have to wait for."""
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
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        given = self.headers.get
        asked = Asked(method, unquote(parts.path), parts.query, given("authorization"), given("range"), parts.path)
        self._files.seen.append(asked)
        reply = self._files.find(asked)
        fault = self._files.take_fault(reply.file) if method == "GET" else None
        if fault is not None and fault.status:
            self._head(fault.status, {**dict(fault.headers), "Content-Length": "0"})
            return
        content, start = reply.content, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", asked.range or "")
        headers = dict(reply.headers)
        status = reply.status
        if reply.file is not None and wanted and self._files.ranges:
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(status, {"Content-Length": str(len(content) - start), **headers})
        if method == "GET":
            self._send(reply.file, content[start:], fault)

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
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            self._files.count(name, len(piece))
            if self._files.bytes_per_s is not None:
                time.sleep(len(piece) / self._files.bytes_per_s)
        if fault is not None and fault.silent:
            self._files.wait()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass
