"""How long to wait after a failure: not at all after the first in a while, then ever longer, up to a bound."""

from __future__ import annotations

import random

FIRST_S, LONGEST_S = 0.5, 10.0
FORGOTTEN_S = 30.0
"""A failure so long after the one before is a first one."""


class Backoff:
    """The pauses of one who tries again for ever."""

    def __init__(self) -> None:
        self._failed_s = -float("inf")
        self._pause_s = 0.0

    def failed(self, now_s: float) -> float:
        """Seconds to wait after a failure now; jittered, since others failed at the same moment."""
        first = now_s - self._failed_s > FORGOTTEN_S
        self._failed_s = now_s
        self._pause_s = 0.0 if first else min(max(FIRST_S, 2 * self._pause_s), LONGEST_S)
        return self._pause_s * random.uniform(0.75, 1.0)  # noqa: S311 - no secret
