"""The API as its clients see it: raw bodies for what goes wrong, the official client for what goes right."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from llmservice_server.backend.compile_cache import cpu_folder

SLOW = {"model": "tiny", "prompt": ["a"] * 4, "n": 16, "max_tokens": 500, "ignore_eos": True}  # seconds
MESSAGES = [{"role": "user", "content": "How are you?"}]


def _error(answer: Any) -> dict[str, Any]:
    """Checks OpenAI's shape."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = answer["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", b"{", 400, None, None),
        ("completions", b'{"model":"tiny","prompt":"\xff"}', 400, None, None),
        ("completions", {"model": "gpt", "prompt": "a"}, 404, "model", "model_not_found"),
        ("completions", {"model": "tiny", "prompt": ""}, 200, None, None),  # the begin token is a prompt
        ("completions", {"model": "tiny", "prompt": "a", "seed": -5}, 200, None, None),
        ("completions", {"model": "tiny", "prompt": "a", "seed": 2**63 - 1, "n": 2}, 200, None, None),
        ("completions", {"model": "tiny", "prompt": ["a"] * 50_000}, 400, "n", None),
        ("completions", {"model": "tiny", "prompt": []}, 400, "prompt", None),
        ("completions", {"model": "tiny", "prompt": [[]]}, 400, "prompt", None),
        ("completions", {"model": "tiny", "prompt": [1, "a"]}, 400, "prompt", None),
        ("completions", {"model": "tiny", "prompt": [999999]}, 400, "prompt", None),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
        ("completions", {"model": "tiny", "prompt": "a", "n": 99}, 400, "n", None),
        ("completions", {"model": "tiny", "prompt": ["a"] * 20, "n": 16}, 400, "n", None),
        (
            "completions",
            {"model": "tiny", "prompt": "a", "max_tokens": 512},
            400,
            "max_tokens",
            "context_length_exceeded",
        ),
        ("completions", {"model": "tiny", "prompt": [1] * 512}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"model": "tiny", "prompt": "word " * 20_000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"model": "tiny", "prompt": "a", "top_k": 10**30}, 400, "top_k", None),
        ("completions", {"model": "tiny", "prompt": "a", "min_tokens": 2**70}, 400, "min_tokens", None),
        ("completions", {"model": "tiny", "prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_parameter"),
        ("completions", {"model": "tiny", "prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias", None),
        ("completions", {"model": "tiny", "prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids", None),
        ("chat/completions", {"model": "tiny", "messages": []}, 400, "messages", None),
        ("chat/completions", {"model": "tiny", "messages": MESSAGES, "temperature": 3}, 400, "temperature", None),
        ("chat/completions", {"model": "nobody", "messages": MESSAGES}, 404, "model", "model_not_found"),
        ("completions", {"model": "tiny", "prompt": "x" * 900_000}, 400, "prompt", "context_length_exceeded"),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "x" * 900_000}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        ("embeddings", {"model": "tiny", "input": ["a", "x" * 900_000]}, 400, "input", "context_length_exceeded"),
        ("chat/completions", b"x" * (2 * 2**20), 413, None, "request_too_large"),
        ("embeddings", {"model": "tiny", "input": ["a" + " " * 2**20] * 3}, 400, "input", "context_length_exceeded"),
        ("embeddings", b"x" * (17 * 2**20), 413, None, "request_too_large"),
        ("images/generations", {"model": "tiny", "prompt": "a"}, 404, None, None),
    ],
)
def test_bad_input_gets_the_right_status_in_the_shape_of_openai(
    server: Any, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    got, answer = server.post(f"/v1/{path}", body)
    assert got == status
    if status != 200:
        error = _error(answer)
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(server: Any) -> None:
    _, answer = server.post("/v1/completions", {"model": "tiny", "prompt": [5] * 500, "max_tokens": 20})
    assert answer["error"]["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 in the prompt and "
        "20 to be generated): shorten the prompt or lower max_tokens"
    )


def test_every_path_that_can_be_read_answers_head(server: Any) -> None:
    for path in ("/health", "/ready", "/version", "/sizing", "/v1/models", "/v1/models/tiny", "/openapi.json"):
        assert server.request("HEAD", path) == (200, b"")


def test_a_wrong_method_is_refused_in_the_same_shape(server: Any) -> None:
    status, body = server.get("/v1/completions")
    assert status == 405
    assert _error(json.loads(body))["message"] == "GET /v1/completions: Method Not Allowed"


def test_greedy_text_is_the_same_whole_streamed_and_by_ids(server: Any, client: openai.OpenAI) -> None:
    options = {"model": "tiny", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(prompt="Hello you", **options)
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="Hello you", stream=True, **options)
    )
    assert whole.choices[0].text == streamed
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_a_chat_streams_role_words_reason_and_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    whole = client.chat.completions.create(**options)
    assert chunks[0].choices[0].delta.role == "assistant"
    words = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert words == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert not any(chunk.usage for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streams_every_event_can_tell_the_tokens_so_far(server: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "logprobs": 0, "stream": True}
    asked = body | {"ignore_eos": True, "stream_options": options}
    answer = server.send("POST", "/v1/completions", asked).body
    events = [json.loads(line) for line in answer.decode().split("data: ")[1:-1]]
    reported = [len(choice["logprobs"]["tokens"]) for event in events for choice in event["choices"]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*itertools.accumulate(reported), 6]
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


def test_an_answer_goes_on_with_the_assistants_last_message(server: Any, client: openai.OpenAI) -> None:
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    asked = {"messages": messages, "continue_final_message": True}
    ids = server.post("/tokenize", asked)[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1]["prompt"].endswith("The answer")
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(prompt=ids, **options).choices[0].text
    answer = client.chat.completions.create(messages=messages, extra_body={"continue_final_message": True}, **options)
    assert answer.choices[0].message.content == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),  # the last message is the user's
        (
            {
                "messages": [{"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    ],
)
def test_what_a_chat_template_cannot_be_told_is_refused(server: Any, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_without_a_limit_a_chat_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_a_completion_has_sixteen_tokens_or_what_there_is_room_for(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    for prompt, tokens in (([5] * 8, 16), ([5] * 505, 7)):
        answer = client.completions.create(prompt=prompt, **options)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == tokens


def test_a_stop_string_ends_the_text_before_it(server: Any, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 48}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:27]  # somewhere across the tokens' borders
    stopped = client.completions.create(stop=[stop, "never in there"], **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = list(client.completions.create(stop=stop, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text
    assert chunks[-1].choices[0].finish_reason == "stop"
    server.wait_until_idle()


def test_a_stop_token_ends_the_text_and_is_not_shown(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(**options)
    for token in range(5, 1024):
        stopped = client.completions.create(extra_body={"stop_token_ids": [token]}, **options)
        if stopped.choices[0].finish_reason == "stop":
            break
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 32
    assert whole.choices[0].text.startswith(stopped.choices[0].text)


def test_a_seed_repeats_the_text_and_choices_differ(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 16, "n": 3}
    first = client.completions.create(seed=7, **options)
    second = client.completions.create(seed=7, **options)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 48)


def test_several_prompts_get_their_answers_in_order(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    prompts = ["Hello", "one two three", "The answer is"]
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in together.choices] == alone
    streamed = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_the_models_are_listed_with_their_context(client: openai.OpenAI, server: Any) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "alias"]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 512
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert json.loads(server.get("/version")[1])["version"]


def test_a_full_queue_refuses_at_once_with_a_hint(start_server: Callable[..., Any]) -> None:
    server = start_server("--max-num-seqs", "1", "--max-queued-requests", "2").wait_until_ready()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 3}
    assert server.post("/v1/completions", body | {"n": 4})[0] == 429  # three would have to wait

    with ThreadPoolExecutor() as threads:
        statuses = list(threads.map(lambda _: server.post("/v1/completions", body)[0], range(4)))
    assert sorted(statuses) == [200, 429, 429, 429]
    assert server.metric("llmservice_request_rejected_total", reason="queue_full") == 4
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="a", n=4)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    server.wait_until_idle()
    assert server.post("/v1/completions", body | {"max_tokens": 1})[0] == 200


def test_a_request_past_its_deadline_ends_with_504(shared_server: Callable[..., Any]) -> None:
    server = shared_server("--request-timeout", "500ms")
    status, answer = server.post("/v1/completions", SLOW)
    assert status == 504
    assert "deadline" in _error(answer)["message"]
    server.wait_until_idle()
    assert server.metric("llmservice_request_success_total", finished_reason="error") >= 1


def _usage_report(server: Any, path: str, body: dict[str, Any], *, asks: bool) -> tuple[str | None, bytes]:
    """The header and the answer."""
    answer = server.send("POST", path, body, {"x-llmservice-usage": "1"} if asks else {})
    return answer.headers["x-llmservice-usage"], answer.body


def test_the_tokens_of_a_request_are_reported_where_it_asks_for_it(server: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": [83, 84] * 10, "max_tokens": 3, "ignore_eos": True}
    assert _usage_report(server, "/v1/completions", body, asks=False)[0] is None
    assert _usage_report(server, "/v1/completions", body, asks=True)[0] == "20 16 3"
    assert b"llmservice-usage" not in _usage_report(server, "/v1/completions", body | {"stream": True}, asks=False)[1]
    header, events = _usage_report(server, "/v1/completions", body | {"stream": True}, asks=True)
    assert header is None
    assert events.endswith(b"\n\n: llmservice-usage 20 16 3\n\ndata: [DONE]\n\n")
    embedded = {"model": "tiny", "input": [[7] * 4, [7] * 5]}
    assert _usage_report(server, "/v1/embeddings", embedded, asks=True)[0] == "9 0 0"


def test_a_deadline_in_the_middle_of_a_stream_ends_it_with_an_error_event(shared_server: Callable[..., Any]) -> None:
    server = shared_server("--request-timeout", "500ms")
    body = SLOW | {"stream": True}
    answer = server.send("POST", "/v1/completions", body)
    assert answer.status == 200  # it had begun
    *begun, last = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert begun
    assert "deadline" in _error(json.loads(last.removeprefix("data: ")))["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_its_blocks_back(server: Any, stream: bool) -> None:
    aborted = server.metric("llmservice_request_success_total", finished_reason="abort")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": stream}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        server.wait_for(lambda: server.metric("llmservice_kv_cache_blocks", state="held") > 0 or None)
    server.wait_until_idle()
    server.wait_for(
        lambda: server.metric("llmservice_request_success_total", finished_reason="abort") == aborted + 8 or None
    )


def test_a_client_that_hangs_up_in_the_middle_of_its_body_harms_nobody(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a"})[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", SLOW), ("/v1/embeddings", {"model": "tiny", "input": ["a"] * 2048})],
)
def test_a_client_that_hangs_up_while_it_waits_has_the_status_499(server: Any, path: str, body: dict[str, Any]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    content, name = json.dumps(body).encode(), f"hangs-up-{path[4:]}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
    line = server.wait_for(lambda: next((line for line in server.log if line.get("request_id") == name), None))
    assert line["status"] == 499
    server.wait_until_idle()


def test_the_access_log_has_the_figures_and_never_the_words(server: Any, client: openai.OpenAI) -> None:
    secret = "a secret that nobody may read"
    answer = client.completions.create(
        model="tiny", prompt=secret, max_tokens=4, user="Bob", extra_headers={"x-request-id": "trace-77"}
    )
    line = server.wait_for(lambda: next((line for line in server.log if line.get("request_id") == "trace-77"), None))
    assert answer.usage is not None
    assert line["prompt_tokens"] == answer.usage.prompt_tokens
    assert line["completion_tokens"] == 4
    assert line["lane"] == "interactive"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert 0 < line["ttft_s"] <= line["duration_s"]
    log = json.dumps(server.log)
    assert "secret" not in log
    assert "Bob" not in log


def test_a_request_id_is_echoed_unless_it_could_not_be_logged(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response
    echoed = raw.create(model="tiny", prompt="a", max_tokens=1, extra_headers={"x-request-id": "abc"})
    assert echoed.headers["x-request-id"] == "abc"
    replaced = raw.create(model="tiny", prompt="a", max_tokens=1, extra_headers={"x-request-id": "a b"})
    assert replaced.headers["x-request-id"] not in ("a b", "")


def test_the_server_tells_its_shape_and_its_numbers(server: Any) -> None:
    status, body = server.get("/sizing")
    reported = json.loads(body)
    assert status == 200
    assert reported["max_num_seqs"] >= 1
    assert reported["num_blocks"] * reported["block_size"] >= reported["max_model_len"]
    assert {"layers", "heads", "kvHeads", "hiddenSize", "vocabSize"} <= set(reported["shape"])


def test_a_second_start_compiles_no_kernel(server: Any, start_server: Callable[..., Any], tmp_path: Path) -> None:
    server.wait_until_ready()
    kernels = cpu_folder()
    assert kernels is not None
    (tmp_path / "numba").symlink_to(kernels)  # where the first start kept its kernels
    second = start_server("--compile-cache", str(tmp_path)).wait_until_ready()
    reported = json.loads(second.get("/sizing")[1])
    assert (reported["kernels_compiled"], reported["compile_s"]) == (0, 0)
    assert reported["kernels_loaded"] > 0
    assert reported["load_s"] > 0
    assert second.metric("llmservice_kernels", source="loaded") == reported["kernels_loaded"]
    assert second.metric("llmservice_kernels", source="compiled") == 0


def test_unknown_parameters_are_ignored_named_and_counted(server: Any) -> None:
    before = server.metric("llmservice_request_ignored_parameters_total")
    names = ["temprature", "x" * 100, "naïve, new\nline", *(f"f{index}" for index in range(20))]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "user": "u", "store": False} | dict.fromkeys(names, 1)
    ignored = server.send("POST", "/v1/completions", body).headers["x-ignored-parameters"].split(", ")
    assert ignored == ["temprature", "x" * 64, "na?ve??new?line", *(f"f{index}" for index in range(5))]
    assert server.metric("llmservice_request_ignored_parameters_total") == before + len(names)
    stream = {"model": "tiny", "prompt": "a", "stream": True, "stream_options": {"new": 1}}
    assert server.send("POST", "/v1/completions", stream).headers["x-ignored-parameters"] == "stream_options.new"


def test_strict_parameters_refuse_what_is_unknown_and_browsers_of_one_origin_may_call(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--strict-parameters", "--cors-allow-origin", "https://chat.example").wait_until_ready()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    status, answer = server.post("/v1/completions", body | {"temprature": 1})
    assert (status, answer["error"]["param"]) == (400, "temprature")
    assert answer["error"]["message"] == "Unrecognized request argument supplied: temprature"
    assert server.post("/v1/completions", body | {"user": "u"})[0] == 200
    for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://other.example", None)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = server.send("OPTIONS", "/v1/completions", None, headers)
        assert answer.headers["access-control-allow-origin"] == allowed


def test_a_template_and_a_tokenizer_of_their_own(
    start_server: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, other)
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").unlink()
    server = start_server("--chat-template", str(template), "--tokenizer", str(other), model=model).wait_until_ready()
    ids = server.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1]["prompt"] == "[How are you?]"
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "response_format": {"type": "json_object"}}
    assert server.post("/v1/chat/completions", chat)[0] == 200
