"""A folder that many pods share: one of them downloads, the others wait and find it done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmservice_server.fetch.lock import FolderLock

_MARKER = ".complete"
_LOCK = ".lock"


def completed(directory: Path, uri: str) -> list[str] | None:
    """The names of a checkpoint that was fetched from `uri` and is still whole; None where there is none."""
    try:
        marker = json.loads((directory / _MARKER).read_text())
        files: dict[str, int] = marker["files"]
        whole = marker["uri"] == uri and all((directory / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sorted(files) if whole else None


def mark_completed(directory: Path, uri: str, names: list[str]) -> None:
    """From now on nobody needs to ask the source again."""
    files = {name: (directory / name).stat().st_size for name in names}
    unfinished = directory / f"{_MARKER}.{os.getpid()}"
    with unfinished.open("w") as file:
        json.dump({"uri": uri, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / _MARKER)


@contextmanager
def sole_writer(
    directory: Path,
    lease_s: float,
    *,
    done: Callable[[], bool],
    waiting: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Callable[[], None] | None]:
    """Wait for the folder's lock; gives what its holder asks before each write, or None once others have `done` it."""
    (directory / _LOCK).mkdir(parents=True, exist_ok=True)
    lock = FolderLock(directory / _LOCK, lease_s)
    while not lock.try_acquire():
        if done():
            yield None
            return
        waiting()
        sleep(min(1.0, lease_s / 10))
    try:
        lock.start_heart()
        yield None if done() else lock.check
    finally:
        lock.release()
