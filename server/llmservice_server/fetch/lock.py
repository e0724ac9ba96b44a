"""A lock in a shared folder that outlives the crash of its holder, on any filesystem that creates files exclusively.

`flock` would be simpler, but does not hold on every network filesystem. Here each term of office is a file `1`, `2`, …
that its holder alone creates (O_EXCL, atomic on NFS since version 3) and then rewrites every few seconds. Whoever sees
that the latest file has not changed for a whole lease, by its own clock, creates the next. No file is ever deleted, so
no name comes back, and no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

RELEASED = "released"


class LockLostError(Exception):
    """Somebody else took over, because our heartbeat did not get through for a lease: stop writing."""


class FolderLock:
    """One contender. `folder` must exist."""

    def __init__(
        self, folder: Path, lease_s: float = 30.0, *, clock: Callable[[], float] = time.monotonic, holder: str = ""
    ) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._clock = clock
        self._holder = holder or secrets.token_hex(8)
        self._term = 0
        """Of our own; 0 while we do not hold the lock."""
        self._beats = 0
        self._last_beat_s = 0.0
        self._seen: tuple[int, str, float] = (-1, "", 0.0)
        """The latest term, what its file said, and since when it says that."""
        self._ending = threading.Event()
        self._heart: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Take the lock where it is free or its holder has been silent for a lease."""
        term, content = self._latest()
        if (term, content) != self._seen[:2]:
            self._seen = (term, content, self._clock())
        silent_s = self._clock() - self._seen[2]
        if term and content != RELEASED and silent_s <= self._lease_s:
            return False
        try:
            os.close(os.open(self._folder / str(term + 1), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o664))
        except FileExistsError:
            return False
        self._term = term + 1
        if not self.beat():
            self._term = 0
            return False
        return True

    def start_heart(self) -> None:
        """Beat in a thread from now on."""
        self._heart = threading.Thread(target=self._run_heart, name="lock heartbeat", daemon=True)
        self._heart.start()

    def beat(self) -> bool:
        """Show that we live; False where the term is over, because a later one has begun."""
        if self._latest_term() > self._term:
            return False
        self._beats += 1
        self._write(f"{self._holder} {self._beats}")
        self._last_beat_s = self._clock()
        return True

    def check(self) -> None:
        """Raises LockLostError where nobody could know any more that we hold the lock."""
        if not self._term or self._clock() - self._last_beat_s > self._lease_s * 0.8:
            raise LockLostError("the lock of the shared cache went to another pod")

    def release(self) -> None:
        """Let the next one in at once."""
        self._ending.set()
        if self._heart is not None:
            self._heart.join()
        if self._term and self._latest_term() == self._term:
            with contextlib.suppress(OSError):  # then the lease runs out instead
                self._write(RELEASED)
        self._term = 0

    def _run_heart(self) -> None:
        while not self._ending.wait(self._lease_s / 6):
            with contextlib.suppress(OSError):  # `check` notices where it lasts
                if not self.beat():
                    self._term = 0
                    return

    def _latest_term(self) -> int:
        return max((int(name) for name in os.listdir(self._folder) if name.isdecimal()), default=0)  # noqa: PTH208

    def _latest(self) -> tuple[int, str]:
        term = self._latest_term()
        return term, (self._folder / str(term)).read_text() if term else ""

    def _write(self, text: str) -> None:
        with (self._folder / str(self._term)).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
