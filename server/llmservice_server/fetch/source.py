"""What a place that checkpoints are downloaded from can do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from llmservice_server.fetch.error import FetchError


@dataclass(frozen=True, slots=True)
class Digest:
    """A file's checksum as its source tells it, in hexadecimal."""

    algorithm: Literal["sha256", "git-sha1", "md5"]
    value: str

    def hasher(self, size: int) -> hashlib._Hash:
        """A fresh hash to feed with a file of `size` bytes; git hashes a header before the content."""
        if self.algorithm == "sha256":
            return hashlib.sha256()
        if self.algorithm == "md5":
            return hashlib.md5(usedforsecurity=False)
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a checkpoint."""

    name: str
    size: int
    url: str
    version: str
    """Another content has another version: what was downloaded of one is never continued with the other."""
    digest: Digest | None = None
    """None: the source tells no checksum, the size alone is compared."""


class Source(Protocol):
    """Where a checkpoint lies."""

    @property
    def where(self) -> str:
        """The source as messages name it."""

    def names(self) -> list[str]:
        """Every file that lies there, folders left out. Raises FetchError, RetryableError."""

    def describe(self, names: list[str]) -> list[RemoteFile]:
        """These files with their sizes and checksums. Raises FetchError, RetryableError."""

    def headers(self, file: RemoteFile, extra: Mapping[str, str]) -> dict[str, str]:
        """What a GET of `file` is sent with: `extra` and what proves who asks."""

    def refusal(self, status: int, name: str) -> FetchError:
        """Why the source does not give `name` away, and what to do about it."""
