"""Static and dynamic batching: no model, tokens are made up, every step's plan is read."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_bench.batch_scheduler import PADDING, BatchConfig, BatchScheduler, padding_tokens
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.interfaces import Plan
from llmservice_server.engine.request import Request, Status
from llmservice_server.runtime.startup import load_engine
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.errors import ConfigError
from llmservice_server.types.messages import GenerateRequest, SamplingParams


@dataclass
class Bench:
    padded: bool = True
    batch_size: int = 3
    num_blocks: int = 100
    now: float = 0.0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BlockGroups(4, num_layers=1))
        config = BatchConfig(batch_size=self.batch_size, max_wait_s=5.0, padded=self.padded, max_num_batched_tokens=16)
        self.scheduler = BatchScheduler(self.pool, config)

    def add(self, prompt: int, max_tokens: int, lane: str = "interactive") -> Request:
        message = GenerateRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=[1] * prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now,
            lane=lane,
        )
        request = Request.of(message, len(self.requests), seed=0, eos_token_ids=frozenset())
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        for share in plan.scheduled:
            if share.samples and share.request.append(7) is not None:
                self.scheduler.finish(share.request)
        return plan


def sizes(plan: Plan) -> dict[str, int]:
    """Tokens by request; those that are computed for no request together."""
    tokens: Counter[str] = Counter()
    for share in plan.scheduled:
        tokens[share.request.request_id] += share.num_tokens
    return dict(tokens)


def test_a_batch_waits_until_it_is_full_or_its_oldest_has_waited_long_enough() -> None:
    bench = Bench()
    bench.add(2, 1)
    bench.add(2, 1)
    assert bench.scheduler.wait_s(bench.now) == 5.0
    assert not bench.step().scheduled
    bench.now = 5.0
    assert bench.scheduler.wait_s(bench.now) == 0
    assert set(sizes(bench.step())) == {"r0", "r1"}
    for _ in range(3):
        bench.add(2, 1)
    assert set(sizes(bench.step())) == {"r2", "r3", "r4"}


def test_no_request_joins_until_the_batch_has_ended() -> None:
    bench = Bench(padded=False)
    for _ in range(3):
        bench.add(2, max_tokens=3)
    bench.step()
    late = [bench.add(2, 1) for _ in range(3)]
    for _ in range(2):
        assert set(sizes(bench.step())) == {"r0", "r1", "r2"}
    assert {share.request for share in bench.step().scheduled} == set(late)


def test_static_pads_prompts_to_the_longest_and_answers_to_the_slowest() -> None:
    bench = Bench()
    for prompt, max_tokens in ((2, 1), (6, 3), (4, 2)):
        bench.add(prompt, max_tokens)
    first = bench.step()
    assert sizes(first) == {"r0": 2, PADDING: 4, "r1": 6}  # the budget of 16 is used up with the third
    assert padding_tokens(first) == 4
    assert bench.pool.num_held == 3 * 3  # each as if it had the longest prompt and the longest answer
    assert sizes(bench.step()) == {"r2": 4, PADDING: 2}
    for expected_padding in (1, 2):
        step = bench.step()
        assert sizes(step) == {"r0": 1, "r1": 1, "r2": 1}
        assert padding_tokens(step) == expected_padding
    assert bench.pool.num_held == 0


def test_dynamic_pads_nothing_and_frees_the_blocks_of_ended_requests() -> None:
    bench = Bench(padded=False)
    for prompt, max_tokens in ((2, 1), (6, 3), (4, 2)):
        bench.add(prompt, max_tokens)
    assert sizes(bench.step()) == {"r0": 2, "r1": 6, "r2": 4}
    assert bench.pool.num_held == 3 + 2
    assert sizes(bench.step()) == {"r1": 1, "r2": 1}
    assert sizes(bench.step()) == {"r1": 1}


def test_a_batch_is_no_larger_than_its_memory() -> None:
    bench = Bench(num_blocks=6)
    for _ in range(3):
        bench.add(4, 4)
    assert len(bench.step().scheduled) == 2
    assert bench.scheduler.num_waiting == {"interactive": 1, "batch": 0}


def test_a_cache_that_holds_the_longest_request_only_without_what_its_window_has_left_is_refused(
    tmp_path: Path,
) -> None:
    """Such a request would wait for ever, and those behind it."""
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=2, max_position_embeddings=256)
    write_tiny_model(tmp_path, spec)
    config = json.loads((tmp_path / "config.json").read_text())
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | window))
    block_bytes = 16 * 2 * 2 * 16 * 4
    engine = EngineConfig(
        model=tmp_path,
        dtype="float32",
        scheduler="static",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=9 * block_bytes,
        threads=1,
    )
    with pytest.raises(ConfigError, match="max_model_len 256 needs 16 blocks, the KV cache has 8: lower it to 128"):
        load_engine(engine)
    assert load_engine(replace(engine, max_model_len=128)).ready.max_request_tokens == 128


def test_a_batch_whose_last_member_is_cancelled_ends_with_it() -> None:
    bench = Bench(batch_size=2)
    bench.add(2, max_tokens=1)
    slow = bench.add(2, max_tokens=50)
    bench.step()
    bench.step()
    assert bench.pool.num_held > 0
    bench.scheduler.finish(slow)
    assert bench.pool.num_held == 0
    assert bench.scheduler.wait_s(0.0) == float("inf")


@settings(max_examples=100, deadline=None)
@given(
    padded=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 22)), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_every_request_is_served_in_full_and_no_budget_is_exceeded(
    padded: bool, lengths: list[tuple[int, int]], cancelled: set[int]
) -> None:
    bench = Bench(padded=padded, num_blocks=15)
    for prompt, max_tokens in lengths:
        bench.add(prompt, max_tokens)
    for number in range(2000):
        bench.now += 1
        plan = bench.step()
        assert plan.num_tokens <= 16
        for share in plan.scheduled:
            last = share.start + share.num_tokens - 1
            assert last < 4 * len(share.request.block_table) or share.request.status is Status.FINISHED
        if number in cancelled and number < len(bench.requests):
            bench.scheduler.finish(bench.requests[number])
        if all(request.status is Status.FINISHED for request in bench.requests):
            break
    for number, request in enumerate(bench.requests):
        assert request.status is Status.FINISHED
        assert request.num_output_tokens == request.sampling.max_tokens or number in cancelled
    assert bench.pool.num_held == 0
