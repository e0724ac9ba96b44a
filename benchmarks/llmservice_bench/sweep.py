"""A sweep from low to high load, and the search for the highest request rate that meets the targets."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, variance
from typing import Any

from llmservice_bench.client import TargetError
from llmservice_bench.drive import Load
from llmservice_bench.record import LatencyTargets, RequestRecord
from llmservice_bench.report import Report
from llmservice_bench.trace import Lengths

GROWTH = 1.5
"""The factor to the next rate while no rate has missed the target."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The state of a bisection over request rates (per second).

    The caller measures `next_rate` and continues with `with_result`, until `next_rate` is None or its time is over. The
    result is `kept`, which is always below `broken`.
    """

    start: float
    """The first rate; it need not be accurate."""
    tolerance: float = 0.05
    """The search ends when `broken` exceeds `kept` by at most this share."""
    floor: float = 0.0
    """No rate below this one is tried, because its run would have too few requests."""
    kept: float = 0.0
    """The highest rate that met the target, or 0."""
    broken: float = float("inf")
    """The lowest rate that broke it."""

    def __post_init__(self) -> None:
        if not self.start > 0 or not self.tolerance > 0:
            raise ValueError(f"start and tolerance must be above 0, found {self.start} and {self.tolerance}")

    @property
    def next_rate(self) -> float | None:
        """The next rate to measure; None if the search has ended."""
        if self.broken == float("inf"):
            return self.kept * GROWTH or self.start
        if self.kept == 0:
            return self.broken / 2 if self.broken / 2 >= self.floor else None
        return None if self.is_settled else (self.kept + self.broken) / 2

    @property
    def is_settled(self) -> bool:
        """Whether the result is within the tolerance."""
        return 0 < self.broken - self.kept <= self.tolerance * self.kept

    def with_result(self, rate: float, kept: bool) -> RateSearch:
        """The state after a run at `rate`. If runs contradict each other, the worse result counts."""
        if not kept:
            return replace(self, broken=min(self.broken, rate), kept=self.kept if self.kept < rate else 0.0)
        return replace(self, kept=max(self.kept, rate)) if rate < self.broken else self


FEWEST_REQUESTS = 10
"""A run with fewer requests does not show whether a target is met, so no lower rate is tried."""

Measure = Callable[[Load, str], Awaitable[Sequence[RequestRecord]]]
"""Sends a load; the second argument is its name on the progress bar."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The runs of a sweep. Each sends requests for `seconds`, with the same arrivals and lengths, and other prompts."""

    lengths: Sequence[Lengths]
    seconds: float
    concurrencies: Sequence[int]
    """Concurrencies of the closed loops, which measure capacity and latency by batch size."""
    shares: Sequence[float]
    """Rates of the open loops, as shares of the closed loops' highest request rate."""
    targets: LatencyTargets | None = None
    """Without targets, no highest rate is searched and no goodput reported."""
    kept_share: float = 0.99
    """The share of requests that must meet the targets."""
    tolerance: float = 0.05
    limit_s: float = float("inf")
    """No run of the search starts after this time; those of the curve are always made."""
    seed: int = 0

    def load(self, run: int, *, concurrency: int | None = None, rate: float = float("inf")) -> Load:
        return Load(
            self.lengths, rate=rate, max_concurrency=concurrency, duration_s=self.seconds, seed=self.seed, run=run
        )


