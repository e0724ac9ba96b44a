"""The sampling parameters and the log-probabilities, through the official client."""

from __future__ import annotations

import json
import shutil
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
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    ids = [*tokenizer.encode("Hello you")]
    expected = _reference(tiny_model, ids)
    assert choice.text.startswith("Hello you")
    assert logprobs.tokens[: len(ids)] == [tokenizer.token_bytes.text(token) for token in ids]
    assert logprobs.token_logprobs[0] is None
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert logprobs.token_logprobs[place] == pytest.approx(float(row[ids[place]]), abs=1e-4)
        assert max(logprobs.top_logprobs[place].values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert logprobs.tokens[place] in logprobs.top_logprobs[place]
    assert len(logprobs.tokens) == len(ids) + 12
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
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


def test_a_chat_has_the_bytes_and_the_top_tokens_of_each_token(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(logprobs=True, top_logprobs=4, **CHAT).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    streamed = []
    for chunk in client.chat.completions.create(logprobs=True, top_logprobs=4, stream=True, **CHAT):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == choice.logprobs.content


def test_log_probabilities_are_returned_on_request_only(client: openai.OpenAI) -> None:
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
    logprobs = client.completions.create(logprobs=0, **COMPLETION).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    first = next(
        token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes.text(token) == logprobs.tokens[0]
    )
    without = client.completions.create(logprobs=0, logit_bias={str(first): -100}, **COMPLETION).choices[0].logprobs
    assert without is not None
    assert without.tokens is not None
    assert logprobs.tokens[0] not in without.tokens


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI) -> None:
    biased = COMPLETION | {"logit_bias": {"70": 10, "71": 9.5, "72": 9}, "logprobs": 0}

    def tokens(**parameters: Any) -> list[str]:
        logprobs = client.completions.create(**biased, **parameters).choices[0].logprobs
        assert logprobs is not None
        return logprobs.tokens or []

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
        text, logprobs = "", []
        async for chunk in await other.chat.completions.create(stream=True, **CHAT | options):
            text += chunk.choices[0].delta.content or ""
            logprobs += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert theirs.logprobs is not None
    assert (text, logprobs) == (theirs.message.content, theirs.logprobs.content)


def test_only_allowed_tokens_are_generated_and_bad_words_are_not(client: openai.OpenAI, tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    allowed = tokenizer.encode("one two three", add_special_tokens=False)
    options: dict[str, Any] = COMPLETION | {"temperature": 1.0, "seed": 1, "logprobs": 0}
    answer = client.completions.create(extra_body={"allowed_token_ids": allowed}, **options).choices[0]
    assert answer.logprobs is not None
    assert set(answer.logprobs.tokens or ()) <= {tokenizer.token_bytes.text(token) for token in allowed}
    bad = [tokenizer.token_bytes.text(token) for token in set(allowed[1:])]
    body = {"allowed_token_ids": allowed, "bad_words": [word.strip() for word in bad]}
    answer = client.completions.create(extra_body=body, **options).choices[0]
    assert answer.logprobs is not None
    assert not set(answer.logprobs.tokens or ()) & set(bad)


def test_a_bad_word_of_several_tokens_is_never_completed(client: openai.OpenAI, tiny_model: Path) -> None:
    allowed = Tokenizer.load(tiny_model).encode("zx", add_special_tokens=False)
    assert len(allowed) == 2
    body: dict[str, Any] = {"allowed_token_ids": allowed, "ignore_eos": True}
    options = COMPLETION | {"temperature": 2.0, "seed": 3, "n": 8, "max_tokens": 48}
    assert "zx" in "".join(choice.text for choice in client.completions.create(extra_body=body, **options).choices)
    answer = client.completions.create(extra_body=body | {"bad_words": ["zx"]}, **options)
    assert not any("zx" in choice.text for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 * 48


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10**6]},
        {"allowed_token_ids": [1], "min_tokens": 2},  # the end of sequence
        {"allowed_token_ids": [5], "response_format": {"type": "json_object"}},
        {"bad_words": ["{"], "response_format": {"type": "json_object"}},
        {"bad_words": [""]},
        {"best_of": 2, "stream": True},
        {"best_of": 2, "n": 3},
        {"prompt_logprobs": 1, "stream": True},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"priority": 2**40},
        {"priority": "urgent"},
    ],
)
def test_what_cannot_be_sampled_is_refused(server: Any, fields: dict[str, Any]) -> None:
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2} | fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_best_of_returns_the_likeliest_answers(server: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": ["Hello", "one two"],
        "max_tokens": 6,
        "seed": 5,
        "logprobs": 0,
        "ignore_eos": True,
    }

    def means(answer: Any) -> list[float]:
        return [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in answer["choices"]]

    _, all_of_them = server.post("/v1/completions", body | {"n": 4})
    _, best = server.post("/v1/completions", body | {"n": 2, "best_of": 4})
    expected = [mean for start in (0, 4) for mean in sorted(means(all_of_them)[start : start + 4], reverse=True)[:2]]
    assert means(best) == pytest.approx(expected)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 2 * 4 * 6


