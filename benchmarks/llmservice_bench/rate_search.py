"""The highest request rate that keeps a promise, by halving what is not known yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

GROWTH = 1.5
"""How much more is tried next while every rate was borne."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """What is known so far, and which rate (requests per second) to try next.

    Whoever measures says what became of it (`told`), until `next_rate` is None or its time is over; the answer is then
    `kept`, always below `broken`.
    """

    start: float
    """Tried first: a guess that need not be good."""
    tolerance: float = 0.05
    """The search ends where `broken` is no more than this share above `kept`."""
    floor: float = 0.0
    """No rate below this one is tried: at that pace a run has too few requests to say anything."""
    kept: float = 0.0
    """Highest rate seen to keep the promise; 0 where none was."""
    broken: float = float("inf")
    """Lowest rate seen to break it."""

    def __post_init__(self) -> None:
        if not self.start > 0 or not self.tolerance > 0:
            raise ValueError(f"start and tolerance must be above 0, found {self.start} and {self.tolerance}")

    @property
    def next_rate(self) -> float | None:
        """None when nothing is left to try."""
        if self.broken == float("inf"):
            return self.kept * GROWTH or self.start
        if self.kept == 0:
            return self.broken / 2 if self.broken / 2 >= self.floor else None
        return None if self.is_settled else (self.kept + self.broken) / 2

    @property
    def is_settled(self) -> bool:
        """Is the answer known as exactly as was asked for?"""
        return 0 < self.broken - self.kept <= self.tolerance * self.kept

    def told(self, rate: float, kept: bool) -> RateSearch:
        """What is known after a run at `rate`. Where runs contradict each other, the worse one is believed."""
        if not kept:
            return replace(self, broken=min(self.broken, rate), kept=self.kept if self.kept < rate else 0.0)
        return replace(self, kept=max(self.kept, rate)) if rate < self.broken else self
