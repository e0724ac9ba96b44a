"""Simulated traffic through our scheduler and through those of transformers, on a small pool."""

import pytest

from llmservice_bench.trace import Lengths
from scheduling.admission import Traffic, continuous, llama_8b_on_h100, simulate
from scheduling.transformers_scheduler import Settings, TransformersScheduler

TRAFFIC = Traffic("small", [Lengths(20 + 7 * number, 30 + number) for number in range(12)])
NEEDED_TOKENS = 2048


def theirs(traffic: Traffic, scheduler_type: str, pool_tokens: int) -> TransformersScheduler:
    return TransformersScheduler(traffic.answers, pool_tokens, Settings(scheduler_type, 16, 256, 12))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_transformers_computes_again_only_what_a_full_cache_has_cost(scheduler_type: str) -> None:
    latency = llama_8b_on_h100()
    large = simulate(TRAFFIC, theirs(TRAFFIC, scheduler_type, NEEDED_TOKENS), latency)
    scheduler = theirs(TRAFFIC, scheduler_type, 320)
    small = simulate(TRAFFIC, scheduler, latency)
    assert (large.preemptions, large.recomputed) == (0, 0)
    assert small.preemptions > 0
    assert small.recomputed > 0
    assert small.tokens_per_s < large.tokens_per_s
    assert scheduler.free_share == 1


def test_one_request_takes_the_same_time_with_either_scheduler() -> None:
    alone = Traffic("one", [Lengths(100, 20)])
    latency = llama_8b_on_h100()
    ours = simulate(alone, continuous(), latency)
    assert simulate(alone, theirs(alone, "fifo", NEEDED_TOKENS), latency) == ours
