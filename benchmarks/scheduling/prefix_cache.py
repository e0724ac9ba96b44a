"""What a shared prefix saves, and what the cache costs those who share nothing."""

from __future__ import annotations

import statistics

import numpy as np

from scheduling.findings import AT_ONCE, Findings, Setup
from scheduling.load import Arrival, Run, complete_by_turns

PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 1024, 32, 8
SHARING = 20
APART_S = 0.3
PAIRS = 24
BATCH = 16


def measure(setup: Setup) -> Findings:
    findings = Findings()
    _add_gain(setup, findings)
    _add_cost(setup, findings)
    return findings


def _add_gain(setup: Setup, findings: Findings) -> None:
    """Requests so far apart that none waits for another, whose first 1024 tokens are the same."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, setup.vocab_size, PREFIX_TOKENS).tolist()
    suffixes = rng.integers(0, setup.vocab_size, (SHARING, SUFFIX_TOKENS)).tolist()
    arrivals = [Arrival(index * APART_S, prefix + suffix, OUTPUT_TOKENS) for index, suffix in enumerate(suffixes)]
    ttft_s = []
    for name, caching in (("without", False), ("with", True)):
        engine = setup.engine(prefix_caching=caching)
        Run(engine, arrivals[:1]).complete()  # whoever comes first brings the prefix
        report = Run(engine, arrivals[1:]).complete()
        ttft_s.append(report.ttft_s.p50)
        findings.add_row(f"shared {PREFIX_TOKENS}-token prefix, {name} cache", report)
    what = f"TTFT on a shared prefix of {PREFIX_TOKENS} tokens, without ÷ with the cache (median)"
    findings.add_check(what, ">= 5", ttft_s[0] / ttft_s[1])


def _add_cost(setup: Setup, findings: Findings) -> None:
    """Requests that share nothing, new ones for every pair, on an engine without the cache and one with it by turns."""
    engines = {"without": setup.engine(prefix_caching=False), "with": setup.engine(prefix_caching=True)}
    costs = []
    for pair in range(PAIRS):
        arrivals = setup.arrivals(AT_ONCE, BATCH, seed=100 + pair)
        runs = {name: Run(engine, arrivals) for name, engine in engines.items()}
        without_s, with_s = complete_by_turns(list(runs.values()))
        costs.append(100 * (with_s / without_s - 1))
    for name, run in runs.items():
        findings.add_row(f"nothing shared, {name} cache", run.report())
    what = f"prefix cache at 0 % hits, time added (median of {PAIRS} pairs)"
    findings.add_check(what, "<= 1", statistics.median(costs), "%")
