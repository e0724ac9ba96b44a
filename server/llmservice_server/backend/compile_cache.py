"""The folder of compiled kernels that processes and pods share, and what this process compiled and loaded.

Entries are executed: only who may run code in a pod may write there (docs/security.md). A folder that cannot be written
costs time, never a start: kernels are then compiled as without one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger(__name__)
_CPU, _CUDA = "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"
"""The libraries' own variables, because child processes inherit them."""


@dataclass(slots=True)
class Compilations:
    """Kernels that this process compiled or loaded, and the seconds of compiling."""

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0

    def add(self, other: Compilations) -> None:
        self.compiled += other.compiled
        self.loaded += other.loaded
        self.seconds += other.seconds


COMPILATIONS = Compilations()
"""Of this process."""


def share(folder: Path) -> None:
    """Keep compiled kernels in `folder` from now on. To be called before kernels are imported."""
    os.environ[_CPU], os.environ[_CUDA] = str(folder / "numba"), str(folder / "triton")


def cpu_folder() -> Path | None:
    """Where kernels for CPUs are kept: the folder of `share`, or one of this user. None where there is no home."""
    if given := os.environ.get(_CPU):
        return Path(given)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return caches / "llmservice" / "numba"


@dataclass(slots=True)
class WarnOnce:
    """Logs the first of the errors of a cache: the others have the same cause."""

    log: Callable[..., None] = _LOG.warning
    warned: bool = False

    def __call__(self, error: str | OSError) -> None:
        if not self.warned:
            self.log("the cache of compiled kernels: %s; such kernels are compiled by this process", error)
        self.warned = True


warn_once = WarnOnce()
