"""uvicorn's HTTP/1.1 parser with bounds: on a request's head, and on the time that a client may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and headers."""


class _HeadTooLargeError(Exception):
    """Raised inside the parser, which then refuses the request."""


class _Parser(HttpRequestParser):
    """Ends at the head of a request that asks for another protocol, whose body it would take for the next request.

    Java's client asks for h2c with every request, and a server may ignore that (RFC 9110, section 7.8).
    """

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn, which answers pipelined requests
        self._protocol = protocol

    @property
    def asks_for_upgrade(self) -> bool:
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # asyncio has nothing else
        parser = self
        while True:  # no recursion: a read may hold thousands of such requests
            try:
                HttpRequestParser.feed_data(parser, data)
                return
            except HttpParserUpgrade as upgrade:
                if not parser.asks_for_upgrade:
                    raise
                data = self._protocol.head_without_upgrade() + data[upgrade.args[0] :]
            parser = self._protocol.parser = _Parser(self._protocol)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses heads that are too large (431), incomplete for too long (408) or no HTTP (400), and closes the connection
    after that.

    A client that reads nothing of what it is sent for `client_timeout_s` is disconnected. Until then at most the
    transport's buffer is kept for it: an application that awaits `send` produces no more. A head with both
    Content-Length and Transfer-Encoding, or with two lengths, is refused by the parser (RFC 9112, section 6.3).
    """

    client_timeout_s: ClassVar[float] = 60.0
    parser: _Parser

    _head_is_open = True  # what comes next belongs to a request line or to headers
    _head_has_begun = False
    _head_bytes = 0  # of the open head, in reads that held nothing else
    _request_ended = False  # within the current read
    _too_large = False
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    @classmethod
    def with_timeout(cls, client_timeout_s: float) -> type[BoundedHttpProtocol]:
        """The protocol with another time for clients."""
        return type(cls.__name__, (cls,), {"client_timeout_s": client_timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._request_ended = False
        idle_timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if idle_timer is not None:  # uvicorn stops it at any bytes, also at those of a body that was refused before
            if self._head_has_begun or self._is_answering():
                idle_timer.cancel()
            else:
                self.timeout_keep_alive_task = idle_timer
        if self._head_is_open and not self._request_ended and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_large_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_has_begun = True
        if self._head_timer is None:
            self._await_head()

    def head_without_upgrade(self) -> bytes:
        """The head that was read, without what asks for another protocol."""
        fields = (name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))

    def on_headers_complete(self) -> None:
        if self.parser.asks_for_upgrade:
            return
        self._head_is_open = self._head_has_begun = False
        self._stop_head_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.asks_for_upgrade:
            return
        super().on_message_complete()
        self._head_is_open = self._request_ended = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse_large_head()
        else:
            self._refuse("400 Bad Request", "the request is not valid HTTP/1.1", "invalid_http")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():  # the rest of what is buffered has to be read too
            self._stop_read_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.client_timeout_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self._is_answering():  # the head of a pipelined request: what is being answered goes first
            self._await_head()
        elif self._head_has_begun:
            message = f"the request line and headers were not complete within {self.client_timeout_s:g} s"
            self._refuse("408 Request Timeout", message, "request_timeout")
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _await_reader(self) -> None:
        if self._read_timer is None:
            unread = self.transport.get_write_buffer_size()
            self._read_timer = self.loop.call_later(self.client_timeout_s, self._on_read_timeout, unread)

    def _on_read_timeout(self, unread_before: int) -> None:
        self._read_timer = None
        if self.transport.get_write_buffer_size() < unread_before:
            self._await_reader()
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete  # it is None before the first request

    def _refuse_large_head(self) -> None:
        message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
        self._refuse("431 Request Header Fields Too Large", message, "headers_too_large")

    def _refuse(self, status: str, message: str, code: str) -> None:
        if self._is_answering() and (self.pipeline or self.cycle.response_started):
            self.transport.abort()  # what is written now would be read as a part of the answer in progress
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self.transport.close()
        self._await_reader()
