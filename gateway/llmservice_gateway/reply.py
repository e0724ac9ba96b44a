"""The response to one client: from a pod, or an error of the gateway, also in the middle of a stream."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from llmservice_gateway.openai_error import GatewayError

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Any], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream"


class BrokenAnswerError(Exception):
    """The response cannot be completed: its connection must be closed, so that it does not look whole."""


class Reply:
    """At most one response, sent through ASGI's `send`."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.status: int | None = None
        """None: nothing has been sent."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Those of the gateway itself, which go with every response."""
        self.ended = False
        self.is_event_stream = False

    async def start(self, status: int, headers: RawHeaders) -> None:
        own = {name for name, _ in self.headers}
        passed = [(name, value) for name, value in headers if name.lower() not in own]
        self.is_event_stream = any(
            name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in passed
        )
        if self.is_event_stream:  # an error may follow, and comments are left out
            passed = [one for one in passed if one[0].lower() != b"content-length"]
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": passed + self.headers})

    async def keep_waiting(self) -> None:
        """Show a client of a stream that its request is being held: from now on the status is 200."""
        if self.status is None:
            await self.start(200, [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache")])
        await self.write(b": waiting for a replica to become ready\n\n")

    async def refuse(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Answer with a pod's error: where a stream has begun, as its last event."""
        if self.status is None:
            await self.start(status, headers)
            await self.end(body)
        else:
            await self.end(error_event(_one_line(body)))

    async def write(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        self.ended = True
        await self.send({"type": "http.response.body", "body": piece, "more_body": False})

    async def fail(self, error: GatewayError) -> None:
        """Answer with `error`: where a stream has begun, as its last event.

        Raises:
            BrokenAnswerError: part of another response has been sent.
        """
        if self.status is None:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.body))]
            headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            await self.start(error.status, headers)
            await self.end(error.body)
        elif self.is_event_stream:
            await self.end(error_event(error.body))
        else:
            raise BrokenAnswerError(error.message)


def _one_line(body: bytes) -> bytes:
    """An error object as one line of JSON, whatever `body` is."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        error = None
    if not isinstance(error, dict) or "error" not in error:
        return GatewayError(502, "The replica refused the request without a reason.", "upstream_refused").body
    return json.dumps(error).encode()


def error_event(body: bytes) -> bytes:
    """The last events of a stream that failed; `body` is an error as one line of JSON."""
    return b"event: error\ndata: " + body + b"\n\n" + DONE
