"""Offline use in this process: prompts in, answers out, in order, and the engine idle afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmservice_server import LLM, SamplingParams

SETTINGS = {"kv_cache_memory_bytes": 2**22, "threads": 1, "max_num_seqs": 4}
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
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_is_computed(
    llm: LLM, prompts: list[str], params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


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


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, llmservice_server; assert 'torch' not in sys.modules; llmservice_server.SamplingParams()"
    program += "; assert 'torch' not in sys.modules; llmservice_server.LLM; assert 'fastapi' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
