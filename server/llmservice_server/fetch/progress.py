"""The progress of a download: counted, logged, and served at /progress for the operator."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Phase = Literal["listing", "waiting", "downloading", "done"]
"""waiting: another pod downloads into the same cache."""

_RATE_WINDOW_S = 15.0
_LOG_INTERVAL_S = 10.0
_REQUEST_TIMEOUT_S = 5.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes and seconds at one moment."""

    phase: Phase
    total_bytes: int
    done_bytes: int
    bytes_per_s: float

    @property
    def percent(self) -> int:
        return self.done_bytes * 100 // self.total_bytes if self.total_bytes else 0

    @property
    def eta_s(self) -> float | None:
        """None while no byte arrives."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s else None

    def __str__(self) -> str:
        if self.phase == "waiting":
            return "waiting for another pod that fetches the model into the same cache"
        eta = "" if self.eta_s is None else f", {self.eta_s:.0f} s left"
        return (
            f"{self.done_bytes / _GIB:.2f} of {self.total_bytes / _GIB:.2f} GiB ({self.percent} %),"
            f" {self.bytes_per_s / (1 << 20):.1f} MiB/s{eta}"
        )


class Progress:
    """Counts the bytes of each file. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase: Phase = "listing"
        self._total = 0
        self._done: dict[str, int] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def enter(self, phase: Phase) -> None:
        self._phase = phase

    def begin(self, present: dict[str, int], total_bytes: int) -> None:
        """Enter the phase `downloading`. The bytes of each file in `present` do not count for the rate."""
        with self._lock:
            self._phase, self._total, self._done = "downloading", total_bytes, dict(present)
            self._samples = deque([(self._clock(), sum(present.values()))])

    def at(self, name: str, num_bytes: int) -> None:
        """Set the bytes of a file: fewer than before if its download was restarted."""
        with self._lock:
            self._done[name] = num_bytes

    def snapshot(self) -> Snapshot:
        with self._lock:
            now, done = self._clock(), sum(self._done.values())
            self._samples.append((now, done))
            while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_WINDOW_S:
                self._samples.popleft()
            since, before = self._samples[0]
            rate = max(0.0, (done - before) / (now - since)) if now > since else 0.0
            return Snapshot(self._phase, self._total, done, rate)


@contextmanager
def log_progress(progress: Progress, log: Callable[[str], None]) -> Iterator[None]:
    """Log the progress every 10 seconds while it changes."""
    end = threading.Event()

    def run() -> None:
        logged = ""
        while not end.wait(_LOG_INTERVAL_S):
            snapshot = progress.snapshot()
            if snapshot.phase in {"downloading", "waiting"} and str(snapshot) != logged:
                logged = str(snapshot)
                log(logged)

    thread = threading.Thread(target=run, name="progress log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def serve_progress(progress: Progress, host: str, port: int) -> Iterator[int]:
    """Serve GET /progress on `host:port` (0: a free port); yields the port. Raises OSError.

    The operator reads it: an init container has no token to write to the Kubernetes API.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path != "/progress":
                self.send_error(404)
                return
            seen = progress.snapshot()
            body = json.dumps(
                {
                    "phase": seen.phase,
                    "total_bytes": seen.total_bytes,
                    "done_bytes": seen.done_bytes,
                    "bytes_per_s": round(seen.bytes_per_s),
                    "eta_s": None if seen.eta_s is None else round(seen.eta_s),
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """The operator polls: no access log."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    with Server((host, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="progress server", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
