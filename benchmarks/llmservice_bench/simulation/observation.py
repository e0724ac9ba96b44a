"""What an autoscaling policy sees of a simulated service, and what it answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.load import Held, Scrape
from llmservice_operator.scaling.supply import Replica


@dataclass(slots=True)
class Totals:
    """Counters since the beginning, over all replicas and the gateway; policies take differences."""

    time_s: float = 0.0
    arrived: int = 0
    arrived_prompt_tokens: int = 0
    finished: int = 0
    finished_output_tokens: int = 0
    in_flight: int = 0
    """Requests that have arrived and not ended, those that are held included."""
    in_flight_s: float = 0.0
    """Their integral over time, in request-seconds."""

    def arrive(self, prompt_tokens: int, now: float) -> None:
        self._advance(now)
        self.arrived += 1
        self.arrived_prompt_tokens += prompt_tokens
        self.in_flight += 1

    def finish(self, output_tokens: int) -> None:
        self.finished += 1
        self.finished_output_tokens += output_tokens

    def leave(self, now: float) -> None:
        self._advance(now)
        self.in_flight -= 1

    def at(self, now: float) -> Totals:
        """A copy as of now."""
        self._advance(now)
        return replace(self)

    def _advance(self, now: float) -> None:
        self.in_flight_s += self.in_flight * (now - self.time_s)
        self.time_s = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One tick."""

    now_s: float
    replicas: int
    """That the Deployment is set to."""
    pods: Sequence[Replica]
    """Those that are there, with those that are starting and terminating."""
    scrapes: Mapping[str, Scrape]
    """Of the pods that serve, by uid."""
    held: Held
    """Requests that wait in the gateway because no replica is ready."""
    totals: Totals

    @property
    def ready(self) -> int:
        return len(self.scrapes)

    @property
    def in_flight(self) -> float:
        """Requests that run, wait at replicas or are held."""
        return sum(each.running + each.waiting for each in self.scrapes.values()) + self.held.requests


@dataclass(frozen=True, slots=True)
class Bounds:
    """The user's."""

    min_replicas: int
    max_replicas: int

    def of(self, replicas: int) -> int:
        return min(max(replicas, self.min_replicas), self.max_replicas)


class Policy(Protocol):
    """Decides the number of replicas, every `interval_s` seconds."""

    @property
    def name(self) -> str: ...
    @property
    def interval_s(self) -> float: ...
    @property
    def jitter(self) -> float:
        """The interval varies by this share of it."""

    @property
    def wakes(self) -> bool:
        """Whether it also decides when a replica is created, becomes ready or is gone."""

    def decide(self, seen: Observation) -> Decision:
        """Within the user's bounds, with reasons."""
