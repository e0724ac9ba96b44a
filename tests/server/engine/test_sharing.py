"""Blocks that are shared between requests of one step; tests/server/test_scheduler_properties.py has the invariants."""

from __future__ import annotations

from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.request import Request
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig
from llmservice_server.types.messages import GenerateRequest, SamplingParams

BLOCK_SIZE = 4


def scheduler(num_blocks: int, budget: int, chunk: int, block_size: int = BLOCK_SIZE) -> ContinuousScheduler:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, prefill_chunk_tokens=chunk)
    groups = BlockGroups(block_size, num_layers=1)
    made = ContinuousScheduler(BlockPool(num_blocks, groups), config)
    made.admission = AdmitsAll(groups, 16)
    return made


def request_of(number: int, prompt: list[int], max_tokens: int = 4) -> Request:
    message = GenerateRequest(
        request_id=str(number), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens), arrival_s=0.0
    )
    return Request.of(message, number, 0, frozenset())


def test_sixteen_answers_to_one_prompt_compute_it_once() -> None:
    shared = scheduler(num_blocks=2000, budget=2048, chunk=512, block_size=16)
    for number in range(16):
        shared.add(request_of(number, [7] * 1600, max_tokens=1))
    num_tokens = 0
    while shared.running or any(shared.num_waiting.values()):
        plan = shared.schedule(0.0)
        shared.commit(plan)
        num_tokens += plan.num_tokens
        for share in plan.scheduled:
            if share.samples:
                shared.finish(share.request)
    assert num_tokens == 1600 + 15 * 16  # each computes the last block, which yields its first token
    assert shared.prefix_hits == 15 * 1584


def test_requests_that_share_a_failed_ones_blocks_are_computed_again() -> None:
    shared = scheduler(num_blocks=100, budget=64, chunk=64)
    requests = [request_of(number, [1, 2, 3, 4, 5, 6, 7, 8, number + 10]) for number in range(3)]
    for request in requests:
        shared.add(request)
    plan = shared.schedule(0.0)
    assert [share.num_tokens for share in plan.scheduled] == [9, 1, 1]
    assert shared.commit(plan, failed={requests[0]}) == requests[1:]
    shared.finish(requests[0])
    again = shared.schedule(0.0)
    assert [(share.request, share.start, share.num_tokens) for share in again.scheduled] == [
        (requests[1], 0, 9),
        (requests[2], 8, 1),
    ]


def test_block_of_a_single_token_is_shared_from_the_next_step_on() -> None:
    """Steps of decodes alone store and read in one pass, so that no sequence may read what another one stores."""
    shared = scheduler(num_blocks=100, budget=64, chunk=64)
    first = request_of(0, [1, 2, 3])
    shared.add(first)
    plan = shared.schedule(0.0)
    shared.commit(plan)
    first.append(4)
    shared.add(request_of(1, [1, 2, 3, 4, 5]))
    plan = shared.schedule(0.0)
    assert [(share.start, share.num_tokens) for share in plan.scheduled] == [(3, 1), (0, 5)]
