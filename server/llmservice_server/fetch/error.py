"""What ends a fetch."""

from __future__ import annotations


class FetchError(Exception):
    """The checkpoint cannot be had: one sentence with what to do."""


class RetryableError(Exception):
    """It may work in a moment; `retry_after_s` is the server's own wish, where it has one."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
