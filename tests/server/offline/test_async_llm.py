"""Offline use on an event loop: the same answers as in this process, streamed, and cancelled when left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from llmservice_server import LLM, AsyncLLM, SamplingParams
from llmservice_server.ipc.client import EngineDeadError

SETTINGS = {"kv_cache_memory_bytes": 2**22, "threads": 1, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(params=[False, True], ids=["apart", "overlapped"], scope="module", loop_scope="module")
async def llm(tiny_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(tiny_model, overlap=request.param, **SETTINGS) as llm:
        yield llm


async def test_the_answers_are_those_of_the_engine_in_this_process(tiny_model: Path, llm: AsyncLLM) -> None:
    prompts = ["one", "two and", "three", "four", "five", "six"]
    assert await llm.generate(prompts, GREEDY) == LLM(tiny_model, **SETTINGS).generate(prompts, GREEDY, use_tqdm=False)
    whole = (await llm.generate("Hello", GREEDY))[0].outputs[0]
    deltas = [delta async for delta in llm.stream("Hello", GREEDY)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.finish_reason == "length"
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)


async def test_leaving_a_stream_early_frees_its_blocks(llm: AsyncLLM) -> None:
    async with aclosing(llm.stream("Hello", SamplingParams(max_tokens=400, ignore_eos=True))) as stream:
        async for delta in stream:
            assert delta.finish_reason is None
            break
    async with asyncio.timeout(20):
        while llm.metrics.registry.get_sample_value("llmservice_kv_cache_blocks", {"state": "held"}) != 0:
            await asyncio.sleep(0.01)
    aborted = {"finished_reason": "abort"}
    assert llm.metrics.registry.get_sample_value("llmservice_request_success_total", aborted) == 1


async def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="600 prompt tokens"):
        await llm.generate([[5] * 600], GREEDY)


async def test_an_engine_that_cannot_start_says_why(tiny_model: Path) -> None:
    with pytest.raises(EngineDeadError, match="beyond the model's context"):
        async with AsyncLLM(tiny_model, max_model_len=10**6, **SETTINGS):
            pass
