"""The measured components, with a model that computes nothing."""

from typing import Any

import pytest

import micro
from llmservice_server.engine.scheduler import ContinuousScheduler
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.block_pool import measure_block_pool
from pieces.embeddings import measure_embeddings
from pieces.empty_engine import EmptyModel, empty_engine
from pieces.http_path import HttpRun, measure_http, sustained_tokens_per_s
from pieces.loading import measure_loading
from pieces.sampler import KINDS, measure_sampler
from pieces.scheduling import PromptWork, SchedulerBefore, measure_prompts
from pieces.step import measure_step


def test_the_empty_model_generates_the_requested_number_of_printable_tokens() -> None:
    printable = [3, 5, 8, 13]
    engine = empty_engine(EmptyModel(20, printable, period_s=0.0), num_seqs=2, num_tokens_each=64)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for request_id in tokens:
        sampling = SamplingParams(max_tokens=12, temperature=0.0)
        engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_s=0.0))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
    assert [len(ids) for ids in tokens.values()] == [12, 12]
    assert {token for ids in tokens.values() for token in ids} <= set(printable)


def test_a_steps_cost_is_of_a_step_in_which_all_sequences_decode() -> None:
    cost = measure_step(3, temperature=0.0, steps=10)
    assert cost.host.count == 10
    assert 0 < cost.host.p50_s <= cost.host.p99_s
    assert cost.message_bytes > 3 * 32  # three request ids at least


@pytest.mark.slow
def test_all_streams_decode_beside_embeddings_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODEL", "toy"), ("PHASES", 1), ("STEPS", 4)):
        monkeypatch.setattr(f"pieces.embeddings.{name}", value)
    row = measure_embeddings(1, 4)
    assert min(row["alone_tokens_per_s"], row["beside_tokens_per_s"]) > 0


def test_the_block_pools_operations_do_not_change_it() -> None:
    assert all(timing.count == 5 for timing in measure_block_pool(count=5).values())


def test_a_shared_prompt_is_computed_once_and_a_lone_one_in_whole_steps() -> None:
    shared = [measure_prompts(kind, 16, 1600) for kind in (SchedulerBefore, ContinuousScheduler)]
    alone = [measure_prompts(kind, 1, 16_000) for kind in (SchedulerBefore, ContinuousScheduler)]
    assert shared == [PromptWork(4, 5632), PromptWork(2, 1600 + 15 * 16)]
    assert alone == [PromptWork(32, 16_000), PromptWork(8, 16_000)]


def test_every_kind_of_sampling_can_be_measured() -> None:
    assert all(measure_sampler(kind, 2, count=1).count == 1 for kind in KINDS)


@pytest.mark.slow
@pytest.mark.slow
def test_a_quantised_mixture_is_loaded_by_both_codes() -> None:
    for row in measure_loading(layers=2, experts=4):
        assert (row["tensors"], row["files"]) == (3 + 2 * (5 + 2 * (4 + 3 * 4)), 1)
        assert row["tensor_us"] > 0


@pytest.mark.slow
async def test_the_stub_engine_serves_words_through_the_real_http_process() -> None:
    run = await measure_http(num_streams=4, period_s=0.005, seconds=0.5, traced=True)
    assert run.figures["requests_per_s"] > 0
    assert run.figures["events_per_token"] == 1
    assert run.figures["ttft_p50_ms"] > 0
    assert run.http_process_busy > 0


def test_only_a_pace_with_even_tokens_counts_as_sustained() -> None:
    def run(arrived: float, itl_p99_ms: float) -> HttpRun:
        figures: dict[str, Any] = {"output_tokens_per_s": arrived, "itl_p99_ms": itl_p99_ms}
        return HttpRun(400.0, False, figures, http_process_busy=0.5, engine_busy=0.1)

    assert sustained_tokens_per_s([run(99, 20), run(192, 90), run(300, 140)]) == 192
    assert sustained_tokens_per_s([run(50, 120)]) == 0


def test_a_note_says_where_arithmetic_alone_takes_longer_than_reading() -> None:
    note = micro.arithmetic_note({"tokens": 512, "read_ms": 25.0, "arithmetic_ms": 88.0})
    assert note is not None
    assert "takes 88 ms, 3.5 times the 25 ms of reading" in note
    assert micro.arithmetic_note({"tokens": 64, "read_ms": 25.0, "arithmetic_ms": 11.0}) is None
