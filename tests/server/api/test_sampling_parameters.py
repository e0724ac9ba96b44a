"""The sampling parameters and the probabilities, through the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from llmservice_server.text.tokenizer import Tokenizer

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hello you", "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How are you?"}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _reference(model: Path, ids: list[int]) -> torch.Tensor:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    with torch.inference_mode():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(
            torch.tensor([ids])
        ).logits
    return logits[0].log_softmax(-1)


def test_an_echoed_prompt_and_its_answer_have_the_probabilities_of_transformers(
    client: openai.OpenAI, tiny_model: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    choice = client.completions.create(echo=True, logprobs=3, **COMPLETION).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    ids = [*tokenizer.encode("Hello you")]
    expected = _reference(tiny_model, ids)
    assert choice.text.startswith("Hello you")
    assert told.tokens[: len(ids)] == [tokenizer.token_bytes.text(token) for token in ids]
    assert told.token_logprobs[0] is None
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert told.token_logprobs[place] == pytest.approx(float(row[ids[place]]), abs=1e-4)
        assert max(told.top_logprobs[place].values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert told.tokens[place] in told.top_logprobs[place]
    assert len(told.tokens) == len(ids) + 12
    for token, offset in list(zip(told.tokens, told.text_offset, strict=True))[1:]:
        assert token.startswith("bytes:") or choice.text[offset : offset + len(token)] == token


def test_streamed_probabilities_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(logprobs=2, echo=True, n=2, **COMPLETION)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    offsets: list[list[int]] = [[], []]
    for chunk in client.completions.create(logprobs=2, echo=True, n=2, stream=True, **COMPLETION):
        for choice in chunk.choices:
            assert choice.logprobs is not None
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert [(choice.logprobs.tokens, choice.logprobs.text_offset) for choice in whole.choices if choice.logprobs] == (
        list(zip(tokens, offsets, strict=True))
    )


def test_a_chat_tells_each_tokens_bytes_and_its_likeliest_rivals(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(logprobs=True, top_logprobs=4, **CHAT).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert [rival.logprob for rival in entry.top_logprobs] == sorted(
            (rival.logprob for rival in entry.top_logprobs), reverse=True
        )
    streamed = []
    for chunk in client.chat.completions.create(logprobs=True, top_logprobs=4, stream=True, **CHAT):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == choice.logprobs.content


def test_without_being_asked_nothing_is_told(client: openai.OpenAI) -> None:
    assert client.completions.create(**COMPLETION).choices[0].logprobs is None
    assert client.chat.completions.create(**CHAT).choices[0].logprobs is None


def test_an_echo_without_probabilities_is_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    plain = client.completions.create(**COMPLETION).choices[0].text
    assert client.completions.create(echo=True, **COMPLETION).choices[0].text == "Hello you" + plain
    several = client.completions.create(echo=True, **COMPLETION | {"prompt": ["Hello you", "one"], "n": 2})
    assert [choice.text.startswith(prompt) for prompt in ("Hello you", "one") for choice in several.choices].count(
        True
    ) == 4


def test_a_prompt_can_be_scored_without_an_answer(client: openai.OpenAI, server: Any) -> None:
    options = COMPLETION | {"echo": True, "logprobs": 1}
    with_answer = client.completions.create(**options).choices[0]
    scored = client.completions.create(**options | {"max_tokens": 0})
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason) == ("Hello you", "length")
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert choice.logprobs is not None
    assert with_answer.logprobs is not None
    assert choice.logprobs.token_logprobs == (with_answer.logprobs.token_logprobs or [])[: scored.usage.prompt_tokens]
    [*_, last] = client.completions.create(stream=True, **options | {"max_tokens": 0})
    assert last.choices[0].text == "Hello you"
    server.wait_until_idle()


def test_a_bias_rules_a_token_in_or_out(client: openai.OpenAI, tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    token = tokenizer.encode("the", add_special_tokens=False)[0]
    assert client.completions.create(logit_bias={str(token): 100}, **COMPLETION).choices[0].text == "the" * 12
    told = client.completions.create(logprobs=0, **COMPLETION).choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    first = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes.text(token) == told.tokens[0])
    without = client.completions.create(logprobs=0, logit_bias={str(first): -100}, **COMPLETION).choices[0].logprobs
    assert without is not None
    assert without.tokens is not None
    assert told.tokens[0] not in without.tokens


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI) -> None:
    biased = COMPLETION | {"logit_bias": {"70": 10, "71": 9.5, "72": 9}, "logprobs": 0}

    def tokens(**parameters: Any) -> list[str]:
        told = client.completions.create(**biased, **parameters).choices[0].logprobs
        assert told is not None
        return told.tokens or []

    assert len(set(tokens())) < 12
    assert len(set(tokens(presence_penalty=2.0, frequency_penalty=2.0))) > len(set(tokens()))
    assert len(set(tokens(extra_body={"repetition_penalty": 10.0}))) >= len(set(tokens()))


def test_min_tokens_outlast_stop_tokens_and_stop_strings(client: openai.OpenAI) -> None:
    whole = client.completions.create(logprobs=0, **COMPLETION).choices[0]
    stop = whole.text[4:6]
    stopped = client.completions.create(stop=stop, **COMPLETION)
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 12
    patient = client.completions.create(stop=stop, extra_body={"min_tokens": 12}, **COMPLETION)
    assert patient.choices[0].text == whole.text
    assert patient.choices[0].finish_reason == "length"


def test_a_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    text = client.completions.create(**COMPLETION).choices[0].text
    stop = text[5:9]
    kept = client.completions.create(stop=stop, extra_body={"include_stop_str_in_output": True}, **COMPLETION)
    assert kept.choices[0].text == text[: text.index(stop) + 4]
    assert kept.choices[0].finish_reason == "stop"


def test_min_p_of_one_is_greedy(client: openai.OpenAI) -> None:
    greedy = client.completions.create(**COMPLETION).choices[0].text
    drawn = client.completions.create(**COMPLETION | {"temperature": 1.5}, extra_body={"min_p": 1.0})
    assert drawn.choices[0].text == greedy


async def test_the_asynchronous_client_gets_the_same(server: Any, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "seed": 5, "temperature": 1.0, "max_tokens": 10}
    theirs = client.chat.completions.create(**CHAT | options).choices[0]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
        text, told = "", []
        async for chunk in await other.chat.completions.create(stream=True, **CHAT | options):
            text += chunk.choices[0].delta.content or ""
            told += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert theirs.logprobs is not None
    assert (text, told) == (theirs.message.content, theirs.logprobs.content)
