"""Offline use: prompts in, answers out, in order, and the engine idle afterwards."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from llmservice_server import LLM, AsyncLLM, SamplingParams
from llmservice_server.ipc.client import EngineDeadError
from llmservice_server.sampling.grammar import regex_grammar

SETTINGS = {"kv_cache_memory_bytes": 2**22, "threads": 1, "max_num_seqs": 4}
IDS: Any = np.array([5, 6, 7])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, **SETTINGS)


def test_results_come_in_the_order_of_the_prompts_whatever_the_batch(llm: LLM) -> None:
    prompts = [f"{word} and" for word in ("one", "two", "three", "four", "five", "six", "seven")]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.prompt for result in together] == prompts
    assert [result.outputs for result in together] == [
        llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs for prompt in prompts
    ]
    assert not llm.engine.has_work
    assert llm.engine.pool.num_held == 0


def test_a_prompt_as_text_and_as_its_token_ids_is_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello you")
    by_text, by_ids, by_list = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in ("Hello you", ids, [ids]))
    assert by_text.outputs == by_ids.outputs == by_list.outputs
    assert by_ids.prompt is None
    assert by_ids.prompt_token_ids == tuple(ids) == by_text.prompt_token_ids
    assert by_text.outputs[0].finish_reason == "length"
    assert len(by_text.outputs[0].token_ids) == 12


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, n=2, seed=4, ignore_eos=True)]
    first, second = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.token_ids) for output in first.outputs + second.outputs] == [3, 5, 5]
    assert second.outputs[0].token_ids != second.outputs[1].token_ids
    assert llm.generate("b", params[1], use_tqdm=False)[0].outputs == second.outputs


def test_log_probabilities_of_prompt_and_answer_are_returned(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0, n=2)
    [result] = llm.generate("Hello you", params, use_tqdm=False)
    assert tuple(entry.token_id for entry in result.prompt_logprobs) == result.prompt_token_ids[1:]
    for output in result.outputs:
        assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
        assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in output.logprobs)  # greedy
    assert llm.generate("Hello you", GREEDY, use_tqdm=False)[0].outputs[0].logprobs == ()


def test_a_stop_text_ends_the_answer_before_it(llm: LLM) -> None:
    whole = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)[0].outputs[0].text
    stop = whole[20:27]
    stopped = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=48, stop=stop), use_tqdm=False)[0]
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", [5] * 600], GREEDY, "prompt 1: 600 prompt tokens"),
        ([5, "a"], GREEDY, "mixes token ids with texts"),
        ([[]], GREEDY, "prompt 0: the prompt has no tokens"),
        ([99999], GREEDY, "outside the model's vocabulary"),
        (["a", "b"], [GREEDY], "1 sampling parameters for 2 prompts"),
        ({"prompt_token_ids": [1]}, GREEDY, "prompts is of the type dict, expected a text"),
        ([{"prompt": "a"}], GREEDY, "prompt 0 is {'prompt': 'a'}, expected a text"),
        (b"a", GREEDY, "prompts is of the type bytes"),
        (None, GREEDY, "prompts is of the type NoneType"),
        ([[1, 2.5]], GREEDY, r"prompt 0 is \[1, 2.5\], expected a text"),
        ("\ud800", GREEDY, "expected a text"),
        ("a", {"max_tokens": 3}, "type str, expected SamplingParams"),
        ("a", [{"max_tokens": 3}], "type dict, expected SamplingParams"),
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_is_computed(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


def test_any_iterable_of_prompts_and_any_integers_will_do(llm: LLM) -> None:
    assert [result.prompt for result in llm.generate((prompt for prompt in ("a", "b")), GREEDY, use_tqdm=False)] == [
        "a",
        "b",
    ]
    by_array, by_arrays, by_list = (llm.generate(ids, GREEDY, use_tqdm=False) for ids in (IDS, [IDS], IDS.tolist()))
    assert by_array == by_arrays == by_list


def test_an_answer_with_a_grammar_ends_with_every_token_that_ends_others(tiny_model: Path, tmp_path: Path) -> None:
    """tokenizer_config.json alone names the token that ends a turn, as that of a fine-tuned model."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": 0}))
    llm = LLM(folder, **SETTINGS)
    (end,) = llm.tokenizer.eos_token_ids - {0}
    params = SamplingParams(max_tokens=8, logit_bias={end: 100.0}, grammar=regex_grammar("[a-z]*"))
    (answer,) = llm.generate([IDS], params, use_tqdm=False)[0].outputs
    assert (answer.finish_reason, answer.token_ids) == ("stop", ())


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_bar_shows_progress_and_the_rate(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    assert "3/3" in capsys.readouterr().err
    llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_the_metrics_count_what_was_generated(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SETTINGS)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert llm.metrics.registry.get_sample_value("llmservice_generation_tokens_total") == 24
    assert llm.metrics.registry.get_sample_value("llmservice_time_to_first_token_seconds_count") == 2
    assert llm.metrics.registry.get_sample_value("llmservice_num_requests_running", {"lane": "interactive"}) == 0


@pytest_asyncio.fixture(params=[False, True], ids=["apart", "overlapped"], scope="module", loop_scope="module")
async def async_llm(tiny_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(tiny_model, overlap=request.param, **SETTINGS) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_answers_are_those_of_the_engine_in_this_process(tiny_model: Path, async_llm: AsyncLLM) -> None:
    prompts = ["one", "two and", "three", "four", "five", "six"]
    assert await async_llm.generate(prompts, GREEDY) == LLM(tiny_model, **SETTINGS).generate(
        prompts, GREEDY, use_tqdm=False
    )
    whole = (await async_llm.generate("Hello", GREEDY))[0].outputs[0]
    deltas = [delta async for delta in async_llm.stream("Hello", GREEDY)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.finish_reason == "length"
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_leaving_a_stream_early_frees_its_blocks(async_llm: AsyncLLM) -> None:
    async with aclosing(async_llm.stream("Hello", SamplingParams(max_tokens=400, ignore_eos=True))) as stream:
        async for delta in stream:
            assert delta.finish_reason is None
            break
    async with asyncio.timeout(20):
        while async_llm.metrics.registry.get_sample_value("llmservice_kv_cache_blocks", {"state": "held"}) != 0:
            await asyncio.sleep(0.01)
    aborted = {"finished_reason": "abort"}
    assert async_llm.metrics.registry.get_sample_value("llmservice_request_success_total", aborted) == 1


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(async_llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="600 prompt tokens"):
        await async_llm.generate([[5] * 600], GREEDY)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_parameters_of_a_wrong_type_are_refused_and_the_engine_serves_on(async_llm: AsyncLLM) -> None:
    wrongs: list[dict[str, Any]] = [
        {"logprobs": True},
        {"top_k": 1.5},
        {"stop": [5]},
        {"stop_token_ids": ["a"]},
        {"temperature": None},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            await async_llm.generate("Hello", SamplingParams(**wrong))
    [result] = await async_llm.generate(IDS, SamplingParams(top_k=-1, max_tokens=1, stop_token_ids=(5,)))
    assert result.prompt_token_ids == tuple(IDS.tolist())


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_cannot_start_reports_why(tiny_model: Path) -> None:
    with pytest.raises(EngineDeadError, match="beyond the model's context"):
        async with AsyncLLM(tiny_model, max_model_len=10**6, **SETTINGS):
            pass
