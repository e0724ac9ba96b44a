"""The highest rate that a strategy sustains under a promise, a bound on p99 TTFT."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmservice_bench.rate_search import RateSearch
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.findings import Setup
from scheduling.load import Arrival, Run

SUSTAINED = 10
"""Promises that a searched run lasts: at a rate a tenth too high, who comes last then waits longer than promised.

Turnovers, where these are longer: within the first nobody waits, whatever the rate, for places are still empty.
"""
FEWEST = 100
"""Requests of a searched run: fewer have no p99."""
FLOOR = 1 / 20
"""Of where a search begins, which ends there. Who keeps the promise at no rate is credited with it all the same, or
there would be no ratio."""


def rate_search(start: float, tolerance: float) -> RateSearch:
    """From `start` on: a wrong guess only takes longer."""
    return RateSearch(start, tolerance, floor=start * FLOOR)


def num_requests(rate: float, promise_s: float, turnover_s: float) -> int:
    """Of a run at `rate` (requests per second) that is long enough to show whether the rate is sustained.

    `turnover_s` is the time in which as many requests are served as there are places.
    """
    return max(FEWEST, math.ceil(rate * SUSTAINED * max(promise_s, turnover_s)))


@dataclass(slots=True)
class CapacitySearch:
    """Goes on run by run, so that several may take turns on a machine that is slower now and then."""

    setup: Setup
    engine: Engine
    promise_s: float
    turnover_s: float
    search: RateSearch
    served: list[tuple[float, Report]] = field(default_factory=list)
    """Every rate whose run was not given up, and what it showed."""

    @property
    def is_over(self) -> bool:
        return self.search.next_rate is None

    def advance(self) -> None:
        """Try one rate more."""
        rate = self.search.next_rate
        if rate is None:
            return
        report = served(self.engine, self._arrivals(rate), self.promise_s)
        if report is not None:
            self.served.append((rate, report))
        self.search = self.search.told(rate, report is not None and report.ttft_s.p99 <= self.promise_s)

    def capacity(self) -> Report:
        """The run at the highest rate that kept the promise, when the search is over."""
        best = [report for rate, report in self.served if rate == self.search.kept]
        return best[-1] if best else Run(self.engine, self._arrivals(self.search.floor)).complete()

    def _arrivals(self, rate: float) -> list[Arrival]:
        return self.setup.arrivals(rate, num_requests(rate, self.promise_s, self.turnover_s))


def search_by_turns(searches: Iterable[CapacitySearch]) -> None:
    """A run of each, then the next of each, until all are over: what is slow for a while is so for all of them."""
    going = list(searches)
    while going := [search for search in going if not search.is_over]:
        for search in going:
            search.advance()


def served(engine: Engine, arrivals: Sequence[Arrival], promise_s: float) -> Report | None:
    """Each request as the better of two runs serves it, or as one does that keeps the promise; None where both are
    given up.

    A machine that stalls now and then seldom stalls the same request twice, and says nothing about the rate; slow
    rates, whose runs take longest, would suffer most.
    """
    complete: list[Run] = []
    report = None
    for _ in range(2):
        run = Run(engine, arrivals, promise_s)
        if run.run() is None:
            continue
        complete.append(run)
        records = zip(*(run.records.values() for run in complete), strict=True)
        report = Report.of(min(twice, key=lambda record: record.ttft_s) for twice in records)
        if report.ttft_s.p99 <= promise_s:
            break
    return report
