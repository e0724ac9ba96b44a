"""The KV cache: the gain and cost of the prefix cache, and the memory that paging saves."""

from __future__ import annotations

import statistics

import numpy as np

from scheduling.findings import AT_ONCE, CONTINUOUS, DYNAMIC, STATIC, Findings, Setup
from scheduling.load import Arrival, Run, complete_by_turns

PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 1024, 32, 8
SHARING = 20
APART_S = 0.3
PAIRS = 24
BATCH = 16


def prefix_cache(setup: Setup) -> Findings:
    findings = Findings()
    _add_gain(setup, findings)
    _add_cost(setup, findings)
    return findings


def _add_gain(setup: Setup, findings: Findings) -> None:
    """The gain: requests with the same first 1024 tokens, so far apart that none waits for another."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, setup.vocab_size, PREFIX_TOKENS).tolist()
    suffixes = rng.integers(0, setup.vocab_size, (SHARING, SUFFIX_TOKENS)).tolist()
    arrivals = [Arrival(index * APART_S, prefix + suffix, OUTPUT_TOKENS) for index, suffix in enumerate(suffixes)]
    ttft_s = []
    for name, caching in (("without", False), ("with", True)):
        engine = setup.engine(prefix_caching=caching)
        Run(engine, arrivals[:1]).complete()  # the first request fills the cache
        report = Run(engine, arrivals[1:]).complete()
        ttft_s.append(report.ttft_s.p50)
        findings.add_row(f"shared {PREFIX_TOKENS}-token prefix, {name} cache", report)
    what = f"TTFT on a shared prefix of {PREFIX_TOKENS} tokens, without ÷ with the cache (median)"
    findings.add_check(what, ">= 5", ttft_s[0] / ttft_s[1])


def _add_cost(setup: Setup, findings: Findings) -> None:
    """The cost: different requests, on an engine without the cache and one with it alternately."""
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


PAGING_LOAD = 0.8
"""Rate of the load, as a share of the rate when all requests arrive at once."""


def paging(setup: Setup) -> Findings:
    findings = Findings()
    rate = 0.0
    for name in (CONTINUOUS, DYNAMIC, STATIC):
        engine = setup.engine(scheduler=name, prefix_caching=False)
        rate = rate or PAGING_LOAD * Run(engine, setup.arrivals(AT_ONCE)).complete().requests_per_s
        run = Run(engine, setup.arrivals(rate))
        findings.add_row(f"{name}, at {rate:.1f} requests/s", run.complete(), kv_waste=run.waste.of_kv_cache)
        if name == CONTINUOUS:
            what = f"KV slots allocated but unused, mean at {PAGING_LOAD:.0%} load"
            findings.add_check(what, "<= 4", 100 * run.waste.of_kv_cache, "%")
    return findings
