"""Static, dynamic and continuous batching on the same requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.capacity import CapacitySearch, rate_search, search_by_turns
from scheduling.findings import AT_ONCE, CONTINUOUS, DYNAMIC, STATIC, Findings, Setup
from scheduling.load import Run
from scheduling.saturation import saturate

THROUGHPUT_TARGETS = {STATIC: 4, DYNAMIC: 3}
ALONE = 60
WINDOW = 0.1
"""Share of the latency target that static and dynamic batching may wait to fill a batch."""
LOAD = 0.8
"""Rate of the comparison of latencies, as a share of continuous batching's capacity."""


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    times: int
    """The bound on p99 TTFT as a multiple of that on an idle engine."""
    start: float
    """Start of the search for static and dynamic batching, as a share of their rate without a target."""
    tolerance: float
    """Tolerance of that search; the p99 of a hundred requests is not more accurate."""


STRICT = LatencyTarget(5, start=1 / 40, tolerance=0.6)
RELAXED = LatencyTarget(25, start=1.0, tolerance=0.1)
TOLERANCE = 0.1
"""Tolerance of the search for continuous batching's capacity, which starts at its rate without a target."""


def measure(setup: Setup) -> Findings:
    """Each strategy's rate without a target, its capacity at equal p99 TTFT, and its latency at one rate."""
    findings = Findings()
    continuous = setup.engine(scheduler=CONTINUOUS, prefix_caching=False)
    alone_s = ttft_alone_s(setup, continuous)
    contest = Contest(setup, continuous, STRICT, alone_s)
    at_once = {name: each.report.requests_per_s for name, each in saturate(setup, contest.engines, findings).items()}
    capacity = contest.capacities(at_once, findings)
    contest.near_capacity(LOAD * capacity[CONTINUOUS].requests_per_s, findings)
    Contest(setup, continuous, RELAXED, alone_s).capacities(at_once, findings)
    return findings


def ttft_alone_s(setup: Setup, engine: Engine) -> float:
    """The p99 TTFT of requests on an idle engine."""
    alone = [Run(engine, [arrival]).complete().ttft_s.p50 for arrival in setup.arrivals(AT_ONCE, ALONE)]
    return float(np.percentile(alone, 99))


class Contest:
    """The three strategies with one latency target, a bound on p99 TTFT."""

    def __init__(self, setup: Setup, continuous: Engine, target: LatencyTarget, alone_s: float) -> None:
        self._setup = setup
        self._target = target
        self._target_s = target.times * alone_s
        wait_s = self._target_s * WINDOW
        others = {name: setup.engine(scheduler=name, max_batch_wait_s=wait_s) for name in (DYNAMIC, STATIC)}
        self.engines = {CONTINUOUS: continuous} | others

    def capacities(self, at_once: Mapping[str, float], findings: Findings) -> dict[str, Report]:
        """The capacity of each strategy; `at_once` are their rates without a target."""
        turnover_s = self._setup.max_num_seqs / at_once[CONTINUOUS]
        searches = {}
        for name, engine in self.engines.items():
            start, tolerance = (self._target.start, self._target.tolerance) if name != CONTINUOUS else (1.0, TOLERANCE)
            rates = rate_search(at_once[name] * start, tolerance)
            searches[name] = CapacitySearch(self._setup, engine, self._target_s, turnover_s, rates)
        search_by_turns(searches.values())
        capacity = {name: search.capacity() for name, search in searches.items()}
        for name, search in searches.items():
            for rate, report in sorted(search.served, key=lambda served: served[0]):
                findings.add_row(name, report, rate=rate, target_ms=self._target_s * 1000)
        for name, report in capacity.items():
            findings.add_row(f"{name}, capacity at p99 TTFT <= {self._target_s * 1000:.0f} ms", report)
        self._add_ratios(capacity, findings)
        return capacity

    def near_capacity(self, rate: float, findings: Findings) -> None:
        """The latencies of every strategy at `rate`."""
        waits: dict[str, float] = {}
        for name, engine in self.engines.items():
            run = Run(engine, self._setup.arrivals(rate))
            report = run.complete()
            waste = run.waste.of_padding
            findings.add_row(f"{name}, at {LOAD:.0%} of continuous' capacity", report, padding_waste=waste)
            waits[name] = report.ttft_s.p99
        what = f"p99 TTFT at {LOAD:.0%} of continuous' capacity, static ÷ continuous"
        findings.add_check(what, ">= 20", waits[STATIC] / waits[CONTINUOUS])

    def _add_ratios(self, capacity: Mapping[str, Report], findings: Findings) -> None:
        """The effect of a relaxed target, with which the strategies differ less."""
        for name, target in THROUGHPUT_TARGETS.items():
            what = f"output tokens/s at equal p99 TTFT, {self._target.times} times that of one alone"
            ratio = capacity[CONTINUOUS].output_tokens_per_s / capacity[name].output_tokens_per_s
            findings.add_check(f"{what}, continuous ÷ {name}", f">= {target}", ratio)
