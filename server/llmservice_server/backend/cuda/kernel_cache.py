"""Triton's cache of compiled kernels (TRITON_CACHE_DIR), in a folder that many processes and pods share.

Triton names entries by its own version, the kernel's sources, what they are specialised to, and the GPU's capability,
and replaces files at once. Added here: a checksum beside each file, so that a damaged one is compiled again, and a
folder of this user's where the shared one cannot be written.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from llmservice_server.backend.compile_cache import COMPILATIONS, warn_once

_CHECKSUM = ".sha256"
_MICROSECONDS = 1e6


class KernelCacheManager(FileCacheManager):  # type: ignore[misc]
    """The files of one kernel."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._is_shared = not (override or dump)
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._leave_shared(error)

    def has_file(self, filename: str) -> bool:
        return bool(super().has_file(filename)) and _is_intact(Path(self._make_path(filename)))

    def get_group(self, filename: str) -> dict[str, str] | None:
        """None, so that all files are made again, where one is missing or damaged."""
        group: dict[str, str] | None = super().get_group(filename)
        if group is None or not all(_is_intact(Path(path)) for path in group.values()):
            return None
        return group

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        try:
            return self._put(data, filename)
        except OSError as error:
            self._leave_shared(error)
            return self._put(data, filename)

    def _put(self, data: Any, filename: str) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        path: str = super().put(content, filename)
        super().put(hashlib.sha256(content).hexdigest(), filename + _CHECKSUM, binary=False)
        return path

    def _leave_shared(self, error: OSError) -> None:
        """Use this user's folder from now on. Raises `error` again if that is the one that failed."""
        folder = os.path.join(knobs.cache.get_triton_dir("cache"), self.key)  # noqa: PTH118 - as Triton's attribute is
        if not self._is_shared or folder == getattr(self, "cache_dir", None):
            raise error
        warn_once(error)
        self.cache_dir, self.lock_path = folder, os.path.join(folder, "lock")  # noqa: PTH118 - likewise
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - likewise


def _is_intact(path: Path) -> bool:
    try:
        stored = path.with_name(path.name + _CHECKSUM).read_text()
        intact = hashlib.sha256(path.read_bytes()).hexdigest() == stored
    except FileNotFoundError:  # not there, or written by a Triton without checksums
        return False
    except OSError as error:
        warn_once(error)
        return False
    if not intact:
        warn_once(f"{path} is damaged and will be replaced")
    return intact


def _count(*, times: Any, cache_hit: bool, **_: Any) -> None:
    if cache_hit:
        COMPILATIONS.loaded += 1
        return
    COMPILATIONS.compiled += 1
    COMPILATIONS.seconds += times.total / _MICROSECONDS


def install() -> None:
    """For the kernels that Triton compiles or loads from now on in this process."""
    knobs.cache.manager_class = KernelCacheManager
    knobs.compilation.listener = _count
