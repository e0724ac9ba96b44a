"""A step is planned and launched while the one before is computed: what users see of it is what they saw before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine_driver import VOCAB, EngineDriver, assert_idle, prompt_of
from llmservice_server.engine.block_pool import PreemptionCost, SwapSpace
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import Started
from llmservice_server.engine.request import TokenHistory
from llmservice_server.engine.scheduler import ContinuousScheduler
from llmservice_server.runtime.startup import start
from llmservice_server.types.messages import StepTime

BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head_dim, float32
NUM_BLOCKS = 40


@cache
def started(folder: Path) -> Started:
    """One model and one KV cache for all engines of this file: they work one after the other."""
    size, swap_gib = (NUM_BLOCKS + 1) * BLOCK_BYTES, 64 * BLOCK_BYTES / 2**30
    return start(EngineConfig(model=folder, threads=1, kv_cache_memory_bytes=size, swap_space_gib=swap_gib))


class Driver(EngineDriver):
    @classmethod
    def of(cls, folder: Path, *, num_blocks: int = NUM_BLOCKS, swapping: bool = False, **options: Any) -> Driver:
        driver: Driver
        loaded = started(folder)
        swap = SwapSpace(64, PreemptionCost(copy_block_s=0.0, compute_token_s=1.0)) if swapping else None
        max_num_seqs = options.get("max_num_seqs", 6)
        kv_cache = replace(loaded.kv_cache, num_blocks=num_blocks + 1)
        config = EngineConfig(model=folder, **{"overlap": True, "max_num_batched_tokens": 64} | options)
        engine = Engine(
            config,
            replace(loaded, kv_cache=kv_cache, max_num_seqs=max_num_seqs, swap=swap),
            clock=lambda: driver.now,
        )
        driver = cls(engine)
        return driver


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 30, "seed": 6},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 7, "logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"logit_bias": {7: 3.0}, "min_tokens": 5},
]
STOPS = [(), tuple(range(0, VOCAB, 9)), tuple(range(0, VOCAB, 3))]  # of which a model that knows nothing draws many


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes and perhaps goes, in steps."""

    length: int
    beginning: int  # requests of one begin alike
    max_tokens: int
    sampling: int
    stops: int
    lane: str
    comes: int
    goes: int | None


ARRIVALS = st.builds(
    Arrival,
    length=st.integers(1, 70),
    beginning=st.integers(0, 2),
    max_tokens=st.integers(1, 30),
    sampling=st.integers(0, len(SAMPLING) - 1),
    stops=st.integers(0, len(STOPS) - 1),
    lane=st.sampled_from(["interactive", "interactive", "batch"]),
    comes=st.integers(0, 25),
    goes=st.sampled_from([None, None, None, 3, 9, 20]),
)
WAYS = st.sampled_from(
    [
        {},
        {"max_num_batched_tokens": 24, "prefill_chunk_tokens": 7},
        {"num_blocks": 12, "prefix_caching": False},
        {"num_blocks": 14, "swapping": True, "prefill_chunk_tokens": 20},
        {"num_blocks": 11, "swapping": True, "prefix_caching": False},
        {"scheduler": "dynamic", "max_batch_wait_s": 0.0},
        {"scheduler": "static", "max_batch_wait_s": 0.0, "max_num_seqs": 3},
    ]
)


def serve(driver: Driver, arrivals: list[Arrival]) -> None:
    for step in range(1000):
        for number, arrival in enumerate(arrivals):
            if arrival.comes == step:
                prompt = prompt_of(70, arrival.beginning)[: arrival.length]
                asked = SAMPLING[arrival.sampling] | {"stop_token_ids": STOPS[arrival.stops]}
                driver.add(f"r{number}", prompt, max_tokens=arrival.max_tokens, lane=arrival.lane, **asked)
            if arrival.goes is not None and arrival.comes + arrival.goes == step:
                driver.engine.abort([f"r{number}"])
        driver.step()
        pool = driver.engine.pool
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_usable
        if isinstance(driver.engine.scheduler, ContinuousScheduler):  # a static batch holds those of who has ended
            held = {block for request in driver.engine.scheduler.running for block in request.block_table}
            assert len(held) == pool.num_held
        if step > 50 and not driver.engine.has_work:
            break
    assert_idle(driver.engine)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=9), way=WAYS)
