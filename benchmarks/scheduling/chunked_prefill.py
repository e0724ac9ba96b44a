"""Long prompts during a steady load, computed at once or in chunks together with decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from llmservice_bench.trace import Lengths
from llmservice_server.engine.engine import Engine
from scheduling.findings import AT_ONCE, Findings, Setup
from scheduling.load import Arrival, Run, complete_by_turns, with_long_prompts

LONG = Lengths(1600, 8)
EVERY_S = 1.0
LOAD = 0.5
"""Rate of the steady load, as a share of the rate when all requests arrive at once."""
OPEN_LOOPS, FLOODS = 3, 5
"""Number of pairs of runs, of which the median counts."""
WHOLE = {"max_prefill_tokens": 4096, "prefill_chunk_tokens": 2048, "long_prefill_tokens": 2048}


def measure(setup: Setup) -> Findings:
    """The ITL of the other requests with and without long prompts, and the cost of chunks under full load."""
    findings = Findings()
    chunked = setup.engine(prefix_caching=False)
    whole = setup.engine(prefix_caching=False, **WHOLE)
    rate = LOAD * Run(chunked, setup.arrivals(AT_ONCE)).complete().requests_per_s
    alone = setup.arrivals(rate)
    beside = with_long_prompts(alone, LONG, EVERY_S, setup.vocab_size)
    ratios = []
    for _ in range(OPEN_LOOPS):
        quiet, with_chunks = (Run(chunked, arrivals).complete() for arrivals in (alone, beside))
        ratios.append(with_chunks.itl_s.p99 / quiet.itl_s.p99)
    findings.add_row("no long prompts", quiet)
    findings.add_row("a long prompt every second, in chunks", with_chunks)
    findings.add_row("a long prompt every second, whole", Run(whole, beside).complete())
    what = f"p99 ITL with a long prompt every second, in chunks ÷ without (median of {OPEN_LOOPS} pairs)"
    findings.add_check(what, "<= 2", statistics.median(ratios))
    _add_cost(findings, chunked, whole, [replace(arrival, at_s=0.0) for arrival in beside])
    return findings


def _add_cost(findings: Findings, chunked: Engine, whole: Engine, flood: Sequence[Arrival]) -> None:
    """The cost of chunks when all requests arrive at once; the two engines make steps alternately."""
    costs = []
    for _ in range(FLOODS):
        in_chunks, at_a_time = Run(chunked, flood), Run(whole, flood)
        chunked_s, whole_s = complete_by_turns([in_chunks, at_a_time])
        costs.append(100 * (1 - whole_s / chunked_s))
    findings.add_row("with long prompts, all at once, in chunks", in_chunks.report())
    findings.add_row("with long prompts, all at once, whole", at_a_time.report())
    what = f"throughput cost of chunks, same load all at once (median of {FLOODS} pairs, step by step by turns)"
    findings.add_check(what, "<= 5", statistics.median(costs), "%")
