"""Long prompts beside a steady load: whole, or in chunks that ride along with everybody's decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmservice_bench.lengths import Lengths
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.findings import AT_ONCE, Findings, Setup
from scheduling.load import Arrival, Run, with_long_prompts

LONG = Lengths(1600, 8)
EVERY_S = 1.0
LOAD = 0.5
"""Of the requests per second that the engine finishes when all are there at once."""
REPETITIONS = 5
WHOLE = {"max_prefill_tokens": 4096, "prefill_chunk_tokens": 2048, "long_prefill_tokens": 2048}


def measure(setup: Setup) -> Findings:
    """ITL of the others with and without long prompts, and what chunks cost when there is no slack at all."""
    findings = Findings()
    chunked = setup.engine(prefix_caching=False)
    whole = setup.engine(prefix_caching=False, **WHOLE)
    rate = LOAD * Run(chunked, setup.arrivals(AT_ONCE)).complete().requests_per_s
    alone = setup.arrivals(rate)
    beside = with_long_prompts(alone, LONG, EVERY_S, setup.vocab_size)
    quiet, with_chunks = (Run(chunked, arrivals).complete() for arrivals in (alone, beside))
    findings.add_row("no long prompts", quiet)
    findings.add_row("a long prompt every second, in chunks", with_chunks)
    findings.add_row("a long prompt every second, whole", Run(whole, beside).complete())
    ratio = with_chunks.itl_s.p99 / quiet.itl_s.p99
    findings.add_check("p99 ITL with a long prompt every second, in chunks ÷ without", "<= 2", ratio)
    _add_cost(findings, chunked, whole, [replace(arrival, at_s=0.0) for arrival in beside])
    return findings


def _add_cost(findings: Findings, chunked: Engine, whole: Engine, flood: Sequence[Arrival]) -> None:
    """The same requests all at once, by turns: what chunks cost when every moment counts."""
    steps_s: dict[str, list[list[float]]] = {"in chunks": [], "whole": []}
    reports: dict[str, Report] = {}
    for _ in range(REPETITIONS):
        for name, engine in (("in chunks", chunked), ("whole", whole)):
            run = Run(engine, flood)
            reports[name] = run.complete()
            steps_s[name].append(run.steps_s)
    for name, report in reports.items():
        findings.add_row(f"with long prompts, all at once, {name}", report)
    cost = 100 * (1 - undisturbed_s(steps_s["whole"]) / undisturbed_s(steps_s["in chunks"]))
    what = f"throughput cost of chunks, same load all at once (each step's fastest of {REPETITIONS} runs)"
    findings.add_check(what, "<= 5", cost, "%")


def undisturbed_s(runs: Sequence[Sequence[float]]) -> float:
    """How long a run takes while the machine does nothing else, from the seconds of each step of several `runs`.

    All at once, the same requests make the same steps every time. What disturbs them, for whole seconds of some runs
    and none of others, lengthens a step several times over, and has nothing to do with how it was planned.

    Raises:
        ValueError: they are not the same steps.
    """
    fastest: list[float] = [min(step) for step in zip(*runs, strict=True)]
    return sum(fastest)
