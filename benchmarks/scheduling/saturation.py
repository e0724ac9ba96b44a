"""The throughput of each strategy when all requests arrive at once, explained by its steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from scheduling.findings import AT_ONCE, CONTINUOUS, DYNAMIC, STATIC, Findings, Setup
from scheduling.load import Run, complete_by_turns

BATCHES = 5
"""Number of full batches; a partial last one would be a disadvantage of static and dynamic batching."""
TURN_S = 0.2


@dataclass(frozen=True, slots=True)
class Saturated:
    """A strategy's run, and its steps from the second to the last but one batch, without ramp-up and drain."""

    report: Report
    sequences_per_step: float
    """Mean number of sequences per step that generated a token."""
    step_mean_s: float
    step_p50_s: float
    padding_waste: float
    """Share of padding among the computed tokens."""

    @classmethod
    def of(cls, run: Run) -> Saturated:
        begun = len(run.arrivals) * (1 - 1 / BATCHES)
        steps = [step for step in run.steps if 0 < step.num_waiting < begun]
        return cls(
            run.report(),
            sequences_per_step=statistics.mean(step.num_outputs for step in steps),
            step_mean_s=statistics.mean(step.took_s for step in steps),
            step_p50_s=statistics.median(step.took_s for step in steps),
            padding_waste=run.waste.of_padding,
        )


def measure(setup: Setup) -> Findings:
    """Requests for the larger model, which only this part measures."""
    findings = Findings()
    names = (CONTINUOUS, DYNAMIC, STATIC)
    engines = {name: setup.engine(scheduler=name, prefix_caching=False) for name in names}
    saturate(setup, engines, findings)
    return findings


def saturate(setup: Setup, engines: Mapping[str, Engine], findings: Findings) -> dict[str, Saturated]:
    """Run each strategy on the same requests, alternately; adds a row each and a note."""
    arrivals = setup.arrivals(AT_ONCE, BATCHES * setup.max_num_seqs)
    runs = {name: Run(engine, arrivals) for name, engine in engines.items()}
    complete_by_turns(list(runs.values()), TURN_S)
    saturated = {name: Saturated.of(run) for name, run in runs.items()}
    for name, each in saturated.items():
        findings.add_row(
            f"{name}, all at once ({setup.name})",
            each.report,
            sequences_per_step=each.sequences_per_step,
            step_mean_ms=each.step_mean_s * 1000,
            step_p50_ms=each.step_p50_s * 1000,
            padding_waste=each.padding_waste,
        )
    findings.add_note(f"{setup.name}: {explanation(saturated)}")
    return saturated


def explanation(saturated: Mapping[str, Saturated]) -> str:
    """Explain the ratios without a target."""
    ours, dynamic, static = (saturated[name] for name in (CONTINUOUS, DYNAMIC, STATIC))
    batch = ours.sequences_per_step / dynamic.sequences_per_step
    time = ours.step_mean_s / dynamic.step_mean_s
    return (
        f"while requests wait, tokens/s are the sequences of a step by its time: continuous {_step(ours)}, dynamic "
        f"{_step(dynamic)}, static {_step(static)}, where {static.padding_waste:.0%} of what is computed is padding. "
        f"Continuous batching has {batch:.2f} times dynamic's sequences in steps that take {time:.2f} times as "
        f"long: {batch / time:.2f} times its tokens, and {batch:.2f} would be the most, if a step took the same time "
        f"whatever its batch. Where a ratio at a latency target is higher, dynamic batching cannot fill its batches."
    )


def _step(each: Saturated) -> str:
    return f"{each.sequences_per_step:.1f} in {each.step_mean_s * 1000:.2f} ms"
