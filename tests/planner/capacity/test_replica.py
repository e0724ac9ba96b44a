"""The rate of a replica: within its limits and targets, falling as work grows, and limited by what is named."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmservice_bench.simulation.fleet import Fleet, FleetConfig
from llmservice_bench.simulation.outcome import Outcome
from llmservice_bench.simulation.policies import Static
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_bench.trace import read_trace
from llmservice_planner.capacity.replica import (
    UTILISATION,
    OperatingPoint,
    ReplicaCapacity,
    ReplicaLimits,
    Work,
    operating_point,
    rate_of,
    replica_capacity,
)
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.admission_queue import QueueBound
from llmservice_server.engine.scheduler import SchedulerConfig

# About an 8B model on an H100.
MODEL = LatencyModel(step_s=5e-4, sequence_s=1.3e-6, weights_s=5.3e-3, token_s=1.8e-5, kv_token_s=4.6e-8, pair_s=1.1e-9)
CHAT = Work(prompt_tokens=1000, output_tokens=200, context_tokens=1100)
LIMITS = ReplicaLimits(max_num_seqs=256, kv_tokens=440_000, max_num_batched_tokens=2048, prefill_chunk_tokens=512)

models = st.builds(
    LatencyModel,
    step_s=st.floats(0, 1e-2),
    sequence_s=st.floats(0, 1e-4),
    weights_s=st.floats(1e-3, 0.1),
    token_s=st.floats(1e-6, 1e-3),
    kv_token_s=st.floats(1e-9, 1e-6),
    pair_s=st.floats(0, 1e-8),
)
limits_ = st.builds(
    ReplicaLimits,
    max_num_seqs=st.integers(1, 1024),
    kv_tokens=st.floats(1e3, 1e6),
    max_num_batched_tokens=st.integers(1024, 16384),
    prefill_chunk_tokens=st.integers(256, 2048),
)
works = st.builds(
    lambda prompt, output, cached: Work(prompt, output, prompt + cached + output / 2, cached),
    prompt=st.floats(1, 20_000),
    output=st.just(1.0) | st.floats(2, 4000),  # no traffic's mean is between
    cached=st.floats(0, 4000),
)
targets = st.none() | st.floats(1e-3, 10)
SLACK = 1.02
"""Of monotone properties: a larger batch leaves less room for prompts in a step, which then need more steps."""


def capacity(work: Work = CHAT, limits: ReplicaLimits = LIMITS, **targets: float | None) -> ReplicaCapacity:
    return replica_capacity(MODEL, limits, work, **targets)


@pytest.mark.parametrize(
    ("work", "limits", "targets", "limited_by"),
    [
        (CHAT, replace(LIMITS, max_num_seqs=16), {}, "maxNumSeqs"),
        (CHAT, replace(LIMITS, kv_tokens=20_000), {}, "kvMemory"),
        (CHAT, replace(LIMITS, kv_tokens=500), {}, "kvMemory"),  # less than one request
        (Work(4000, 10, 4005), replace(LIMITS, max_num_batched_tokens=128), {}, "tokenBudget"),
        (Work(4000, 10, 4005), LIMITS, {}, "compute"),
        (CHAT, LIMITS, {"itl_p99_s": 0.03}, "itlTarget"),
        (CHAT, LIMITS, {"itl_p99_s": 0.001}, "itlTarget"),  # a sequence alone takes longer
        (CHAT, LIMITS, {"ttft_p99_s": 0.05}, "ttftTarget"),
        (CHAT, LIMITS, {"ttft_p99_s": 0.001}, "ttftTarget"),  # a prompt alone takes longer
        (CHAT, replace(LIMITS, max_num_seqs=4), {"ttft_p99_s": 0.2}, "ttftTarget"),  # waits for one of four places
        (CHAT, replace(LIMITS, max_num_seqs=16), {"ttft_p99_s": 60, "itl_p99_s": 1}, "maxNumSeqs"),
        (Work(500, 1, 500), LIMITS, {}, "compute"),  # no token is decoded
        (Work(500, 1, 500), LIMITS, {"itl_p99_s": 0.001}, "compute"),
    ],
)
def test_what_limits_the_rate_is_named(
    work: Work, limits: ReplicaLimits, targets: dict[str, float], limited_by: str
) -> None:
    assert capacity(work, limits, **targets).limited_by == limited_by


def test_decode_alone_is_the_batch_over_its_step() -> None:
    """Prompts of one token cost nearly nothing, so the batch is full and its steps are decode steps."""
    work = Work(prompt_tokens=1, output_tokens=401, context_tokens=200)
    found = capacity(work, replace(LIMITS, max_num_seqs=64))
    assert found.requests_per_s == pytest.approx(64 / (400 * MODEL.decode_s(64, 200)), rel=0.02)
    assert found.num_seqs == 64


def test_prefill_alone_is_full_steps() -> None:
    """Without tokens to decode, every step computes as many prompt tokens as the budget allows."""
    found = capacity(Work(prompt_tokens=512, output_tokens=1, context_tokens=512), replace(LIMITS, kv_tokens=1e9))
    full = MODEL.seconds(StepBatch(0, 0, 2048, 4, 4 * 512 * 513 // 2))
    assert found.requests_per_s == pytest.approx(4 / full, rel=0.02)


def test_unloaded_request_waits_for_nothing() -> None:
    point = operating_point(MODEL, LIMITS, Work(3000, 100, 3050), 0)
    assert point is not None
    assert point.ttft_p99_s == pytest.approx(MODEL.prefill_s(3000, 1500), rel=1e-3)
    assert point.itl_p99_s == pytest.approx(MODEL.decode_s(1, 3050))


def test_rate_past_the_capacity_has_no_operating_point() -> None:
    full = capacity().requests_per_s
    assert operating_point(MODEL, LIMITS, CHAT, full * 1.01) is None
    assert operating_point(MODEL, LIMITS, CHAT, full * 0.99) is not None


def test_gap_between_tokens_is_a_decode_step_only_while_prompts_are_rare() -> None:
    rare, frequent = (operating_point(MODEL, LIMITS, CHAT, share * capacity().requests_per_s) for share in (0.003, 0.5))
    assert rare is not None
    assert frequent is not None
    assert rare.itl_p99_s < MODEL.decode_s(4, 1100)
    assert frequent.itl_p99_s > MODEL.seconds(StepBatch(8, 8 * 1100, 1000, 1, 500_000))


def test_long_prompts_of_a_mixture_make_the_tails() -> None:
    mixed = replace(CHAT, prompts=(500.0,) * 90 + (5500.0,) * 10)
    even, uneven = capacity(), capacity(mixed)
    assert uneven.requests_per_s == pytest.approx(even.requests_per_s, rel=0.1)
    assert uneven.ttft_s > 2 * even.ttft_s


def test_long_prompts_lengthen_the_gaps_between_tokens_only_without_chunks() -> None:
    mixed = replace(CHAT, prompts=(500.0,) * 90 + (5500.0,) * 10)
    whole = replace(LIMITS, prefill_chunk_tokens=LIMITS.max_num_batched_tokens)
    gaps = [
        point.itl_p99_s
        for limits in (LIMITS, whole)
        for work in (CHAT, mixed)
        if (point := operating_point(MODEL, limits, work, 10.0)) is not None
    ]
    assert gaps[1] == pytest.approx(gaps[0], rel=0.01)
    assert gaps[3] > 1.1 * gaps[2] > 1.1 * gaps[0]


def test_work_of_requests_weighs_contexts_by_how_long_they_are_decoded() -> None:
    work = Work.of([(100, 10), (1000, 90)])
    assert (work.prompt_tokens, work.output_tokens) == (550, 50)
    assert work.context_tokens == pytest.approx((10 * 105 + 90 * 1045) / 100)
    cached = Work.of([(100, 10), (1000, 90)], prefix_hit_rate=0.5)
    assert (cached.prompt_tokens, cached.cached_tokens, cached.prompts) == (275, 275, (50, 500))
    assert cached.context_tokens == work.context_tokens
    assert Work.of([(float(i), 1) for i in range(10_000)]).prompts[-1] == 9950


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "context_tokens", "cached_tokens"])
def test_negative_work_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(CHAT, **{name: -1})


LENGTHS = [(each.prompt_tokens, each.output_tokens) for each in read_trace()]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    ("limits", "waits_for_prompts_alone"),
    [
        (LIMITS, True),
        (replace(LIMITS, max_num_batched_tokens=8192, prefill_chunk_tokens=1024), True),
        (replace(LIMITS, max_num_seqs=16), False),
    ],
)
def test_formulas_agree_with_the_scheduler_in_simulated_time(
    limits: ReplicaLimits, waits_for_prompts_alone: bool, share: float
) -> None:
    work = Work.of(LENGTHS)
    rate = share * capacity(work, limits).requests_per_s
    found = operating_point(MODEL, limits, work, rate)
    assert found is not None
    simulated = simulate(limits, rate, 1500)
    assert found.num_seqs == pytest.approx(simulated.num_seqs, rel=0.15)
    assert found.itl_p99_s == pytest.approx(simulated.itl_p99_s, rel=0.25)
    if waits_for_prompts_alone:
        assert found.ttft_p99_s == pytest.approx(simulated.ttft_p99_s, rel=0.25)
    else:  # that of places is underestimated
        assert 0.5 * simulated.ttft_p99_s < found.ttft_p99_s < 1.25 * simulated.ttft_p99_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [replace(LIMITS, kv_tokens=25_000), replace(LIMITS, kv_tokens=100_000), replace(LIMITS, max_num_seqs=16)],
    ids=["little cache", "larger cache", "few sequences"],
)
def test_a_full_replica_finishes_nearly_what_the_formulas_say(limits: ReplicaLimits) -> None:
    """Requests that wait for the cache begin in groups, when one that is large has ended: nothing here counts that."""
    work = Work.of(LENGTHS)
    full = capacity(work, limits)
    found = run(limits, 1.25 * full.requests_per_s, 2000)
    last_s = found.requests[-1].arrival_s
    tokens = sum(each.num_tokens for each in found.requests if last_s / 4 < (each.ended_s or 0.0) < last_s)
    assert 0.93 < tokens / (last_s * 3 / 4) / (full.requests_per_s * work.output_tokens) < 1.02


@pytest.mark.slow
@pytest.mark.parametrize("rate", [2.0, 10.0])
@pytest.mark.parametrize("output_tokens", [2, 9, 20])
def test_a_gap_of_short_answers_has_chunks_and_no_whole_prompt(output_tokens: int, rate: float) -> None:
    """Few sequences decode at once, but where one does, no prompt is alone."""
    lengths = [(prompt_tokens, output_tokens) for prompt_tokens in (1000, 2000, 3000)]
    found = operating_point(MODEL, LIMITS, Work.of(lengths), rate)
    assert found is not None
    assert found.itl_p99_s == pytest.approx(simulate(LIMITS, rate, 1500, lengths).itl_p99_s, rel=0.25)


def simulate(
    limits: ReplicaLimits, rate: float, count: int, lengths: Sequence[tuple[int, int]] = tuple(LENGTHS)
) -> OperatingPoint:
    """The real scheduler, step by step; the cache is never full."""
    found = run(replace(limits, kv_tokens=16 * 200_000), rate, count, lengths)
    assert found.outcomes["finished"] == count
    decoding_s = sum(each.last_token_s - (each.first_token_s or 0.0) for each in found.requests)
    itl_p99_s, ttft_p99_s = found.gaps.percentile(0.99), found.ttft_s(0.99)
    assert itl_p99_s is not None
    assert ttft_p99_s is not None
    return OperatingPoint(
        num_seqs=decoding_s / found.requests[-1].arrival_s,
        itl_p99_s=itl_p99_s,
        ttft_p99_s=ttft_p99_s,
    )


def run(limits: ReplicaLimits, rate: float, count: int, lengths: Sequence[tuple[int, int]] = tuple(LENGTHS)) -> Outcome:
    rng = random.Random(1)  # noqa: S311 - traffic, not secrets
    times = itertools.accumulate(rng.expovariate(rate) for _ in range(count))
    trace = [TraceRequest(time, *rng.choice(lengths)) for time in times]
    replica = ReplicaConfig(
        latency=MODEL,
        scheduler=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            prefix_caching=False,
        ),
        groups=BlockGroups(16, 1, (None,), limits.max_num_batched_tokens),
        num_blocks=int(limits.kv_tokens) // 16 + 1,
        max_model_len=16_384,
        queue=QueueBound(count, 2**30),
        request_timeout_s=math.inf,
    )
    return Fleet(FleetConfig(replica=replica, initial=1), trace, Static(1)).run()


@settings(deadline=None)
@given(models, limits_, works, targets, targets)
def test_rate_is_within_every_bound(
    model: LatencyModel, limits: ReplicaLimits, work: Work, ttft: float | None, itl: float | None
) -> None:
    found = replica_capacity(model, limits, work, ttft, itl)
    assert found.num_seqs <= limits.max_num_seqs
    assert found.num_seqs * work.context_tokens <= max(limits.kv_tokens, found.num_seqs) * 1.0001
    prompt_tokens_of_a_step = found.num_seqs / max(work.output_tokens - 1, 1e-3) * work.prompt_tokens
    assert prompt_tokens_of_a_step <= limits.max_num_batched_tokens * 1.0001
    if itl is not None and found.requests_per_s and work.output_tokens > 1:
        assert found.itl_s <= itl * 1.0001
    if ttft is not None and found.requests_per_s:
        assert found.ttft_s <= ttft * 1.001
    if not found.requests_per_s:
        assert found.limited_by in {"itlTarget", "ttftTarget"}


@settings(deadline=None)
@example(MODEL, replace(LIMITS, max_num_seqs=64), Work(2000, 2, 2001), None, 0.012, "output")
@given(models, limits_, works, targets, targets, st.sampled_from(["prompt", "output", "cached", "ttft", "itl"]))
def test_rate_falls_with_longer_requests_and_tighter_targets(
    model: LatencyModel, limits: ReplicaLimits, work: Work, ttft: float | None, itl: float | None, harder: str
) -> None:
    before = replica_capacity(model, limits, work, ttft, itl)
    longer, more = work, work.context_tokens
    if harder == "prompt":
        longer = replace(work, prompt_tokens=work.prompt_tokens * 1.5, context_tokens=more + work.prompt_tokens / 2)
    elif harder == "output":
        longer = replace(work, output_tokens=work.output_tokens * 1.5, context_tokens=more + work.output_tokens / 4)
    elif harder == "cached":
        longer = replace(work, cached_tokens=work.cached_tokens + 100, context_tokens=more + 100)
    elif harder == "ttft":
        ttft = (ttft or 10) / 2
    else:
        itl = (itl or 10) / 2
    after = replica_capacity(model, limits, longer, ttft, itl)
    assert after.requests_per_s <= before.requests_per_s * SLACK


@settings(deadline=None)
@given(models, limits_, works, targets, targets)
def test_raising_only_what_limits_the_rate_raises_it(
    model: LatencyModel, limits: ReplicaLimits, work: Work, ttft: float | None, itl: float | None
) -> None:
    found = replica_capacity(model, limits, work, ttft, itl)
    raised = {
        "maxNumSeqs": replace(limits, max_num_seqs=2 * limits.max_num_seqs),
        "kvMemory": replace(limits, kv_tokens=2 * limits.kv_tokens),
        "tokenBudget": replace(limits, max_num_batched_tokens=2 * limits.max_num_batched_tokens),
    }
    for name, other in raised.items():
        after = replica_capacity(model, other, work, ttft, itl).requests_per_s
        if name == found.limited_by:
            assert after >= 1.04 * found.requests_per_s
        elif found.limited_by in raised and name != "tokenBudget":  # a larger budget also saves steps
            assert after <= SLACK * found.requests_per_s


@settings(deadline=None)
@given(models, limits_, works, st.floats(0.05, 0.95))
@example(LatencyModel(0, 0, 0.041, 0.00038, 1e-9, 0), ReplicaLimits(1, 1000, 1024, 256), Work(1, 1, 1.5), 0.92)
def test_operating_point_is_that_of_the_rate_and_waits_grow_with_it(
    model: LatencyModel, limits: ReplicaLimits, work: Work, share: float
) -> None:
    full = replica_capacity(model, limits, work)
    point = operating_point(model, limits, work, share * full.requests_per_s)
    busier = operating_point(model, limits, work, min(1.0, share * 1.05) * full.requests_per_s)
    assert point is not None
    assert busier is not None
    assert rate_of(model, limits, work, point.num_seqs) == pytest.approx(share * full.requests_per_s, rel=1e-3)
    assert point.num_seqs <= busier.num_seqs
    assert point.ttft_p99_s <= busier.ttft_p99_s * SLACK or math.isinf(busier.ttft_p99_s)
    planned = operating_point(model, limits, work, UTILISATION * full.requests_per_s)
    assert planned is not None
    assert full.ttft_s == pytest.approx(planned.ttft_p99_s)