def test_prompt_logprobs_are_those_of_the_echo(server: Any) -> None:
    body = {"model": "tiny", "prompt": "Hello you", "max_tokens": 1, "temperature": 0}
    echoed = server.post("/v1/completions", body | {"echo": True, "logprobs": 2})[1]["choices"][0]["logprobs"]
    reported = server.post("/v1/completions", body | {"prompt_logprobs": 2})[1]["choices"][0]["prompt_logprobs"]
    assert reported[0] is None
    for place, entry in enumerate(reported[1:], 1):
        likely = {each["decoded_token"]: each["logprob"] for each in entry.values()}
        assert likely == pytest.approx(echoed["top_logprobs"][place])
        assert sorted(each["rank"] for each in entry.values() if each["rank"] is not None) == [1, 2]
    chat = server.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0})[1]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_only_the_last_tokens_of_a_truncated_prompt_count(server: Any) -> None:
    ids = list(range(5, 25))
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    short = server.post("/v1/completions", body | {"prompt": ids[-3:]})[1]
    cut = server.post("/v1/completions", body | {"prompt": ids, "truncate_prompt_tokens": 3})[1]
    assert (cut["usage"], cut["choices"]) == (short["usage"], short["choices"])
    long = server.post("/v1/completions", body | {"prompt": "word " * 2000, "truncate_prompt_tokens": -1})[1]
    assert long["usage"]["prompt_tokens"] == 508
    vectors = [
        server.post("/v1/embeddings", {"model": "tiny", "input": given})[1]["data"][0]["embedding"]
        for given in (ids[-3:],)
    ]
    cut = server.post("/v1/embeddings", {"model": "tiny", "input": ids, "truncate_prompt_tokens": 3})[1]
    assert cut["data"][0]["embedding"] == pytest.approx(vectors[0], abs=1e-5)


def test_an_echo_is_what_is_left_of_a_truncated_prompt(server: Any, tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    texts = ["Hello you <|user|>", "one two three four five six seven"]
    [whole, cut] = tokenizer.encode_all(texts)
    left = tokenizer.decode(cut[-len(whole) :])
    body = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 0, "truncate_prompt_tokens": len(whole)}
    choices = server.post("/v1/completions", body | {"prompt": texts})[1]["choices"]
    assert [choice["text"] for choice in choices] == [texts[0], left]
    written = choices[1]["logprobs"]
    assert all(left.startswith(*place) for place in zip(written["tokens"], written["text_offset"], strict=True))
    by_ids = server.post("/v1/completions", body | {"prompt": cut})[1]["choices"][0]
    assert (by_ids["text"], by_ids["logprobs"]["text_offset"]) == (left, written["text_offset"])


def test_special_tokens_are_shown_where_they_are_not_skipped(server: Any, tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    [special] = tokenizer.encode("<|user|>", add_special_tokens=False)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "allowed_token_ids": [special]}
    assert server.post("/v1/completions", body)[1]["choices"][0]["text"] == ""
    shown = server.post("/v1/completions", body | {"skip_special_tokens": False})[1]["choices"][0]["text"]
    assert shown == "<|user|>" * 3


def test_generation_config_sets_what_requests_do_not(start_server: Any, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "greedy"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.0, "top_k": None}))
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "seed": 2}
    server = start_server(model=model).wait_until_ready()
    answers = [server.post("/v1/completions", body | fields)[1]["choices"] for fields in ({}, {"temperature": 0})]
    assert answers[0] == answers[1]
    assert server.post("/v1/completions", body | {"temperature": 1.0})[1]["choices"] != answers[0]
    (model / "generation_config.json").write_text(json.dumps(config | {"temperature": "hot"}))
    broken = start_server(model=model)
    assert broken.wait_for_exit() == 1
    assert "generation_config.json: temperature" in "".join(broken.errors)
