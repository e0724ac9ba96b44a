"""A folder that many pods share: its lock, and the marker of a complete checkpoint.

The lock holds on every file system that creates files exclusively, and after a crash of its holder. `flock` does not
(docs/decisions/fetch.md). Each term of a holder is a file `1`, `2`, … that the holder creates (O_EXCL, atomic on NFS
since version 3) and rewrites every few seconds. A process that has seen the latest file unchanged for a whole lease, by
its own clock, creates the next one. No file is deleted, so no name is used twice, and no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmservice_server.fetch.source import FetchError

_MARKER = ".complete"
_LOCK = ".lock"
_RELEASED = "released"


@dataclass(frozen=True, slots=True)
class _Marker:
    """`uri` is None from the first change of a file until all files are there, and where there is no marker."""

    uri: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name. While `uri` is None also those of an earlier fetch, and those that are not there yet."""
    versions: dict[str, str] = field(default_factory=dict)
    """By name, of the files whose content is known to be that version."""


def completed(directory: Path, uri: str) -> list[str] | None:
    """The names of a checkpoint that was fetched from `uri` and whose files have their sizes. None if there is none."""
    marker = _read_marker(directory)
    try:
        whole = marker.uri == uri and all(
            (directory / name).stat().st_size == size for name, size in marker.files.items()
        )
    except (OSError, ValueError):
        return None
    return sorted(marker.files) if whole else None


class Contents:
    """The files that fetches have put into a folder, and their versions, as the marker records them. Thread-safe.

    From `begin` to `complete` the folder is complete for no URI: files of two versions never count as one checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._marker = _read_marker(directory)

    def version(self, name: str) -> str | None:
        """Which version the file is; None if that is not recorded."""
        return self._marker.versions.get(name)

    def begin(self, sizes: dict[str, int], versions: dict[str, str]) -> None:
        """A fetch of `sizes` is about to change the folder, which has those in `versions` already."""
        others = {name: version for name, version in self._marker.versions.items() if name not in sizes}
        self._write(_Marker(None, self._marker.files | sizes, others | versions))

    def add(self, name: str, version: str) -> None:
        """The file is complete."""
        with self._lock:
            self._write(_Marker(None, self._marker.files, self._marker.versions | {name: version}))

    def left_over(self, names: list[str]) -> list[str]:
        """What earlier fetches have put there besides `names`."""
        return sorted(self._marker.files.keys() - names)

    def complete(self, uri: str, names: list[str]) -> None:
        """From now on `completed` returns `names`."""
        sizes = {name: (self._directory / name).stat().st_size for name in names}
        self._write(_Marker(uri, sizes, self._marker.versions))

    def _write(self, marker: _Marker) -> None:
        unfinished = self._directory / f"{_MARKER}.{os.getpid()}"
        with unfinished.open("w") as file:
            json.dump(asdict(marker), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._directory / _MARKER)
        self._marker = marker


def _read_marker(directory: Path) -> _Marker:
    try:
        marker = json.loads((directory / _MARKER).read_text())
        return _Marker(marker["uri"], dict(marker["files"]), dict(marker.get("versions", {})))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Marker()


@contextlib.contextmanager
def only_fetch(directory: Path) -> Iterator[None]:
    """Without `sole_writer`: raises FetchError where another process of this machine fetches into the folder."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise FetchError(also_fetched(directory)) from error
    except OSError:
        pass  # no flock on this file system: the download notices most of it
    try:
        yield
    finally:
        os.close(folder)


def also_fetched(directory: Path) -> str:
    return f"another process fetches into {directory} at the same time: give each of them --shared, or wait for it"


@contextlib.contextmanager
def sole_writer(
    directory: Path, lease_s: float, *, done: Callable[[], bool], waiting: Callable[[], None]
) -> Iterator[Callable[[], None] | None]:
    """Wait for the folder's lock. Yields the check that has to precede each write, or None once `done` holds."""
    (directory / _LOCK).mkdir(parents=True, exist_ok=True)
    lock = FolderLock(directory / _LOCK, lease_s)
    while not lock.try_acquire():
        if done():
            yield None
            return
        waiting()
        time.sleep(min(1.0, lease_s / 10))
    try:
        lock.start_heartbeat()
        yield None if done() else lock.check
    finally:
        lock.release()


class LockLostError(Exception):
    """Another process has the lock, because no heartbeat was written for a lease: stop writing."""


class FolderLock:
    """The lock of one process. `folder` must exist."""

    def __init__(self, folder: Path, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._clock = clock
        self._holder = secrets.token_hex(8)
        self._term = 0
        """0 while this process does not hold the lock."""
        self._num_heartbeats = 0
        self._last_heartbeat_s = 0.0
        self._seen: tuple[int, str, float] = (-1, "", 0.0)
        """The latest term, the content of its file, and since when it has that content."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free or its holder has written no heartbeat for a lease."""
        term, content = self._latest()
        if (term, content) != self._seen[:2]:
            self._seen = (term, content, self._clock())
        silent_s = self._clock() - self._seen[2]
        if term and content != _RELEASED and silent_s <= self._lease_s:
            return False
        try:
            os.close(os.open(self._folder / str(term + 1), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o664))
        except FileExistsError:
            return False
        self._term = term + 1
        if not self.heartbeat():
            self._term = 0
            return False
        return True

    def start_heartbeat(self) -> None:
        """Write heartbeats in a thread until the release."""
        self._thread = threading.Thread(target=self._run_heartbeat, name="lock heartbeat", daemon=True)
        self._thread.start()

    def heartbeat(self) -> bool:
        """Rewrite this term's file. False if a later term has begun."""
        if self._latest_term() > self._term:
            return False
        self._num_heartbeats += 1
        self._write(f"{self._holder} {self._num_heartbeats}")
        self._last_heartbeat_s = self._clock()
        return True

    def check(self) -> None:
        """Raises LockLostError if another process may have taken the lock."""
        if not self._term or self._clock() - self._last_heartbeat_s > self._lease_s * 0.8:
            raise LockLostError("another pod has the lock of the shared cache")

    def release(self) -> None:
        """Let the next process take the lock at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._term and self._latest_term() == self._term:
            with contextlib.suppress(OSError):  # then the lease ends later
                self._write(_RELEASED)
        self._term = 0

    def _run_heartbeat(self) -> None:
        while not self._stop.wait(self._lease_s / 6):
            with contextlib.suppress(OSError):  # `check` raises if it lasts
                if not self.heartbeat():
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
