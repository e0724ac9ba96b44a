"""Trying again what may work in a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llmservice_server.fetch.error import FetchError, RetryableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter; a server's Retry-After is heeded up to `longest_s`."""

    attempts: int = 7
    first_s: float = 0.5
    longest_s: float = 60.0

    def delay_s(self, failures: int, retry_after_s: float | None) -> float:
        """How long to wait after the `failures`th failure in a row, counted from 1."""
        wait_s = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        return min(self.longest_s, max(wait_s, retry_after_s or 0.0))


def retried(work: Callable[[], T], policy: RetryPolicy, where: str) -> T:
    """What `work` gives in the end. Raises FetchError once the attempts are used up."""
    failures = 0
    while True:
        try:
            return work()
        except RetryableError as error:
            failures += 1
            if failures >= policy.attempts:
                raise FetchError(f"{where}: {error} ({failures} attempts): check network and proxy") from error
            time.sleep(policy.delay_s(failures, error.retry_after_s))
