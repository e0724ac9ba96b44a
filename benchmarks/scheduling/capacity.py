"""The highest rate that a strategy sustains within a latency target, a bound on p99 TTFT."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmservice_bench.report import Report
from llmservice_bench.sweep import RateSearch
from llmservice_server.engine.engine import Engine
from scheduling.findings import Setup
from scheduling.load import Arrival, Run

SUSTAINED = 10
"""Duration of a run, in latency targets or in turnovers if these are longer.

At a rate 10 % too high, the last requests of such a run wait longer than the target; during the first turnover none
waits, as the batch is not full.
"""
FEWEST = 100
"""Minimum number of requests of a run, for a p99."""
FLOOR = 1 / 20
"""Lowest rate as a share of the first one; it is the result if no rate meets the target, so that a ratio exists."""


def rate_search(start: float, tolerance: float) -> RateSearch:
    """A search that starts at `start`; a wrong guess only takes longer."""
    return RateSearch(start, tolerance, floor=start * FLOOR)


def num_requests(rate: float, target_s: float, turnover_s: float) -> int:
    """The number of requests of a run at `rate` (per second) that shows whether the rate is sustained.

    `turnover_s` is the time to serve as many requests as the batch has places.
    """
    return max(FEWEST, math.ceil(rate * SUSTAINED * max(target_s, turnover_s)))


@dataclass(slots=True)
class CapacitySearch:
    """The search for one strategy's capacity, run by run, so that several searches can alternate."""

    setup: Setup
    engine: Engine
    target_s: float
    turnover_s: float
    search: RateSearch
    served: list[tuple[float, Report]] = field(default_factory=list)
    """The reports by rate, without stopped runs."""

    @property
    def is_over(self) -> bool:
        return self.search.next_rate is None

    def advance(self) -> None:
        """Measure the next rate."""
        rate = self.search.next_rate
        if rate is None:
            return
        report = served(self.engine, self._arrivals(rate), self.target_s)
        if report is not None:
            self.served.append((rate, report))
        self.search = self.search.with_result(rate, report is not None and report.ttft_s.p99 <= self.target_s)

    def capacity(self) -> Report:
        """The report of the highest rate that met the target, after the search has ended."""
        best = [report for rate, report in self.served if rate == self.search.kept]
        return best[-1] if best else Run(self.engine, self._arrivals(self.search.floor)).complete()

    def _arrivals(self, rate: float) -> list[Arrival]:
        return self.setup.arrivals(rate, num_requests(rate, self.target_s, self.turnover_s))


def search_by_turns(searches: Iterable[CapacitySearch]) -> None:
    """Complete several searches alternately, so that temporary slowness of the machine affects all of them."""
    going = list(searches)
    while going := [search for search in going if not search.is_over]:
        for search in going:
            search.advance()


def served(engine: Engine, arrivals: Sequence[Arrival], target_s: float) -> Report | None:
    """The better of two results of each request, or one run that meets the target; None if both runs are stopped.

    A stall of the machine rarely affects the same request twice; low rates, whose runs are long, would suffer most.
    """
    complete: list[Run] = []
    report = None
    for _ in range(2):
        run = Run(engine, arrivals, target_s)
        if run.run() is None:
            continue
        complete.append(run)
        records = zip(*(run.records.values() for run in complete), strict=True)
        report = Report.of(min(twice, key=lambda record: record.ttft_s) for twice in records)
        if report.ttft_s.p99 <= target_s:
            break
    return report
