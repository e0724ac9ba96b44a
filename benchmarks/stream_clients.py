"""Many streaming clients in one process with little overhead, to measure the server.

They use plain sockets and a selector; events are counted, not parsed. Each client sends its next request after a
response, on the same connection. The figures include the CPU usage of this process: below 1, the clients are not the
bottleneck.

    python benchmarks/stream_clients.py HOST:PORT[,HOST:PORT…] MODEL NUM_STREAMS SECONDS [TOKENS]

prints a line of JSON
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

from llmservice_bench.report import Distribution

WARM_UP_S = 2.0
MEAN_TOKENS = 128  # of a response; half to one and a half of it, so that requests do not end at the same time
_EVENT, _DONE = b"data: {", b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"  # a proxy may send it by itself
_READ_BYTES = 65536


@dataclass(slots=True)
class Figures:
    """The measurements between the warm-up and the end."""

    events: int = 0
    tokens: int = 0  # of completed requests
    events_of_ended: int = 0
    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # 0 for events received together


class Stream:
    """One client."""

    def __init__(self, address: tuple[str, int], model: str, number: int, mean_tokens: int) -> None:
        self._dice = random.Random(number)  # noqa: S311 - traffic, not secrets
        self._model = model
        self._mean_tokens = mean_tokens
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._started_s = self._last_s = 0.0
        self._events = self._max_tokens = 0

    def send(self) -> None:
        self._max_tokens = self._dice.randint(self._mean_tokens // 2, self._mean_tokens * 3 // 2)
        words = " ".join(self._dice.choices(("the", "rain", "of", "tokens", "falls", "on", "plains"), k=24))
        body = json.dumps(
            {
                "model": self._model,
                "prompt": words,
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        self._events, self._started_s = 0, time.perf_counter()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d"
        self.socket.sendall(head % len(body) + b"\r\n\r\n" + body)

    def receive(self, figures: Figures | None) -> None:
        """Read available data; `figures` is None during warm-up. Raises ConnectionError if the stream ends early."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a stream: its log says why")
        now = time.perf_counter()
        events = data.count(_EVENT)
        if events and figures is not None:
            figures.events += events
            if self._events:
                figures.itl_s.append(now - self._last_s)
            else:
                figures.ttft_s.append(now - self._started_s)
            figures.itl_s += [0.0] * (events - 1)
        if events:
            self._last_s = now
            self._events += events
        if _DONE in data:
            if figures is not None:
                figures.requests += 1
                figures.tokens += self._max_tokens
                figures.events_of_ended += self._events
            self.send()
        elif not events and b"HTTP/1.1 200" not in data and data != _LAST_CHUNK:
            raise ConnectionError(f"the server answered {data[:200]!r}")


def run(
    addresses: list[tuple[str, int]], model: str, num_streams: int, seconds: float, mean_tokens: int = MEAN_TOKENS
) -> dict[str, object]:
    """The figures of `seconds` under full load, after a warm-up; the streams are spread over the addresses."""
    selector = selectors.DefaultSelector()
    for number in range(num_streams):
        stream = Stream(addresses[number % len(addresses)], model, number, mean_tokens)
        selector.register(stream.socket, selectors.EVENT_READ, stream)
        stream.send()
    _receive(selector, time.perf_counter() + WARM_UP_S, None)
    figures = Figures()
    print("measuring", flush=True)
    started_s, busy_s = time.perf_counter(), time.process_time()
    _receive(selector, started_s + seconds, figures)
    took_s, busy_s = time.perf_counter() - started_s, time.process_time() - busy_s
    ttft, itl = Distribution.of(figures.ttft_s), Distribution.of(figures.itl_s)
    return {
        "output_tokens_per_s": figures.events / took_s * figures.tokens / max(1, figures.events_of_ended),
        "events_per_token": figures.events_of_ended / max(1, figures.tokens),
        "requests_per_s": figures.requests / took_s,
        "ttft_p50_ms": ttft.p50 * 1000,
        "ttft_p99_ms": ttft.p99 * 1000,
        "itl_p50_ms": itl.p50 * 1000,
        "itl_p99_ms": itl.p99 * 1000,
        "clients_busy": busy_s / took_s,
    }


def _receive(selector: selectors.BaseSelector, until_s: float, figures: Figures | None) -> None:
    while time.perf_counter() < until_s:
        for key, _ in selector.select(timeout=0.1):
            key.data.receive(figures)


if __name__ == "__main__":
    parts = [each.rpartition(":") for each in sys.argv[1].split(",")]
    figures = run(
        [(host, int(port)) for host, _, port in parts],
        sys.argv[2],
        int(sys.argv[3]),
        float(sys.argv[4]),
        *map(int, sys.argv[5:6]),
    )
    print(json.dumps(figures))
