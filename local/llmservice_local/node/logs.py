"""Container logs: their paths, and reading the tail, the whole, or the log as it grows."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from llmservice_local.objects import Object

CHUNK_BYTES = 64 * 1024
POLL_S = 0.1
MESSAGE_BYTES = 2048
MESSAGE_LINES = 80


class PodLogs:
    """The logs of one pod's containers: one file per run, named by its restart count."""

    def __init__(self, root: Path, pod: Object) -> None:
        metadata = pod["metadata"]
        self.folder = root / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"

    def path(self, container: str, restart: int) -> Path:
        folder = self.folder / container
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{restart}.log"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def tail(path: Path, lines: int) -> int:
    """The offset in bytes at which the last `lines` lines of a file begin."""
    size = path.stat().st_size
    if lines <= 0:
        return size
    with path.open("rb") as log:
        end, found = size, 0
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            log.seek(start)
            block = log.read(end - start)
            at = len(block) - 1 if end == size and block.endswith(b"\n") else len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                found += 1
                if found == lines:
                    return start + at + 1
            end = start
    return 0


def termination_message(path: Path) -> str:
    """The end of a log as `FallbackToLogsOnError` reports it: at most 80 lines and 2048 bytes."""
    if not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(tail(path, MESSAGE_LINES), path.stat().st_size - MESSAGE_BYTES))
        return log.read().decode(errors="replace")


async def read(path: Path, offset: int, limit: int | None, growing: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The chunks of a log from an offset, at most `limit` bytes; follows the log while `growing()` is true."""
    left = limit
    with path.open("rb") as log:
        log.seek(offset)
        while True:
            more = growing()
            while chunk := log.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
                if left is not None:
                    left -= len(chunk)
                yield chunk
            if not more or left == 0:
                return
            await asyncio.sleep(POLL_S)
