"""Pods that stream at a given pace and cost little, to measure what lies in front of them.

Each event is a chunk of its own, as a server sends it after a step; the pods' steps are spread over a period. Responses
begin at once, so that a client's TTFT is the time of what lies in between.

    python benchmarks/stream_pods.py NUM_PODS PERIOD_S      prints the ports as a line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from itertools import cycle

import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_TEXT = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "stub",
        "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
    }
).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_EVENT, _END = _chunk(b"data: %s\n\n" % _TEXT), _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A client's. `streams` are the connections of its pod with a response that goes on, and the events left of it."""

    def __init__(self, streams: dict[Connection, int]) -> None:
        self.streams = streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._received = b""

    def connection_lost(self, _error: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if len(body) < int(length.partition(b"\r\n")[0] or 0):
            return
        self._received = b""
        self.streams[self] = int(json.loads(body)["max_tokens"]) - 1
        self.transport.write(_HEAD + _EVENT)  # type: ignore[attr-defined]


def step(streams: dict[Connection, int]) -> None:
    """Send an event to each stream of a pod."""
    for connection, left in list(streams.items()):
        if left:
            streams[connection] = left - 1
            connection.transport.write(_EVENT)  # type: ignore[attr-defined]
        else:
            del streams[connection]
            connection.transport.write(_END)  # type: ignore[attr-defined]


async def serve(num_pods: int, period_s: float) -> None:
    loop = asyncio.get_running_loop()
    pods: list[dict[Connection, int]] = [{} for _ in range(num_pods)]
    servers = [await loop.create_server(partial(Connection, pod), "127.0.0.1", 0, backlog=1024) for pod in pods]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    next_s = loop.time()
    for pod in cycle(pods):
        next_s = max(next_s + period_s / num_pods, loop.time())
        await asyncio.sleep(next_s - loop.time())
        step(pod)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))
