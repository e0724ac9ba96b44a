"""How far a download has come: for its log, and for whoever asks over HTTP."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["listing", "waiting", "downloading", "done"]
"""waiting: another pod downloads into the same cache."""

_RATE_WINDOW_S = 15.0
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
        """None while nothing moves."""
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
    """Counts bytes by file, from any thread."""

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
        """Downloading begins; `present` says how much of which file is there already, which counts as no speed."""
        with self._lock:
            self._phase, self._total, self._done = "downloading", total_bytes, dict(present)
            self._samples = deque([(self._clock(), sum(present.values()))])

    def at(self, name: str, num_bytes: int) -> None:
        """`num_bytes` of a file are here now; fewer than before where it had to begin anew."""
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


class ProgressLog:
    """Says now and then in the log how far it is: a context manager around the work."""

    def __init__(self, progress: Progress, say: Callable[[str], None], every_s: float = 10.0) -> None:
        self._progress, self._say, self._every_s = progress, say, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        said = ""
        while not self._over.wait(self._every_s):
            snapshot = self._progress.snapshot()
            if snapshot.phase in {"downloading", "waiting"} and str(snapshot) != said:
                said = str(snapshot)
                self._say(said)