def test_whatever_comes_and_goes_the_answers_are_those_of_one_step_after_the_other(
    folder: Path, arrivals: list[Arrival], way: dict[str, Any]
) -> None:
    ahead, apart = Driver.of(folder, **way), Driver.of(folder, **way, overlap=False)
    serve(ahead, arrivals)
    serve(apart, arrivals)
    assert set(ahead.last) == set(apart.last)
    for name, expected in apart.last.items():
        mine, theirs = ahead.tokens[name], apart.tokens[name]
        if "abort" in (expected.finish_reason, ahead.last[name].finish_reason):  # it had come further, or less far
            assert mine[: len(theirs)] == theirs[: len(mine)]
            continue
        assert (ahead.last[name].finish_reason, mine) == (expected.finish_reason, theirs)
        for reported, wanted in zip(ahead.reported[name], apart.reported[name], strict=True):
            assert reported.token_id == wanted.token_id
            assert reported.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_a_step_hands_out_what_the_one_before_has_drawn(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("r", prompt_of(9), max_tokens=3)
    assert driver.step() == []
    assert driver.engine.last_plan.num_tokens == 9
    assert driver.engine.wait_s() == 0
    [first] = driver.step()
    assert driver.engine.last_plan.num_tokens == 1  # launched before the first token was read
    assert len(first.token_ids) == 1
    assert first.queue_s == 0
    driver.run()
    assert len(driver.tokens["r"]) == 3


def test_no_step_is_taken_beyond_the_length_that_was_asked_for(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("r", prompt_of(9), max_tokens=2)
    driver.step()
    driver.step()
    driver.step()
    assert driver.engine.last_plan.scheduled == []
    assert driver.last["r"].finish_reason == "length"
    assert_idle(driver.engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_count_with_their_last_token_in_what_the_cache_is_predicted_to_hold(
    folder: Path, overlap: bool
) -> None:
    driver = Driver.of(folder, overlap=overlap, prefix_caching=False)
    for number in range(8):
        driver.add(str(number), [number] * 47, max_tokens=1)
    driver.run()
    assert driver.engine.stats().num_admissible == 6  # of 48 tokens each, in 640


def test_a_row_computed_after_a_stop_token_is_dropped(folder: Path) -> None:
    whole = Driver.of(folder)
    whole.add("r", prompt_of(9), max_tokens=12)
    whole.run()
    place = next(place for place in range(2, 12) if whole.tokens["r"][place] not in whole.tokens["r"][:place])
    driver = Driver.of(folder)
    driver.add("r", prompt_of(9), max_tokens=12, stop_token_ids=(whole.tokens["r"][place],))
    while "r" not in driver.last:
        driver.step()
    assert driver.engine.last_plan.num_tokens == 1  # that row
    assert driver.engine.stats().blocks_held == 0
    assert driver.tokens["r"] == whole.tokens["r"][:place]
    assert driver.step() == []
    assert_idle(driver.engine)


def test_an_abort_and_a_deadline_end_requests_whose_token_is_being_sampled(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("aborted", prompt_of(20))
    driver.add("late", prompt_of(21), deadline_s=110.0)
    driver.add("patient", prompt_of(22))
    for _ in range(3):
        driver.step()
    driver.engine.abort(["aborted"])
    driver.add("aborted", prompt_of(5))  # the same name, another request: it gets no token of the first one's
    driver.now = 110.0
    driver.step()
    assert driver.last.pop("aborted").finish_reason == "abort"
    assert driver.last["late"].error == "the request's deadline passed after 2 tokens"
    assert {request.request_id for request in driver.engine.scheduler.running} == {"aborted", "patient"}
    driver.tokens["aborted"] = []
    driver.run()
    alone = Driver.of(folder, overlap=False)
    alone.add("aborted", prompt_of(5))
    alone.run()
    assert driver.tokens["aborted"] == alone.tokens["aborted"]
    assert len(driver.tokens["patient"]) == 16


@pytest.mark.parametrize("phase", ["launch", "sampling"])
def test_a_step_that_fails_fails_only_the_requests_that_cause_it(folder: Path, phase: str) -> None:
    expected = Driver.of(folder, overlap=False)
    driver = Driver.of(folder, prefix_caching=False)
    for seed, name in enumerate("abcd"):
        for each in (expected, driver):
            each.add(name, prompt_of(20, seed), max_tokens=8, repetition_penalty=1.1)
    expected.run()
    for _ in range(3):
        driver.step()
    broken = driver.engine.scheduler.running[2]
    if phase == "launch":
        broken.token_ids[0] = VOCAB + 7  # no such row in the embedding
        broken.num_computed_tokens = 0
    else:
        broken.sampling = msgspec.structs.replace(broken.sampling, logit_bias={VOCAB * 100: 1.0})  # nor such a logit
    driver.run()
    assert driver.last["c"].finish_reason == "error"
    assert "the engine failed to compute this request" in str(driver.last["c"].error)
    assert {name: driver.tokens[name] for name in "abd"} == {name: expected.tokens[name] for name in "abd"}


def test_a_token_that_cannot_be_drawn_fails_its_request_though_the_next_step_runs_already(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver.of(folder)
    embedding, poison = driver.engine.runner.model.embed_tokens, 5
    healthy = [token for token in prompt_of(12) if token != poison]
    expected = Driver.of(folder, overlap=False)
    expected.add("healthy", healthy)
    expected.run()
    row = embedding[poison].clone()
    embedding[poison] = torch.nan  # as a checkpoint with one bad row would
    try:
        driver.add("poisoned", [1, poison, 2])
        driver.add("healthy", healthy)
        driver.run()
    finally:
        embedding[poison] = row
    assert "not finite" in str(driver.last["poisoned"].error)
    assert driver.tokens["healthy"] == expected.tokens["healthy"]
    assert not caplog.records  # no step failed


def broken_on_the_host(driver: Driver, bug: str) -> None:
    """As if the host's part of a request had a bug that shows when the step in flight is read."""
    request = driver.engine._requests["b"]
    if bug == "taking the token":
        request.history = TokenHistory([1], 0)  # there is no room for it
    else:
        option = "logprobs" if bug == "telling of the token" else "prompt_logprobs"
        request.sampling = msgspec.structs.replace(request.sampling, **{option: "many"})


@pytest.mark.parametrize("bug", ["taking the token", "telling of the token", "telling of the prompt"])
def test_what_breaks_on_the_host_while_a_step_is_read_fails_its_request_alone(
    folder: Path, bug: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, dict[str, Any]] = {
        "a": {"logprobs": 1, "prompt_logprobs": 1},
        "b": {"logprobs": 2, "prompt_logprobs": 2},
        "c": {"temperature": 0.8, "seed": 3},
    }
    expected, driver = Driver.of(folder, overlap=False), Driver.of(folder)
    for one in (expected, driver):
        for seed, (name, sampling) in enumerate(options.items()):
            one.add(name, prompt_of(20, seed), max_tokens=8, **sampling)
    expected.run()
    driver.step()
    broken_on_the_host(driver, bug)
    driver.step()
    assert driver.last["b"].finish_reason == "error"
    assert "the engine failed to compute this request" in str(driver.last["b"].error)
    driver.run()
    assert {name: driver.tokens[name] for name in "ac"} == {name: expected.tokens[name] for name in "ac"}
    assert [record.message for record in caplog.records] == ["a request failed on the host"]


def test_so_it_does_where_steps_follow_each_other(folder: Path) -> None:
    driver = Driver.of(folder, overlap=False)
    for name in "abc":
        driver.add(name, prompt_of(20), max_tokens=8)
    broken_on_the_host(driver, "taking the token")
    driver.run()
    assert {name: output.finish_reason for name, output in driver.last.items()} == {
        "a": "length", "b": "error", "c": "length",
    }  # fmt: skip


def test_an_error_of_the_device_that_shows_when_a_step_is_read_is_everybodys(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("r", prompt_of(20))
    driver.step()
    assert driver.engine._in_flight is not None
    assert driver.engine._in_flight.drawn is not None
    driver.engine._in_flight.drawn._copy = LostDevice()  # type: ignore[assignment]
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        driver.step()


class LostDevice:
    """Where the host reads what a device computed that has failed since."""

    def wait(self) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_only_blocks_of_tokens_that_were_read_are_found_in_the_prefix_cache(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("first", prompt_of(30), max_tokens=40)
    driver.run()
    answer = prompt_of(30) + driver.tokens["first"]
    driver.add("second", answer, max_tokens=4)
    driver.run()
    alone = Driver.of(folder, overlap=False, prefix_caching=False)
    alone.add("second", answer, max_tokens=4)
    alone.run()
    assert driver.tokens["second"] == alone.tokens["second"]
    assert driver.engine.stats().prefix_hits == 64  # of 70: the last token was never computed


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_is_timed_with_what_it_has_computed(folder: Path, overlap: bool) -> None:
    driver = Driver.of(folder, overlap=overlap)
    steps: list[StepTime] = []

    def run() -> None:
        while driver.engine.has_work:
            driver.now += 1.0  # what a step takes
            if (step := driver.engine.step().stats.step) is not None:
                steps.append(step)

    driver.add("a", [3] * 40, max_tokens=4)
    driver.add("b", [4] * 9, max_tokens=3)
    run()
    driver.now += 1000.0  # nothing to do
    driver.add("c", [5] * 20, max_tokens=2)
    run()
    work = [(each.num_seqs, each.context_tokens, each.prompt_tokens, each.prompt_chunks) for each in steps]
    assert work == [(0, 0, 49, 2), (2, 51, 0, 0), (2, 53, 0, 0), (1, 43, 0, 0), (0, 0, 20, 1), (1, 21, 0, 0)]
    began_late = [0, 4]  # without overlap, a step that follows a pause takes no time by this clock
    expected = [0.0 if index in began_late and not overlap else 1.0 for index in range(6)]
    assert [each.seconds for each in steps] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_during_which_embeddings_are_computed_is_not_timed_by_them(folder: Path, overlap: bool) -> None:
    driver = Driver.of(folder, overlap=overlap)
    driver.add("a", [3] * 4, max_tokens=8)
    seconds = []
    while driver.engine.has_work:
        driver.now += 1.0
        if (step := driver.engine.step().stats.step) is not None:
            seconds.append(step.seconds)
        driver.engine.embed(None)
        driver.now += 500.0
    assert all(each <= 1.0 for each in seconds)
