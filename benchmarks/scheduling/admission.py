"""Admission by predicted footprint against fixed numbers of sequences, with the real scheduler in simulated time.

A step takes what the planner's latency model says of an 8B model on an H100, with the prompts that are computed again.
The pool is small, 48k tokens, so that memory is what bounds the batch. The scheduler does not know where an answer
ends. The same requests also go through the schedulers of transformers' continuous batching.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_bench.models import LLAMA_3_8B
from llmservice_bench.trace import Lengths, draw, read_trace
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import find_gpu
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_server.engine.admission import Admission
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.request import Request
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig
from llmservice_server.engine.step_timer import step_batch
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from scheduling.findings import Findings
from scheduling.transformers_scheduler import TOKEN, Settings, TransformersScheduler

BLOCK_SIZE = 16
GROUPS = BlockGroups(BLOCK_SIZE, num_layers=1)
POOL_TOKENS = 48_000
MOST_TOKENS = 4096
"""The `max_tokens` of requests whose clients set none."""
MOST_SEQS = 256
STEP_TOKENS = 2048
FIXED = (16, 31, 48, 64, 80, 96, 128, 160, 192, 256)
"""Values of `--max-num-seqs`."""
BEFORE = 31
"""The former default: what the pool holds of 1,536 tokens each."""
REQUESTS = 600
TRANSFORMERS = {
    "transformers, FIFO": Settings("fifo", BLOCK_SIZE, STEP_TOKENS, MOST_SEQS),
    "transformers, prefill first": Settings("prefill_first", BLOCK_SIZE, STEP_TOKENS, MOST_SEQS),
    "transformers, its defaults": Settings(),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    name: str
    lengths: Sequence[Lengths]
    max_tokens: int = MOST_TOKENS
    is_synchronous: bool = False
    """All answers have one length, so that those which start together also end together."""

    @property
    def answers(self) -> dict[str, int]:
        """Length of each request's answer, by its id."""
        return {str(number): min(each.output_tokens, self.max_tokens) for number, each in enumerate(self.lengths)}


