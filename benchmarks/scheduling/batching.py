"""Static, dynamic and continuous batching on the same requests."""

from __future__ import annotations

import numpy as np

from llmservice_bench.rate_search import RateSearch
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.findings import AT_ONCE, Findings, Setup
from scheduling.load import Run

CONTINUOUS, DYNAMIC, STATIC = "continuous", "dynamic", "static"
THROUGHPUT_TARGETS = {STATIC: 4, DYNAMIC: 3}
GUESSES = {CONTINUOUS: 1.5, DYNAMIC: 4, STATIC: 6}
"""Where the search begins: a wrong guess only takes longer."""
UNLOADED = 60
WINDOW = 0.1
"""Of the promise: how long static and dynamic batching may wait for company."""
RUN_S = 12.0
FEWEST = 30
"""Requests of a run, however seldom they come."""
LOAD = 0.8
"""Of continuous batching's capacity."""


def measure(setup: Setup) -> Findings:
    """Each strategy's capacity at equal p99 TTFT, then everybody's waits near that of continuous batching."""
    findings = Findings()
    engines = {CONTINUOUS: setup.engine(scheduler=CONTINUOUS, prefix_caching=False)}
    bound_s = longest_unloaded_s(setup, engines[CONTINUOUS])
    for name in (DYNAMIC, STATIC):  # they wait for company no longer than leaves them time to compute
        engines[name] = setup.engine(scheduler=name, max_batch_wait_s=bound_s * WINDOW)
    flooded = Run(engines[CONTINUOUS], setup.arrivals(AT_ONCE)).complete()
    findings.add_row("continuous, all at once", flooded)
    capacity: dict[str, Report] = {}
    for name, engine in engines.items():
        guess = flooded.requests_per_s / GUESSES[name]
        capacity[name] = highest_rate(setup, engine, bound_s, guess)
        findings.add_row(f"{name}, capacity at p99 TTFT <= {bound_s * 1000:.0f} ms", capacity[name])
    for name, target in THROUGHPUT_TARGETS.items():
        ratio = capacity[CONTINUOUS].output_tokens_per_s / capacity[name].output_tokens_per_s
        findings.add_check(f"output tokens/s at equal p99 TTFT, continuous ÷ {name}", f">= {target}", ratio)
    _near_capacity(setup, engines, LOAD * capacity[CONTINUOUS].requests_per_s, findings)
    return findings


def longest_unloaded_s(setup: Setup, engine: Engine) -> float:
    """What the longest requests take, first token to last, when nobody else is there (p99)."""
    alone = [Run(engine, [arrival]).complete().e2e_s.p50 for arrival in setup.arrivals(AT_ONCE)[:UNLOADED]]
    return float(np.percentile(alone, 99))


def highest_rate(setup: Setup, engine: Engine, ttft_bound_s: float, start: float) -> Report:
    """The run with the highest rate found whose p99 TTFT keeps the bound.

    Who keeps it at no rate is credited with a twentieth of `start` all the same, or there would be no ratio.
    """
    search, best = RateSearch(start, tolerance=0.1, floor=start / 20), None
    while (rate := search.next_rate) is not None:
        arrivals = setup.arrivals(rate)
        in_time = sum(arrival.at_s <= RUN_S for arrival in arrivals)
        report = Run(engine, arrivals[: max(in_time, FEWEST)], ttft_bound_s).run()
        kept = report is not None and report.ttft_s.p99 <= ttft_bound_s
        search = search.told(rate, kept)
        if kept:
            best = report
    return best or Run(engine, setup.arrivals(search.floor)[:FEWEST]).complete()


def _near_capacity(setup: Setup, engines: dict[str, Engine], rate: float, findings: Findings) -> None:
    waits: dict[str, float] = {}
    for name, engine in engines.items():
        run = Run(engine, setup.arrivals(rate))
        report = run.complete()
        findings.add_row(f"{name}, at {LOAD:.0%} of continuous' capacity", report, padding_waste=run.waste.of_padding)
        waits[name] = report.ttft_s.p99
    what = f"p99 TTFT at {LOAD:.0%} of continuous' capacity, static ÷ continuous"
    findings.add_check(what, ">= 20", waits[STATIC] / waits[CONTINUOUS])
