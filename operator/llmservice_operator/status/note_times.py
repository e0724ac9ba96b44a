"""When figures that move by themselves may be noted in the status: live traffic and restarts must not write it."""

from __future__ import annotations

from dataclasses import dataclass

NOTED_EVERY_S = 15.0
"""Figures are noted no more often than this, however the traffic moves."""


@dataclass(frozen=True, slots=True)
class Noting:
    """What one pass may write of such figures."""

    due: bool = True
    """Whether it is time to note them anew."""
    whole: bool = True
    """Whether a whole window was watched: until then a figure that is missing is only not known yet."""
    resuming: bool = False
    """Whether this process has just begun beside a service whose status tells of the load: what stands there stays, as
    long as no replica is to be added or removed."""


AT_ONCE = Noting()
"""Nothing is in the way."""


@dataclass(slots=True)
class NoteTimes:
    """Of one service, in one process. Times are seconds of a monotonic clock."""

    began_s: float
    """When this process first looked at the service."""
    resumed: bool
    """Whether its status told of the load by then."""
    noted_s: float | None = None

    def noting(self, now: float, window_s: float) -> Noting:
        """What this pass may write; a window is as long as the signals look back."""
        watched_s = abs(now - self.began_s)
        if self.resumed and watched_s < NOTED_EVERY_S:
            return Noting(due=False, whole=False, resuming=True)
        due = self.noted_s is None or abs(now - self.noted_s) >= NOTED_EVERY_S
        self.noted_s = now if due else self.noted_s
        return Noting(due=due, whole=not self.resumed or watched_s >= window_s)
