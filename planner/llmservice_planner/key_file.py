"""A file of keys, which is read again when it has changed: for server, gateway and operator."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger("llmservice.keys")

T = TypeVar("T")


class KeyFileError(Exception):
    """The file cannot be used: one sentence for the user, without any key."""


class KeyFile(Generic[T]):
    """What `parse` finds in a file; it raises KeyFileError where that cannot be used.

    So does this class at start; later the error is logged, and the keys stay as they were.
    """

    def __init__(self, path: Path, what: str, parse: Callable[[str], tuple[T, ...]]) -> None:
        self._path = path
        self._what = what
        self._parse = parse
        self._seen = self._fingerprint()
        self._keys = self._read()

    @property
    def keys(self) -> tuple[T, ...]:
        fingerprint = self._fingerprint()
        if fingerprint != self._seen:
            self._seen = fingerprint
            try:
                self._keys = self._read()
            except KeyFileError as error:
                logger.error("%s; the keys stay as they were", error)  # noqa: TRY400  # the message is complete
            else:
                logger.info("%s reloaded: %d", self._what, len(self._keys))
        return self._keys

    def _read(self) -> tuple[T, ...]:
        try:
            return self._parse(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "not UTF-8")
            raise KeyFileError(f"the {self._what} in {self._path} cannot be read: {why}") from None
        except KeyFileError as error:
            raise KeyFileError(f"{self._path}: {error}") from None

    def _fingerprint(self) -> tuple[int, int, int] | None:
        """Changes with the content; a Secret's update swaps a link, hence the inode."""
        try:
            status = os.stat(self._path)  # noqa: PTH116  # follows links, as Path.stat does, and costs a third
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
