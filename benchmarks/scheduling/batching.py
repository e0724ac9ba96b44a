"""Static, dynamic and continuous batching on the same requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmservice_bench.rate_search import RateSearch
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.findings import AT_ONCE, Findings, Setup
from scheduling.load import Arrival, Run

CONTINUOUS, DYNAMIC, STATIC = "continuous", "dynamic", "static"
THROUGHPUT_TARGETS = {STATIC: 4, DYNAMIC: 3}
MOST, MANY, FEW = 2 / 3, 1 / 3, 1 / 100
"""Of the rate at which continuous batching serves requests that are all there at once: where searches begin."""
ALONE = 60
STRICT, RELAXED = 5, 25
"""Promises, as times the p99 TTFT of requests that have the engine to themselves."""
WINDOW = 0.1
"""Of the promise: how long static and dynamic batching may wait for company."""
UNBOUNDED = 1000
"""Times where a search begins: whoever keeps a promise up to there has so few requests that none is late."""
REQUESTS = 100
"""Of each run of a search."""
LOAD = 0.8
"""Of continuous batching's capacity."""


def measure(setup: Setup) -> Findings:
    """Each strategy's capacity at equal p99 TTFT, then everybody's waits near that of continuous batching."""
    findings = Findings()
    continuous = setup.engine(scheduler=CONTINUOUS, prefix_caching=False)
    alone_s = ttft_alone_s(setup, continuous)
    flooded = Run(continuous, setup.arrivals(AT_ONCE)).complete()
    findings.add_row("continuous, all at once", flooded)
    contest = Contest(setup, continuous, STRICT * alone_s)
    capacity = contest.capacities(flooded.requests_per_s, FEW, findings)
    _add_ratios(capacity, STRICT, findings)
    contest.near_capacity(LOAD * capacity[CONTINUOUS].requests_per_s, findings)
    relaxed = Contest(setup, continuous, RELAXED * alone_s).capacities(flooded.requests_per_s, MANY, findings)
    _add_ratios(relaxed, RELAXED, findings)
    return findings


def _add_ratios(capacity: dict[str, Report], times: int, findings: Findings) -> None:
    """The looser the promise, the less the strategy matters."""
    for name, target in THROUGHPUT_TARGETS.items():
        what = f"output tokens/s at equal p99 TTFT, {times} times that of one alone, continuous ÷ {name}"
        findings.add_check(what, f">= {target}", _ratio(capacity, name))


def _ratio(capacity: dict[str, Report], name: str) -> float:
    return capacity[CONTINUOUS].output_tokens_per_s / capacity[name].output_tokens_per_s


def ttft_alone_s(setup: Setup, engine: Engine) -> float:
    """p99, of requests that come when nobody else is there."""
    alone = [Run(engine, [arrival]).complete().ttft_s.p50 for arrival in setup.arrivals(AT_ONCE)[:ALONE]]
    return float(np.percentile(alone, 99))


class Contest:
    """The three strategies under one promise, a bound on p99 TTFT."""

    def __init__(self, setup: Setup, continuous: Engine, promise_s: float) -> None:
        self._setup = setup
        self._promise_s = promise_s
        others = {name: setup.engine(scheduler=name, max_batch_wait_s=promise_s * WINDOW) for name in (DYNAMIC, STATIC)}
        self._engines = {CONTINUOUS: continuous} | others

    def capacities(self, at_once: float, others: float, findings: Findings) -> dict[str, Report]:
        """By strategy. `at_once` is continuous batching's rate without a promise, `others` the part of it where the
        search begins for the others: a wrong guess only takes longer.
        """
        capacity = {}
        for name, engine in self._engines.items():
            guess = at_once * (MOST if name == CONTINUOUS else others)
            capacity[name] = highest_rate(self._setup, engine, self._promise_s, guess)
            findings.add_row(f"{name}, capacity at p99 TTFT <= {self._promise_s * 1000:.0f} ms", capacity[name])
        return capacity

    def near_capacity(self, rate: float, findings: Findings) -> None:
        """Everybody's waits at `rate`."""
        waits: dict[str, float] = {}
        for name, engine in self._engines.items():
            run = Run(engine, self._setup.arrivals(rate))
            report = run.complete()
            waste = run.waste.of_padding
            findings.add_row(f"{name}, at {LOAD:.0%} of continuous' capacity", report, padding_waste=waste)
            waits[name] = report.ttft_s.p99
        what = f"p99 TTFT at {LOAD:.0%} of continuous' capacity, static ÷ continuous"
        findings.add_check(what, ">= 20", waits[STATIC] / waits[CONTINUOUS])


def highest_rate(setup: Setup, engine: Engine, ttft_bound_s: float, start: float) -> Report:
    """The run with the highest rate found whose p99 TTFT keeps the bound.

    Who keeps it at no rate is credited with a twentieth of `start` all the same, or there would be no ratio.
    """
    search, best = RateSearch(start, tolerance=0.25, floor=start / 20), None
    while (rate := search.next_rate) is not None and rate < UNBOUNDED * start:
        report = _kept(engine, setup.arrivals(rate)[:REQUESTS], ttft_bound_s)
        search = search.told(rate, report is not None)
        best = report or best
    return best or Run(engine, setup.arrivals(search.floor)[:REQUESTS]).complete()


def _kept(engine: Engine, arrivals: Sequence[Arrival], ttft_bound_s: float) -> Report | None:
    """What keeps the bound, each request as the better of two runs serves it; None where that does not.

    A machine that stalls now and then seldom stalls the same request twice, and says nothing about the rate; slow
    rates, whose runs take longest, would suffer most.
    """
    complete: list[Run] = []
    for _ in range(2):
        run = Run(engine, arrivals, ttft_bound_s)
        if run.run() is None:
            continue
        complete.append(run)
        served = zip(*(run.records.values() for run in complete), strict=True)
        report = Report.of(min(records, key=lambda record: record.ttft_s) for records in served)
        if report.ttft_s.p99 <= ttft_bound_s:
            return report
    return None
