"""uvicorn's HTTP parser with a bound on what a client may send before its body."""

from __future__ import annotations

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # request line and headers


class _HeadTooLargeError(Exception):
    """Raised inside the parser, which then refuses the request."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head beyond the bound, also to one that never ends, and closes the connection."""

    _head_is_open = True  # what comes next belongs to a request line or to headers
    _head_bytes = 0  # of the open head, in reads that held nothing else
    _request_ended = False  # within the current read
    _too_large = False

    def data_received(self, data: bytes) -> None:
        self._request_ended = False
        super().data_received(data)
        if self._head_is_open and not self._request_ended and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_is_open = self._request_ended = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "headers_too_large"}
        body = msgspec.json.encode({"error": error})
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()
