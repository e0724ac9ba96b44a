"""A record of a container's last start for the next one: how large its KV cache was, and whether it was killed.

A process that is killed for memory cannot report it. The record lies on a volume that outlives the container, and says
"running" until the process ends by itself; a start that still finds that value takes a smaller KV cache.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger(__name__)
_SHRINK = 0.75
"""Of the KV cache that the killed process had."""


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One file of JSON. A record that can't be read or written is none: it must not keep the server from starting."""

    path: Path | None

    def begin(self, pool_bytes: int, least_bytes: int) -> int:
        """The bytes that the KV cache may take: all of `pool_bytes`, unless a start before was killed with as many.

        Never less than `least_bytes`, which one request of the full length needs.
        """
        if self.path is None:
            return pool_bytes
        bound, was_running = self._read()
        if was_running and bound is not None:
            bound = int(bound * _SHRINK)
        if bound is not None and bound < pool_bytes:
            smaller = max(bound, min(least_bytes, pool_bytes))
            _LOG.warning(
                "the KV cache is %d MiB instead of %d: this container was killed before, for memory as it seems",
                smaller >> 20,
                pool_bytes >> 20,
            )
            pool_bytes = smaller
        self._write(pool_bytes, running=True)
        return pool_bytes

    def end(self) -> None:
        """The process ends by itself, in whatever way."""
        if self.path is not None and (bound := self._read()[0]) is not None:
            self._write(bound, running=False)

    def _read(self) -> tuple[int | None, bool]:
        assert self.path is not None  # noqa: S101 - both callers have checked
        try:
            found = json.loads(self.path.read_text())
            return int(found["kv_cache_bytes"]), bool(found["running"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, False

    def _write(self, kv_cache_bytes: int, *, running: bool) -> None:
        assert self.path is not None  # noqa: S101 - both callers have checked
        try:
            self.path.write_text(json.dumps({"kv_cache_bytes": kv_cache_bytes, "running": running}))
        except OSError as error:
            _LOG.warning("%s can't be written, a kill for memory would be forgotten: %s", self.path, error)
