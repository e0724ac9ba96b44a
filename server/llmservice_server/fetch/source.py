"""What the download needs of a place that holds a checkpoint, its errors, and when a request is repeated."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)


class FetchError(Exception):
    """The checkpoint cannot be fetched. The message is one sentence that states what to do."""


class CorruptError(Exception):
    """The received bytes are not those that the source announced."""


class RetryableError(Exception):
    """A request that may succeed later.

    `retry_after_s` is the server's Retry-After. After a request that received new bytes (`progressed`) the attempts are
    counted from 1 again.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.progressed = False


def retrying(attempts: int, longest_wait_s: float, stop: threading.Event | None = None) -> Retrying:
    """Repeat a call that raises RetryableError: exponential backoff with jitter, and at least the Retry-After.

    The last error is raised after `attempts` calls in a row without a new byte, and as soon as `stop` is set.
    """
    stop = stop or threading.Event()
    backoff = wait_random_exponential(max=longest_wait_s)

    def error_of(state: RetryCallState) -> RetryableError:
        error = state.outcome.exception() if state.outcome else None
        assert isinstance(error, RetryableError)  # noqa: S101 - no other error is repeated
        return error

    def restart_count(state: RetryCallState) -> None:
        if error_of(state).progressed:
            state.attempt_number = 1

    def wait_s(state: RetryCallState) -> float:
        return min(longest_wait_s, max(backoff(state), error_of(state).retry_after_s or 0.0))

    return Retrying(
        retry=retry_if_exception_type(RetryableError),
        after=restart_count,
        wait=wait_s,
        stop=stop_after_attempt(attempts) | stop_when_event_set(stop),
        sleep=sleep_using_event(stop),
        reraise=True,
    )


@dataclass(frozen=True, slots=True)
class Digest:
    """A file's checksum as its source states it, in hexadecimal."""

    algorithm: Literal["sha256", "git-sha1", "md5"]
    value: str

    def hasher(self, size: int) -> hashlib._Hash:
        """A new hash object for a file of `size` bytes. Git hashes a header before the content."""
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
    version: str
    """Changes with the content: a partial download of one version is never continued with another."""
    digest: Digest | None = None
    """None: the source states no checksum, and only the size is compared."""


class Source(Protocol):
    """A place that holds a checkpoint. Every method raises FetchError or RetryableError."""

    @property
    def where(self) -> str:
        """The source's URI, for messages."""

    def names(self) -> list[str]:
        """Every file there."""

    def describe(self, names: list[str]) -> list[RemoteFile]:
        """The sizes and checksums of these files, which `names` has returned before."""

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The file's content from byte `start`, or from 0 where the server does not support ranges; and which of both.

        Raises CorruptError where the server's range is another one.
        """


def header_value(text: str, where: str) -> str:
    """A token or key without the white space around it: a Secret made with `echo` ends in a newline. Raises FetchError.

    `where` it is from, for the message, which never has the value.
    """
    value = text.strip()
    if not (value.isascii() and value.isprintable()):
        raise FetchError(f"{where} has characters that are not printable ASCII: write it without others")
    return value


def is_transient(status: int) -> bool:
    """Whether a request that was answered with this HTTP status may succeed later."""
    return status in {408, 425, 429} or status >= 500


def first_byte(content_range: str | None, start: int) -> int:
    """Where the content of a response to a request for the bytes from `start` begins. Raises CorruptError."""
    if not content_range:
        return 0
    first = content_range.removeprefix("bytes ").partition("-")[0]
    if first != str(start):
        raise CorruptError(f"bytes from {start} were requested and bytes from {first or 'nowhere'} received")
    return start
