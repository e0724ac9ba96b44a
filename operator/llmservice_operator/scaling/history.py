"""What the scaler remembers: wishes, changes of the replicas, what a replica was measured to finish. Time is given.

It is monotonic: a clock that is set makes nothing older.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LONGEST_GAP_S = 120.0
"""Ticks are seconds apart, a failed pass at most two minutes. A longer gap is a process that stood still: time in
which nobody looked at the load proves nothing about it."""


@dataclass(frozen=True, slots=True)
class History:
    """Wishes and changes of the recent past, oldest first, in seconds of one clock."""

    wishes: tuple[tuple[float, int], ...] = ()
    """(when, replicas) that the load asked for."""
    changes: tuple[tuple[float, int], ...] = ()
    """(when, how many more) replicas the Deployment was asked for than before."""
    drain: tuple[float, float] | None = None
    """(when, requests per second) that one full replica was last measured to finish."""
    seen: tuple[float, int] | None = None
    """(when, replicas) of the last tick."""

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
            return replace(self, seen=(now, replicas))
        then, before = self.seen
        history = self if 0 <= now - then <= LONGEST_GAP_S else self.shifted(now - then)
        more = replicas - before
        changes = (*history.changes, (now, more)) if more else history.changes
        return replace(history, changes=changes, seen=(now, replicas))

    def remember(self, now: float, wanted: int, keep_s: float) -> History:
        """End a tick: keep its wish, and forget what is older than `keep_s`."""
        wishes = tuple(wish for wish in self.wishes if wish[0] >= now - keep_s)
        changes = tuple(change for change in self.changes if change[0] >= now - keep_s)
        return replace(self, wishes=(*wishes, (now, wanted)), changes=changes)

    def forget_capacity(self) -> History:
        """The replicas are other ones now: a changed spec may have changed what each can do."""
        return replace(self, drain=None)

    def measured(self, now: float, drain_per_s: float | None) -> History:
        return self if drain_per_s is None else replace(self, drain=(now, drain_per_s))

    def shifted(self, by_s: float) -> History:
        """The same history on a clock that is ahead by `by_s`."""
        return replace(
            self,
            wishes=tuple((when + by_s, wanted) for when, wanted in self.wishes),
            changes=tuple((when + by_s, more) for when, more in self.changes),
            drain=None if self.drain is None else (self.drain[0] + by_s, self.drain[1]),
        )