def traffics() -> list[Traffic]:
    """All requests of each arrive at once, so that throughput is what the scheduler makes of the pool."""
    rng = np.random.default_rng(0)
    trace = list(itertools.islice(draw(read_trace(), rng), REQUESTS))
    short = [Lengths(*pair) for pair in _gamma(rng, (150, 1.0), (120, 1.0))]
    long = [Lengths(*pair) for pair in _gamma(rng, (1200, 0.5), (1000, 0.5))]
    return [
        Traffic("256 x 100 in, 500 out", [Lengths(100, 500)] * 256, 500, is_synchronous=True),
        Traffic("short", short),
        Traffic("mixed (Azure)", [replace(each, prompt_tokens=min(each.prompt_tokens, 8000)) for each in trace]),
        Traffic("long", long[: REQUESTS // 2]),
        Traffic("shifting", [*short[:200], *long[:200], *short[200:400]]),
    ]


def drawn(seed: int) -> Iterator[Lengths]:
    """Requests of the Azure trace that fit, drawn without an end."""
    return (each for each in draw(read_trace(), np.random.default_rng(seed)) if each.prompt_tokens <= MOST_TOKENS)


def _gamma(rng: np.random.Generator, *mean_and_spread: tuple[float, float]) -> Iterable[tuple[int, ...]]:
    """Lengths with these means and squared coefficients of variation, from 1 to 4,000."""
    columns = [
        np.clip(rng.gamma(1 / spread, mean * spread, REQUESTS), 1, 4000).astype(int).tolist()
        for mean, spread in mean_and_spread
    ]
    return zip(*columns, strict=True)


@dataclass(frozen=True, slots=True)
class Simulated:
    tokens_per_s: float
    itl_p99_s: float
    recomputed: float  # share of the computed tokens
    mean_batch: float
    preemptions: int

    def row(self) -> dict[str, float]:
        return {
            "output_tokens_per_s": self.tokens_per_s,
            "itl_p99_ms": self.itl_p99_s * 1000,
            "recomputed_percent": 100 * self.recomputed,
            "sequences_per_step": self.mean_batch,
            "preemptions": self.preemptions,
        }


def continuous(max_num_seqs: int = MOST_SEQS, admission: Admission | None = None) -> ContinuousScheduler:
    """The present scheduler, `admission` in place of its own."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        prefill_chunk_tokens=512,
    )
    scheduler = ContinuousScheduler(BlockPool(1 + POOL_TOKENS // BLOCK_SIZE, GROUPS), config)
    scheduler.admission = admission or scheduler.admission
    return scheduler


def simulate(
    traffic: Traffic, scheduler: ContinuousScheduler | TransformersScheduler, latency: LatencyModel
) -> Simulated:
    answers = traffic.answers
    ends: dict[Request, int] = {}
    for number, lengths in enumerate(traffic.lengths):
        message = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=np.random.default_rng(number).integers(0, 1 << 30, lengths.prompt_tokens).tolist(),
            sampling=SamplingParams(max_tokens=traffic.max_tokens),
            arrival_s=0.0,
        )
        request = Request.of(message, number, 0, frozenset())
        ends[request] = answers[request.request_id]
        scheduler.add(request)
    now, computed, batches = 0.0, 0, []
    gaps: list[float] = []
    last_s: dict[Request, float] = {}
    while ends:
        plan = scheduler.schedule(now)
        scheduler.commit(plan)
        now += latency.seconds(step_batch(plan))
        computed += plan.num_tokens
        batches.append(len(plan.scheduled))
        for request in [share.request for share in plan.scheduled if share.samples]:
            request.append(TOKEN)
            if request in last_s:
                gaps.append(now - last_s[request])
            last_s[request] = now
            if request.num_output_tokens == ends[request]:
                scheduler.finish(request)
                del ends[request], last_s[request]
    outputs = sum(answers.values())
    needed = sum(each.prompt_tokens for each in traffic.lengths) + outputs - len(traffic.lengths)
    return Simulated(
        tokens_per_s=outputs / now,
        itl_p99_s=float(np.quantile(gaps, 0.99)),
        recomputed=1 - needed / computed,
        mean_batch=float(np.mean(batches)),
        preemptions=scheduler.num_preemptions.total(),
    )


def measure() -> Findings:
    findings = Findings()
    for traffic in traffics():
        _compare(traffic, llama_8b_on_h100(), findings)
    return findings


def llama_8b_on_h100() -> LatencyModel:
    shape = ModelShape.from_fields({"architecture": "LlamaForCausalLM", "dtype": "bfloat16", **LLAMA_3_8B})
    weights = 2 * shape.num_parameters
    latency = LatencyModel.of(shape, find_gpu("H100"), 1, "bfloat16", weights, shape.kv_bytes_per_token("bfloat16", 1))
    assert latency is not None  # noqa: S101 - the catalogue knows its rates
    return latency


def _compare(traffic: Traffic, latency: LatencyModel, findings: Findings) -> None:
    fixed = {size: simulate(traffic, continuous(size, AdmitsAll(GROUPS, 1536)), latency) for size in FIXED}
    best = max(fixed, key=lambda size: fixed[size].tokens_per_s)
    theirs = {
        name: simulate(traffic, TransformersScheduler(traffic.answers, POOL_TOKENS, settings), latency)
        for name, settings in TRANSFORMERS.items()
    }
    ours = simulate(traffic, continuous(), latency)
    shown = (
        {f"at most {size}": fixed[size] for size in sorted({BEFORE, best, MOST_SEQS})} | theirs | {"predicted": ours}
    )
    for name, each in shown.items():
        findings.rows.append({"traffic": traffic.name, "admission": name, **each.row()})
        print(
            f"{traffic.name:<24}{name:<28}{each.tokens_per_s:>8.0f} tok/s{each.itl_p99_s * 1e3:>8.1f} ms p99 ITL"
            f"{each.recomputed:>8.1%} recomputed{each.mean_batch:>7.1f} in a step",
            flush=True,
        )
    if traffic.is_synchronous:
        return
    fastest = max(theirs, key=lambda name: theirs[name].tokens_per_s)
    for what, other in (
        (f"the best of {len(FIXED)} fixed numbers ({best})", fixed[best]),
        (f"the best of transformers ({fastest.removeprefix('transformers, ')})", theirs[fastest]),
    ):
        against = f"{traffic.name} traffic, predicted ÷ {what}"
        findings.add_check(f"tokens/s, {against}", ">= 0.95", ours.tokens_per_s / other.tokens_per_s)
        findings.add_check(f"p99 ITL, {against}", "<= 1.01", ours.itl_p99_s / other.itl_p99_s)
    findings.add_check(f"tokens computed again, {traffic.name} traffic", "< 3", 100 * ours.recomputed, "%")
