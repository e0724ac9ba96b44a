"""Which compositions are measured, and what the answers of a server say of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.calibration.measure import Driver, Limits, Phase, measure, phases
from llmservice_bench.client import Target, WordRate, measure_word_rate
from llmservice_bench.models import MODEL, serving


@given(st.integers(1, 1024), st.integers(256, 131072))
def test_every_phase_is_within_the_servers_limits(max_num_seqs: int, max_model_len: int) -> None:
    planned = phases(Limits(max_num_seqs, max_model_len, 2048))
    assert len(planned) == len(set(planned))
    for phase in planned:
        assert phase.num_seqs <= max_num_seqs
        assert max(phase.prompt_tokens, phase.joining_tokens) < max_model_len - 96


@pytest.mark.parametrize("max_num_seqs", [4, 64, 256])
def test_batches_contexts_prompts_and_both_at_once_are_measured(max_num_seqs: int) -> None:
    planned = phases(Limits(max_num_seqs, 4096, 2048))
    alone = {phase.joining_tokens for phase in planned if not phase.num_seqs}
    decode = {phase.num_seqs for phase in planned if phase.num_seqs and not phase.joining_tokens}
    contexts = {phase.prompt_tokens for phase in planned if phase.num_seqs}
    assert len(alone) >= 5
    assert {1, max_num_seqs} <= decode
    assert len(contexts) >= 3
    assert any(phase.num_seqs and phase.joining_tokens for phase in planned)


async def test_a_phase_that_would_take_more_than_a_fifth_of_the_time_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measure_at_once(driver: Driver, phase: Phase) -> None:
        driver.prompt_s[1000] = 1.0

    monkeypatch.setattr(Driver, "_measure", measure_at_once)
    short, long = Phase(0, 0, 512), Phase(4, 512)  # half a second and two, of five
    async with aiohttp.ClientSession() as session:
        limits, rate, rng = Limits(8, 2048, 2048), WordRate(0.0, 1.0), np.random.default_rng(0)
        driver = Driver(session, Target("http://none", "none"), rate, limits, rng, None, lambda phase: None)
        measured = await driver.run([long, short], 5.0)
    assert measured.skipped == [long]
    assert measured.done == [short]


async def test_answers_that_end_early_keep_nothing_waiting(server: Any) -> None:
    server.cut_after = 3
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        measured = await measure(
            session,
            Target(server.url, "m"),
            Limits(8, 2048, 2048),
            seconds=0.5,
            steps_url=None,
            seed=0,
            on_phase=lambda phase: None,
        )
    assert [*measured.failures] == ["the stream ended before [DONE]"]
    assert {sample.kind for sample in measured.samples} == {"prefill"}, "their answers have one token"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[Target]:
    """A server of ours."""
    async with serving() as server:
        yield Target(server.url, MODEL, ignore_eos=True)


@pytest.mark.slow
async def test_the_answers_of_a_server_that_reports_no_steps_give_samples_of_every_kind(target: Target) -> None:
    limits, seen = Limits(8, 2048, 2048), []
    async with aiohttp.ClientSession() as session:
        for seconds in (4, 10, 30):  # a busy machine gets through few batches in four
            measured = await measure(
                session,
                target,
                limits,
                seconds=seconds,
                steps_url=None,
                seed=0,
                on_phase=lambda phase: seen.append(str(phase)),
            )
            decode = [sample for sample in measured.samples if sample.kind == "decode"]
            if {1, 2} <= {sample.batches[0].num_seqs for sample in decode}:
                break
    assert not measured.from_server
    assert not measured.failures
    assert {sample.phase for sample in measured.samples} <= set(seen)
    assert {1, 2} <= {sample.batches[0].num_seqs for sample in decode}
    for sample in decode:  # `N decoding after TOKENS tokens`: words are an estimate of tokens
        planned = int(sample.phase.split()[3])
        assert 0.7 * planned <= sample.batches[0].context_tokens / sample.batches[0].num_seqs < 2048
    prefill = [sample for sample in measured.samples if sample.kind == "prefill"]
    for sample in prefill:
        (batch,) = sample.batches
        assert batch.prompt_tokens == pytest.approx(int(sample.phase.split()[3]), rel=0.3, abs=16), (
            "prompts have about the planned length"
        )
        assert sample.requests == 1
    mixed = [sample for sample in measured.samples if sample.kind == "mixed"]
    assert all(sample.batches[0].prompt_tokens >= 0.7 * int(sample.phase.split()[-1]) for sample in mixed)


@pytest.mark.slow
async def test_the_time_to_a_first_token_is_that_of_as_many_steps_as_the_server_reports(target: Target) -> None:
    async with aiohttp.ClientSession() as session:
        rng = np.random.default_rng(0)
        rate = await measure_word_rate(session, target, rng)
        driver = Driver(session, target, rate, Limits(2, 2048, 2048), rng, f"{target.url}/sizing", lambda phase: None)
        measured = await driver.run([Phase(0, 0, 128), Phase(0, 0, 1024)], 20.0)
    steps = {sample.phase: len(sample.batches) for sample in measured.samples if sample.requests}
    assert (steps["a prompt of 128 tokens"], steps["a prompt of 1024 tokens"]) == (1, 2), "of 512 tokens on a CPU"
