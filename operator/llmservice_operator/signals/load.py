"""What the pods of one service are doing, from the scrapes of a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmservice_operator.monitoring.histogram import increase, quantile
from llmservice_operator.signals.scrape import Scrape

Histories = Mapping[str, Sequence[Scrape]]
"""Scrapes of the window by pod name, oldest first; no entry, or an empty one, for a pod that could not be read."""


@dataclass(frozen=True, slots=True)
class PodLoad:
    """One ready pod, now."""

    name: str
    running: float
    waiting: float
    kv_usage: float

    @property
    def in_flight(self) -> float:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Load:
    """The signals of one service. Rates and quantiles are over the window, None where it holds too little."""

    source: str
    pods: tuple[PodLoad, ...]
    missing: tuple[str, ...] = ()
    """Ready pods whose metrics could not be read."""
    arrivals_per_s: float | None = None
    drain_per_s: float | None = None
    """Requests that one replica finishes while it is kept full: measured on pods that had a queue all through."""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_count: float = 0.0
    peak_in_flight: float = 0.0
    """The most that any one pod held at any scrape of the window."""
    kv_blocks: int | None = None
    """Usable KV blocks of the smallest pod, as it measured them after loading."""
    weights_bytes: float | None = None

    @property
    def running(self) -> float:
        return sum(pod.running for pod in self.pods)

    @property
    def waiting(self) -> float:
        return sum(pod.waiting for pod in self.pods)


def load_of(histories: Histories, ready_pods: Iterable[str], source: str) -> Load | None:
    """The service's load; None where there is not a single pod to speak for it."""
    wanted = sorted(ready_pods)
    read = {name: list(histories[name]) for name in wanted if histories.get(name)}
    if not read:
        return None
    buckets = _ttft_increase(read.values())
    return Load(
        source=source,
        pods=tuple(_now(name, scrapes[-1]) for name, scrapes in read.items()),
        missing=tuple(name for name in wanted if name not in read),
        arrivals_per_s=_total(_arrivals(scrapes) for scrapes in read.values()),
        drain_per_s=_mean(_drain(scrapes) for scrapes in read.values()),
        ttft_p50_s=quantile(0.5, buckets),
        ttft_p99_s=quantile(0.99, buckets),
        ttft_count=max(buckets.values(), default=0.0),
        peak_in_flight=max(scrape.running + scrape.waiting for scrapes in read.values() for scrape in scrapes),
        kv_blocks=min((blocks for one in read.values() if (blocks := one[-1].kv_blocks)), default=None),
        weights_bytes=next((weight for one in read.values() if (weight := one[-1].weights_bytes)), None),
    )


def _now(name: str, scrape: Scrape) -> PodLoad:
    return PodLoad(name, scrape.running, scrape.waiting, scrape.kv_usage)


def _arrivals(scrapes: Sequence[Scrape]) -> float | None:
    """Requests per second that came to a pod: those that left, those refused, and those that it holds more than before.

    Completions alone would hide an overload, which caps them.
    """
    elapsed_s = scrapes[-1].time_s - scrapes[0].time_s
    if elapsed_s <= 0:
        return None
    left = increase([scrape.finished for scrape in scrapes]) + increase([scrape.rejected for scrape in scrapes])
    held = (scrapes[-1].running + scrapes[-1].waiting) - (scrapes[0].running + scrapes[0].waiting)
    return max(0.0, left + held) / elapsed_s


def _drain(scrapes: Sequence[Scrape]) -> float | None:
    """Requests per second of a pod that always had one waiting: its capacity, not the load's."""
    elapsed_s = scrapes[-1].time_s - scrapes[0].time_s
    if elapsed_s <= 0 or any(scrape.waiting < 1 for scrape in scrapes):
        return None
    return increase([scrape.finished for scrape in scrapes]) / elapsed_s or None


def _ttft_increase(histories: Iterable[Sequence[Scrape]]) -> dict[float, float]:
    total: dict[float, float] = defaultdict(float)
    for scrapes in histories:
        moved = [scrapes[0], *(after for before, after in pairwise(scrapes) if _moved(before, after))]
        counts = [dict(scrape.ttft_buckets) for scrape in moved]
        for bound in counts[-1]:
            total[bound] += increase([count.get(bound, 0.0) for count in counts])
    return dict(total)


def _moved(before: Scrape, after: Scrape) -> bool:
    """Whether a request was answered in between; most pods of a large cluster are idle."""
    return before.ttft_buckets is not after.ttft_buckets


def _total(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _mean(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None
