"""How long a container that keeps ending has to wait: kubelet's exponential back-off, with time passed in."""

from __future__ import annotations

FIRST_S = 10.0
LONGEST_S = 300.0
FORGIVEN_AFTER_S = 600.0


class BackOff:
    """The first restart is immediate, then 10 s, 20 s … up to five minutes; ten good minutes wipe the slate."""

    def __init__(self, first_s: float = FIRST_S) -> None:
        self._first_s = first_s
        self._delay_s = 0.0

    def next_delay(self, ran_s: float) -> float:
        """The wait before the restart of a container that has just run for `ran_s` seconds."""
        if ran_s >= FORGIVEN_AFTER_S:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._delay_s = min(LONGEST_S, max(self._first_s, 2 * self._delay_s))
        return delay_s
