"""The batch lane in order of arrival against the shortest predicted first, on the real engine in simulated time.

The engine's runner computes nothing: a step takes what the planner's latency model says of an 8B model on an H100, and
answers have the lengths of the Azure conversation trace, which are predicted from those that have ended, as the server
does it. Requests come one by one, or in groups, as batch jobs send them, at 95 % of what the engine finishes when none
of its places is ever empty. All orders serve the same requests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmservice_bench.trace import Lengths
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.traffic.output_lengths import OutputLengths
from llmservice_server.engine.config import EngineConfig, QueueOrder
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import KVCachePlan, Plan, Started, StepResult
from llmservice_server.engine.step_timer import step_batch
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.timed_model import NoEmbedder, NoGrammars
from scheduling.admission import GROUPS, MOST_TOKENS, drawn, llama_8b_on_h100
from scheduling.findings import Findings
from scheduling.transformers_scheduler import TOKEN

SEQS = 64
POOL_TOKENS = 1600 * SEQS
END = TOKEN + 1
"""Ends an answer."""
LOAD = 0.95
REQUESTS = 2500
GROUP_SIZES = (1, 100)
SEEDS = range(8)


@dataclass(slots=True)
class SimulatedRunner:
    """Implements `Runner`: a step takes the time of `latency`, and answers are as long as `answers` say."""

    latency: LatencyModel
    answers: dict[str, int] = field(default_factory=dict)
    now: float = 0.0

    def swap(self, plan: Plan) -> None: ...

    def recover(self) -> None: ...

    def launch(self, plan: Plan, after: Any = None) -> Any:
        raise NotImplementedError("steps do not overlap in simulated time")

    def execute(self, plan: Plan) -> StepResult:
        self.now += self.latency.seconds(step_batch(plan))
        due = [share.request for share in plan.scheduled if share.samples]
        tokens = [END if each.num_output_tokens + 1 >= self.answers[each.request_id] else TOKEN for each in due]
        return StepResult(due, tokens, [None] * len(due))


def engine_of(order: QueueOrder, runner: SimulatedRunner) -> Engine:
    config = EngineConfig(model=Path("simulated"), max_num_seqs=SEQS, batch_order=order, prefix_caching=False)
    started = Started(
        runner=runner,
        embedder=NoEmbedder(),
        grammars=NoGrammars(),
        kv_cache=KVCachePlan(1 + POOL_TOKENS // GROUPS.block_size, 2 * MOST_TOKENS, GROUPS),
        max_num_seqs=SEQS,
        memory_bytes={},
        vocab_size=END + 1,
        eos_token_ids=frozenset({END}),
        architecture="LlamaForCausalLM",
        model_code="own",
    )
    return Engine(config, started, clock=lambda: runner.now)


@dataclass(frozen=True, slots=True)
class Served:
    """Waits from arrival to the first step, of all requests, in seconds."""

    waits_s: list[float]
    tokens_per_s: float

    def quantile_s(self, q: float) -> float:
        return float(np.quantile(self.waits_s, q))

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.waits_s))


def simulate(order: QueueOrder, lengths: Sequence[Lengths], arrivals_s: Sequence[float]) -> Served:
    """Serve all requests to their end."""
    runner = SimulatedRunner(llama_8b_on_h100())
    engine, predicted = engine_of(order, runner), OutputLengths(384)
    waits_s: list[float] = []
    next_one = 0
    while len(runner.answers) > 0 or next_one < len(lengths):
        if not runner.answers:
            runner.now = max(runner.now, arrivals_s[next_one])
        while next_one < len(lengths) and arrivals_s[next_one] <= runner.now:
            each = lengths[next_one]
            runner.answers[str(next_one)] = each.output_tokens
            engine.add(
                GenerateRequest(
                    request_id=str(next_one),
                    prompt_token_ids=[TOKEN] * each.prompt_tokens,
                    sampling=SamplingParams(max_tokens=MOST_TOKENS, stop_token_ids=(END,)),
                    arrival_s=arrivals_s[next_one],
                    lane="batch",
                    predicted_tokens=predicted.predict(each.prompt_tokens),
                )
            )
            next_one += 1
        for output in engine.step().outputs:
            if output.queue_s is not None:
                waits_s.append(output.queue_s)
            if output.finish_reason is not None:
                each = lengths[int(output.request_id)]
                predicted.observe(each.prompt_tokens, each.output_tokens)
                del runner.answers[output.request_id]
    return Served(waits_s, sum(each.output_tokens for each in lengths) / runner.now)


def capacity_per_s(lengths: Sequence[Lengths]) -> float:
    """Requests per second where all are there from the start, without the time after the last has begun."""
    served = simulate("fcfs", lengths, [0.0] * len(lengths))
    return len(lengths) / max(served.waits_s)


def arrivals_of(group: int, per_s: float, seed: int) -> list[float]:
    """Groups of so many requests at once, as a Poisson process in which `per_s` come exactly."""
    gaps = np.random.default_rng(seed).exponential(1.0, REQUESTS // group)
    times_s = np.cumsum(gaps) / gaps.sum() * REQUESTS / per_s
    return [float(each) for each in np.repeat(times_s, group)]


def both_orders(seed: int) -> list[tuple[Served, Served]]:
    """By size of group: the requests of a draw served by fcfs and by sjf."""
    lengths = list(itertools.islice(drawn(seed), REQUESTS))
    per_s = LOAD * capacity_per_s(lengths)
    arrivals_s = [arrivals_of(group, per_s, seed) for group in GROUP_SIZES]
    return [(simulate("fcfs", lengths, each), simulate("sjf", lengths, each)) for each in arrivals_s]


def measure() -> Findings:
    findings = Findings()
    print(f"{REQUESTS} batch requests at {LOAD:.0%} of the capacity, in simulated time")
    spawn = multiprocessing.get_context("spawn")  # other parts of the benchmark leave threads behind
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        draws = list(pool.map(both_orders, SEEDS))
    for group, served_by in zip(GROUP_SIZES, zip(*draws, strict=True), strict=True):
        what = "one by one" if group == 1 else f"in groups of {group}"
        means, p99s = [], []
        for seed, (fcfs, sjf) in zip(SEEDS, served_by, strict=True):
            means.append(sjf.mean_s / fcfs.mean_s)
            p99s.append(sjf.quantile_s(0.99) / fcfs.quantile_s(0.99))
            for order, served in (("fcfs", fcfs), ("sjf", sjf)):
                _add(findings, f"{what}, trace {seed}, {order}", served)
        findings.add_check(f"mean wait, {what}, sjf ÷ fcfs", "<= 0.75", float(np.mean(means)))
        findings.add_check(f"p99 wait, {what}, sjf ÷ fcfs", "<= 1.3", float(np.mean(p99s)))
    return findings


def _add(findings: Findings, name: str, served: Served) -> None:
    p50_s, p99_s = served.quantile_s(0.5), served.quantile_s(0.99)
    row = {"wait_mean_s": served.mean_s, "wait_p50_s": p50_s, "wait_p99_s": p99_s, "wait_max_s": max(served.waits_s)}
    findings.rows.append({"served": name, **row, "output_tokens_per_s": served.tokens_per_s})
    print(
        f"{name:<40} wait mean / p50 / p99 / max {served.mean_s:.2f} / {p50_s:.2f} / {p99_s:.2f} / "
        f"{max(served.waits_s):.2f} s{served.tokens_per_s:>8.0f} tok/s",
        flush=True,
    )
