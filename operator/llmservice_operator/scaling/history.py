"""What the scaler remembers: wishes, changes of the replicas, what a replica was measured to finish. Time is given, and
monotonic: a clock that is set makes nothing older."""

from __future__ import annotations

from dataclasses import dataclass, replace

LONGEST_GAP_S = 120.0
"""Ticks are seconds apart, a failed pass at most two minutes. A longer gap is a process that stood still, or a source
of metrics that was down: time in which the load was not measured proves nothing about it."""
CAPACITY_KEEP_S = 3600.0
"""How long a measured capacity counts. It is measured only while a replica is full: forgotten sooner, a service that
just fits would be shrunk, overloaded and measured again in turn; kept for ever, it would outlive the traffic it was of.
"""
_CAPACITY_WEIGHT = 0.1
"""Of one reading against what is known: one pod that stalls, or loads its kernels, for a moment is no new capacity."""


@dataclass(frozen=True, slots=True)
class History:
    """Wishes and changes of the recent past, oldest first, in seconds of one clock."""

    wishes: tuple[tuple[float, int], ...] = ()
    """(when, replicas) that the load asked for."""
    changes: tuple[tuple[float, int], ...] = ()
    """(when, how many more) replicas the Deployment was asked for than before."""
    drain: tuple[float, float] | None = None
    """(when, requests per second) that one full replica finishes, over the readings so far."""
    shown: tuple[float, float] | None = None
    """(when, requests per second) of the most that one replica finished of late, full or not."""
    seen: tuple[float, int] | None = None
    """(when, replicas) of the last tick."""
    measured_s: float | None = None
    """When the load was last measured, or else the first tick."""
    unmeasured_s: float | None = None
    """The end of the last time without metrics that was longer than a gap between ticks."""

    @classmethod
    def start(
        cls, now: float, replicas: int, since_s: float | None = None, changes: tuple[tuple[float, int], ...] = ()
    ) -> History:
        """Of a scaler that begins: what there is was wished for until `since_s`, or until now where nobody knows."""
        return cls(((now if since_s is None else since_s, replicas),), changes)

    @property
    def last_change_s(self) -> float | None:
        return self.changes[-1][0] if self.changes else None

    @property
    def last_up_s(self) -> float | None:
        return max((when for when, more in self.changes if more > 0), default=None)

    def observe(self, now: float, replicas: int) -> History:
        """Begin a tick: take note of changed replicas, and don't count time that nobody watched."""
        if self.seen is None:
            return replace(self, seen=(now, replicas), measured_s=now)
        then, before = self.seen
        history = self if 0 <= now - then <= LONGEST_GAP_S else self.shifted(now - then)
        more = replicas - before
        changes = (*history.changes, (now, more)) if more else history.changes
        return replace(history, changes=changes, seen=(now, replicas))

    def measure(self, now: float, capacity_per_s: float | None, finished_per_s: float | None = None) -> History:
        """Take note that there are metrics, and what they tell of a replica's capacity.

        `capacity_per_s` is a reading of full replicas, and moves what is known by a tenth of the difference.
        `finished_per_s` is what a replica, full or not, did finish: the capacity is no lower.
        """
        gap_s = 0.0 if self.measured_s is None else now - self.measured_s
        unmeasured_s = now if gap_s > LONGEST_GAP_S else self.unmeasured_s
        history = replace(self, measured_s=now, unmeasured_s=unmeasured_s)
        shown = self.shown if self.shown is not None and now - self.shown[0] <= CAPACITY_KEEP_S else None
        if finished_per_s is not None and (shown is None or finished_per_s >= shown[1]):
            shown = (now, finished_per_s)
        known = self.capacity_per_s(now)
        if capacity_per_s is not None:
            if known is None and shown is not None:
                known = max(shown[1], capacity_per_s)
            smooth = capacity_per_s if known is None else known + _CAPACITY_WEIGHT * (capacity_per_s - known)
            return replace(history, shown=shown, drain=(now, smooth))
        if known is not None and finished_per_s is not None and finished_per_s > known:
            return replace(history, shown=shown, drain=(now, finished_per_s))
        return replace(history, shown=shown)

    def capacity_per_s(self, now: float) -> float | None:
        """Requests per second that one full replica finishes; None where that is not known, or no longer."""
        return self.drain[1] if self.drain is not None and now - self.drain[0] <= CAPACITY_KEEP_S else None

    def wishes_within(self, window_s: float, now: float) -> list[int]:
        return [wanted for when, wanted in self.wishes if when > now - window_s]

    def remember(self, now: float, wanted: int | None, keep_s: float) -> History:
        """End a tick: keep its wish, where the load was measured, and forget what is older than `keep_s`."""
        wishes = tuple(wish for wish in self.wishes if wish[0] >= now - keep_s)
        changes = tuple(change for change in self.changes if change[0] >= now - keep_s)
        return replace(self, wishes=wishes if wanted is None else (*wishes, (now, wanted)), changes=changes)

    def forget_capacity(self) -> History:
        """The replicas are other ones now: a changed spec may have changed what each can do."""
        return replace(self, drain=None, shown=None)

    def shifted(self, by_s: float) -> History:
        """The same history on a clock that is ahead by `by_s`."""

        def later(when: float | None) -> float | None:
            return None if when is None else when + by_s

        def rate_later(rate: tuple[float, float] | None) -> tuple[float, float] | None:
            return None if rate is None else (rate[0] + by_s, rate[1])

        return replace(
            self,
            wishes=tuple((when + by_s, wanted) for when, wanted in self.wishes),
            changes=tuple((when + by_s, more) for when, more in self.changes),
            drain=rate_later(self.drain),
            shown=rate_later(self.shown),
            measured_s=later(self.measured_s),
            unmeasured_s=later(self.unmeasured_s),
        )
