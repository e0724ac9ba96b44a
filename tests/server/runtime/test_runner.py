"""A step's way through the device: what it draws goes on to the next one without the host having seen it."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.torch.attention import TorchAttention
from llmservice_server.backend.torch.backend import TorchBackend
from llmservice_server.engine.interfaces import BlockCopy, Plan, Scheduled
from llmservice_server.engine.request import Request, new_block_table
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.runner import DeviceStep, ModelRunner, SwappedBlocks, step_input
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.messages import GenerateRequest, SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512))
    return Checkpoint.open(folder).load(torch.float32, CPU)


def request(number: int, **sampling: Any) -> Request:
    message = GenerateRequest(
        request_id=str(number),
        prompt_token_ids=[3 + number, 40, 7],
        sampling=SamplingParams(**{"max_tokens": 9, "temperature": 0.0} | sampling),
        arrival_s=0.0,
    )
    made = Request.of(message, number, seed=number, eos_token_ids=frozenset())
    made.block_table = new_block_table([number + 1])
    return made


def prompts(requests: list[Request]) -> Plan:
    return Plan([Scheduled(each, 0, each.num_tokens, samples=True) for each in requests])


def decodes(requests: list[Request]) -> Plan:
    return Plan([Scheduled(each, each.num_tokens - 1, 1, samples=True) for each in requests])


def runner_of(model: DecoderModel) -> ModelRunner:
    shape = KVCacheShape.of(model.config, BLOCK_SIZE, torch.float32)
    return ModelRunner(model, TorchAttention(shape, 8, CPU), TorchBackend(shape, CPU, "a test"))


def sampled(step: DeviceStep, ended: Collection[Request] = ()) -> DeviceStep:
    step.sample(ended)
    return step


@contextmanager
def expecting(requests: list[Request]) -> Iterator[None]:
    """Each has the token that the step in flight draws for it, as the engine has it while it plans."""
    for each in requests:
        each.token_ids.append(0)
    yield
    for each in requests:
        each.token_ids.pop()


def test_two_steps_on_their_way_draw_what_they_draw_one_after_the_other(model: DecoderModel) -> None:
    apart, runner = runner_of(model), runner_of(model)
    expected: list[Sequence[int]] = []
    requests = [request(number) for number in range(4)]
    for plan in (prompts, decodes, decodes):
        expected.append(apart.execute(plan(requests)).token_ids)
        for each, token_id in zip(requests, expected[-1], strict=True):
            each.append(token_id)
    requests = [request(number) for number in range(4)]
    before = sampled(runner.launch(prompts(requests)))
    for place in range(2):
        with expecting(requests):
            launched = runner.launch(decodes(requests[::-1]), before)  # in another order
        result = before.wait()
        assert result.token_ids == expected[place][:: 1 if place == 0 else -1]
        for each, token_id in zip(result.requests, result.token_ids, strict=True):
            each.append(token_id)
        before = sampled(launched)
    assert before.wait().token_ids == expected[2][::-1]


def test_nothing_is_drawn_for_requests_that_have_ended_meanwhile(model: DecoderModel) -> None:
    runner = runner_of(model)
    requests = [request(number) for number in range(3)]
    expected = runner_of(model).execute(prompts(requests)).token_ids
    step = sampled(runner.launch(prompts(requests)), {requests[1]})
    assert step.requests == [requests[0], requests[2]]
    assert step.wait().token_ids == [expected[0], expected[2]]
    assert sampled(runner.launch(prompts(requests)), set(requests)).wait().token_ids == ()


def request_of(num_tokens: int) -> Request:
    message = GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(100, 100 + num_tokens)),
        sampling=SamplingParams(max_tokens=1),
        arrival_s=0.0,
    )
    made = Request.of(message, 0, seed=0, eos_token_ids=frozenset())
    made.block_table = new_block_table([num_tokens])
    return made


@st.composite
def shares(draw: st.DrawFn) -> Scheduled:
    num_known = draw(st.integers(1, 9))
    start = draw(st.integers(0, num_known - 1))
    num_tokens = draw(st.integers(1, num_known - start))
    samples = start + num_tokens == num_known
    return Scheduled(request_of(num_known), start, num_tokens, samples)


@given(st.lists(shares(), min_size=1, max_size=6))
def test_the_columns_are_the_shares_laid_end_to_end(scheduled: list[Scheduled]) -> None:
    tokens, positions = [], []
    for share in scheduled:
        end = share.start + share.num_tokens
        tokens += share.request.token_ids[share.start : end]
        positions += range(share.start, end)
    step = step_input(scheduled)
    assert step.token_ids.tolist() == tokens
    assert step.positions.tolist() == positions
    assert step.starts.tolist() == [share.start for share in scheduled]
    assert step.counts.tolist() == [share.num_tokens for share in scheduled]
    assert list(step.block_tables) == [share.request.block_table for share in scheduled]


def test_blocks_go_out_in_any_order_and_come_back_elsewhere_unchanged() -> None:
    caches = [torch.randn(6, 4, 2, 3) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    swapped = SwappedBlocks(caches, num_blocks=3)
    swapped.swap_out([BlockCopy(5, 0), BlockCopy(2, 2)])
    for cache in caches:
        cache[2] = cache[5] = 0
    swapped.swap_in([BlockCopy(0, 1), BlockCopy(2, 4)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[1], old[5])
        assert torch.equal(cache[4], old[2])
        assert torch.equal(cache[3], old[3])


def test_blocks_are_kept_in_pieces_of_memory_and_none_is_lost_between_two() -> None:
    cache = torch.arange(8 * 4.0).view(8, 4)
    before = cache.clone()
    swapped = SwappedBlocks([cache], num_blocks=7, piece_bytes=3 * 4 * 4 + 1)
    swapped.swap_out([BlockCopy(block + 1, block) for block in range(7)])
    cache.zero_()
    swapped.swap_in([BlockCopy(block, block + 1) for block in range(7)])
    assert torch.equal(cache[1:], before[1:])


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_any_number_of_blocks_moves_with_all_that_belongs_to_it(count: int) -> None:
    """As an fp8 cache has it: bytes, and the scales of their rows."""
    payload = torch.randint(0, 256, (count + 1, 2, 2, 4, 6), dtype=torch.uint8)
    scales = torch.randn(count + 1, 2, 2, 4)
    before = payload.clone(), scales.clone()
    swapped = SwappedBlocks([payload, scales], num_blocks=count)
    swapped.swap_out([BlockCopy(block + 1, block) for block in range(count)])
    payload.zero_()
    scales.zero_()
    swapped.swap_in([BlockCopy(block, count - block) for block in range(count)])
    assert torch.equal(payload[1:], before[0][1:].flip(0))
    assert torch.equal(scales[1:], before[1][1:].flip(0))
