"""How much of the KV cache's held memory holds nothing: paged on demand, or reserved for the whole request."""

from __future__ import annotations

from scheduling.findings import AT_ONCE, CONTINUOUS, DYNAMIC, STATIC, Findings, Setup
from scheduling.load import Run

LOAD = 0.8
"""Of the requests per second that the engine finishes when all are there at once."""


def measure(setup: Setup) -> Findings:
    findings = Findings()
    rate = 0.0
    for name in (CONTINUOUS, DYNAMIC, STATIC):
        engine = setup.engine(scheduler=name, prefix_caching=False)
        rate = rate or LOAD * Run(engine, setup.arrivals(AT_ONCE)).complete().requests_per_s
        run = Run(engine, setup.arrivals(rate))
        findings.add_row(f"{name}, at {rate:.1f} requests/s", run.complete(), kv_waste=run.waste.of_kv_cache)
        if name == CONTINUOUS:
            what = f"KV slots allocated but unused, mean at {LOAD:.0%} load"
            findings.add_check(what, "<= 4", 100 * run.waste.of_kv_cache, "%")
    return findings