def is_sustained(records: Sequence[RequestRecord], seconds: float) -> bool:
    """Whether server and load generator keep up with a run of so many seconds: else requests wait longer and longer.

    At a rate a tenth too high, those of the second half wait for their first tokens, from when they were to be sent, by
    a twentieth of the run longer than those of the first. Less than two standard deviations is chance: of few requests,
    one long prompt makes such a difference.
    """
    completed = sorted((each for each in records if each.error is None), key=lambda each: each.started_s)
    if len(completed) < FEWEST_REQUESTS:
        return True
    half = len(completed) // 2
    waits_s = [each.late_s + each.ttft_s for each in completed]
    earlier, later = waits_s[:half], waits_s[half:]
    by_chance_s = 2 * math.sqrt(variance(earlier) / len(earlier) + variance(later) / len(later))
    return fmean(later) - fmean(earlier) < max(seconds / 20, by_chance_s)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the sweep; either a closed loop of `concurrency` or an open one of `rate` requests a second."""

    report: Report
    concurrency: int | None = None
    rate: float | None = None
    is_sustained: bool = True
    """False: a longer run at this rate would have longer latencies, whatever the targets are."""

    @property
    def name(self) -> str:
        return name_of(self.concurrency, self.rate)

    def row(self) -> dict[str, Any]:
        goodput = {} if self.report.goodput is None else {"goodput_share": self.report.goodput.share}
        late = {"late_p99_ms": self.report.late_s.p99 * 1000}
        about = {"load": self.name, "concurrency": self.concurrency, "rate": self.rate}
        return {**about, **self.report.row(), **goodput, **late, "sustained": self.is_sustained}


def name_of(concurrency: int | None, rate: float | None) -> str:
    return f"{concurrency} at once" if concurrency else f"{rate:.2f} req/s"


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The search's result: `requests_per_s` met the targets (0: none did), `broken_at` did not (None: all did)."""

    targets: str
    kept_share: float
    requests_per_s: float
    broken_at: float | None
    tolerance: float
    is_settled: bool
    """False if the time was over first, or no rate meets the targets."""
    runs: int

    def line(self) -> str:
        kept = f"{self.requests_per_s:.2f} req/s" if self.requests_per_s else "none that was tried"
        broken = f"; {self.broken_at:.2f} is too many" if self.broken_at else ""
        settled = "" if self.is_settled else " (not settled: the time was over)" if self.requests_per_s else ""
        return f"highest rate at which {100 * self.kept_share:g}% meet {self.targets} (ms): {kept}{broken}{settled}"


@dataclass(slots=True)
class Sweep:
    """A sweep; `points` are its runs in order."""

    plan: SweepPlan
    measure: Measure
    on_point: Callable[[Point], None] = lambda point: None
    clock: Callable[[], float] = time.monotonic
    points: list[Point] = field(default_factory=list)
    highest_rate: HighestRate | None = None

    async def run(self) -> None:
        """Run the curve, then the search if there are targets.

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
        if self.plan.targets is not None:
            self.highest_rate = await self._search(capacity, started_s + self.plan.limit_s)

    async def _add(self, *, concurrency: int | None = None, rate: float | None = None) -> Point:
        run = 1 + len(self.points)  # 0 is the warm-up
        load = self.plan.load(run, concurrency=concurrency, rate=rate or float("inf"))
        records = await self.measure(load, name_of(concurrency, rate))
        report = Report.of(records, self.plan.targets)
        sustained = rate is None or is_sustained(records, self.plan.seconds)
        self.points.append(Point(report, concurrency, rate, sustained))
        self.on_point(self.points[-1])
        return self.points[-1]

    async def _search(self, capacity: float, deadline_s: float) -> HighestRate:
        """Search for the highest rate, starting with the results of the curve's open loops."""
        search = RateSearch(capacity, self.plan.tolerance, floor=FEWEST_REQUESTS / self.plan.seconds)
        for point in self.points:
            if point.rate is not None:
                search = search.with_result(point.rate, self._kept(point))
        runs = 0
        while (rate := search.next_rate) is not None and self.clock() < deadline_s:
            search = search.with_result(rate, self._kept(await self._add(rate=rate)))
            runs += 1
        broken = None if search.broken == float("inf") else search.broken
        targets = (str(self.plan.targets), self.plan.kept_share)
        return HighestRate(*targets, search.kept, broken, self.plan.tolerance, search.is_settled, runs)

    def _kept(self, point: Point) -> bool:
        goodput = point.report.goodput
        return goodput is not None and goodput.share >= self.plan.kept_share and point.is_sustained

    def as_dict(self) -> dict[str, Any]:
        highest = {} if self.highest_rate is None else {"highest_rate": asdict(self.highest_rate)}
        return {"rows": [point.row() for point in self.points], **highest}
