"""How throughput and latency go together, from an idle server to a flooded one, and the most that keeps promises."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmservice_bench.client import TargetError
from llmservice_bench.drive import Load
from llmservice_bench.goodput import Promises
from llmservice_bench.lengths import Lengths
from llmservice_bench.rate_search import RateSearch
from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report

FEWEST_REQUESTS = 10
"""A run of fewer says nothing about a promise, so no lower rate is tried."""

Measure = Callable[[Load, str], Awaitable[Sequence[RequestRecord]]]
"""Sends a load, which has that name on a progress bar."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Every run sends requests for `seconds` and waits for the last answer; equal seeds send equal requests."""

    lengths: Sequence[Lengths]
    seconds: float
    concurrencies: Sequence[int]
    """Closed loops: what the server can deliver, and how latency grows with the batch."""
    shares: Sequence[float]
    """Open loops at these shares of the most requests a second that the closed loops saw: how waits explode."""
    promises: Promises | None = None
    """Without them no highest rate is searched, and no goodput told."""
    kept_share: float = 0.99
    """A rate keeps the promises when so many of its requests did."""
    tolerance: float = 0.05
    limit_s: float = float("inf")
    """No run of the search begins after so long; those of the curve are always made."""
    seed: int = 0

    def load(self, *, concurrency: int | None = None, rate: float = float("inf")) -> Load:
        return Load(self.lengths, rate=rate, max_concurrency=concurrency, duration_s=self.seconds, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the sweep; either a closed loop of `concurrency` or an open one of `rate` requests a second."""

    report: Report
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return name_of(self.concurrency, self.rate)

    def row(self) -> dict[str, Any]:
        promised = {} if self.report.goodput is None else {"goodput_share": self.report.goodput.share}
        late = {"late_p99_ms": self.report.late_s.p99 * 1000}
        about = {"load": self.name, "concurrency": self.concurrency, "rate": self.rate}
        return {**about, **self.report.row(), **promised, **late}


def name_of(concurrency: int | None, rate: float | None) -> str:
    return f"{concurrency} at once" if concurrency else f"{rate:.2f} req/s"


@dataclass(frozen=True, slots=True)
class HighestRate:
    """What the search found: `requests_per_s` kept the promises (0: none did), `broken_at` did not (None: all did)."""

    promises: str
    kept_share: float
    requests_per_s: float
    broken_at: float | None
    tolerance: float
    is_settled: bool
    """False where the time was over first, or no rate keeps the promises."""
    runs: int

    def line(self) -> str:
        kept = f"{self.requests_per_s:.2f} req/s" if self.requests_per_s else "none that was tried"
        broken = f"; {self.broken_at:.2f} is too many" if self.broken_at else ""
        settled = "" if self.is_settled else " (not settled: more time would tell more)" if self.requests_per_s else ""
        return f"highest rate at which {self.kept_share:.0%} keep {self.promises} (ms): {kept}{broken}{settled}"


@dataclass(slots=True)
class Sweep:
    """The runs in the order in which they were made."""

    plan: SweepPlan
    measure: Measure
    on_point: Callable[[Point], None] = lambda point: None
    clock: Callable[[], float] = time.monotonic
    points: list[Point] = field(default_factory=list)
    highest_rate: HighestRate | None = None

    async def run(self) -> None:
        """The curve, then the search where something is promised.

        Raises:
            TargetError: no request of the closed loops completed.
        """
        started_s = self.clock()
        for concurrency in self.plan.concurrencies:
            await self._add(concurrency=concurrency)
        capacity = max(point.report.requests_per_s for point in self.points)
        if not capacity:
            raise TargetError(f"no request completed: {self.points[-1].report.failures or 'none was sent'}")
        for share in self.plan.shares:
            await self._add(rate=share * capacity)
        if self.plan.promises is not None:
            self.highest_rate = await self._search(capacity, started_s + self.plan.limit_s)

    async def _add(self, *, concurrency: int | None = None, rate: float | None = None) -> Point:
        load = self.plan.load(concurrency=concurrency, rate=rate or float("inf"))
        report = Report.of(await self.measure(load, name_of(concurrency, rate)), self.plan.promises)
        self.points.append(Point(report, concurrency, rate))
        self.on_point(self.points[-1])
        return self.points[-1]

    async def _search(self, capacity: float, deadline_s: float) -> HighestRate:
        """Begin with what the curve's open loops told."""
        search = RateSearch(capacity, self.plan.tolerance, floor=FEWEST_REQUESTS / self.plan.seconds)
        for point in self.points:
            if point.rate is not None:
                search = search.told(point.rate, self._kept(point))
        runs = 0
        while (rate := search.next_rate) is not None and self.clock() < deadline_s:
            search = search.told(rate, self._kept(await self._add(rate=rate)))
            runs += 1
        broken = None if search.broken == float("inf") else search.broken
        promised = (str(self.plan.promises), self.plan.kept_share)
        return HighestRate(*promised, search.kept, broken, self.plan.tolerance, search.is_settled, runs)

    def _kept(self, point: Point) -> bool:
        goodput = point.report.goodput
        return goodput is not None and goodput.share >= self.plan.kept_share

    def as_dict(self) -> dict[str, Any]:
        highest = {} if self.highest_rate is None else {"highest_rate": asdict(self.highest_rate)}
        return {"rows": [point.row() for point in self.points], **highest}
