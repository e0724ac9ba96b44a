"""Invalid bodies are refused with a sentence that names the parameter; nothing is ignored silently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.http.body import parse
from llmservice_server.http.error import ApiError, validation_error
from llmservice_server.http.protocol.base import unknown_fields
from llmservice_server.http.protocol.chat import ChatRequest
from llmservice_server.http.protocol.completions import CompletionRequest

COMPLETION = {"model": "tiny", "prompt": "Hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def parse_completion(body: bytes) -> CompletionRequest:
    return _parse(body, CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    return _parse(body, ChatRequest)


def _parse(body: bytes, kind: Any) -> Any:
    try:
        return parse(body, kind)
    except RequestValidationError as error:
        raise validation_error(error.errors(), error.body) from error


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _status(parse: Any, body: bytes) -> int:
    try:
        parse(body)
    except ApiError as error:
        return error.status
    return 200


def _refusal(parse: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'model': 1}", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', 'duplicate key "prompt"'),
        (b'{"model": "tiny", "prompt": "a", "metadata": {"x": [{"y": 1, "y": 2}]}}', 'duplicate key "y"'),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature is inf, expected a finite number"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    assert words in _refusal(parse_completion, body).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "7"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("top_k", 2**31),
        ("n", 0),
        ("n", 17),
        ("n", 10**30),
        ("seed", 2**63),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "x" * 257),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("user", 7),
        ("model", 5),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", [[1, -2]]),
        ("prompt", [["a"]]),
        ("prompt", [None]),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "x"),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 2**70),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("stop_token_ids", [2**31]),
        ("logit_bias", {str(2**31): 1}),
        ("prompt", [2**31]),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", 1),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_name(field: str, value: Any) -> None:
    refusal = _refusal(parse_completion, _encode(COMPLETION | {field: value}))
    assert refusal.param == field
    assert field in refusal.message


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], r"messages[0]"),
        ([{"role": "user"}], "you must provide messages[0].content"),
        ([{"content": "a"}], "you must provide messages[0].role"),
        ([{"role": "user", "content": None}], "you must provide messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": 1, "content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "expected system, developer, user, assistant or tool"),
        ([{"role": "tool", "content": "a"}], "tool_call_id belongs to messages of the role tool"),
        ([{"role": "user", "content": "a", "tool_call_id": "x"}], "tool_call_id belongs to messages of the role tool"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "you must provide messages[0].content[0].text"),
        ([{"role": "user", "content": "a", "reasoning_content": "b"}], "reasoning_content is the assistant's"),
        ([{"role": "assistant", "tool_calls": []}], "you must provide messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "you must provide messages[0].tool_calls[0].id"),
    ],
)
def test_messages_of_a_wrong_shape_are_refused_with_their_place(messages: Any, words: str) -> None:
    refusal = _refusal(parse_chat, _encode(CHAT | {"messages": messages}))
    assert words in refusal.message
    assert refusal.param is not None
    assert refusal.param.startswith("messages")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [*ChatRequest.model_fields, "prompt", "x"]


@settings(deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON))
@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_whatever_the_fields_hold_the_worst_answer_is_a_400(parse: Any, fields: dict[str, Any]) -> None:
    for base in ({}, COMPLETION, CHAT):
        assert _status(parse, _encode(base | fields)) in (200, 400)


@settings(deadline=None)
@given(body=st.binary(max_size=60))
def test_whatever_the_bytes_are_the_worst_answer_is_a_400(body: bytes) -> None:
    assert _refusal(parse_chat, body).message


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(field: str) -> None:
    refusal = _refusal(parse_completion, _encode({name: value for name, value in COMPLETION.items() if name != field}))
    assert (refusal.param, refusal.code) == (field, "missing_required_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("store", 0),
    ],
)
def test_a_known_parameter_that_would_change_the_answer_is_refused_as_not_supported_yet(field: str, value: Any) -> None:
    refusal = _refusal(parse_completion, _encode(COMPLETION | {field: value}))
    assert (refusal.param, refusal.code) == (field, "unsupported_parameter")
    assert "not supported yet" in refusal.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", "x"), ("tool_choice", "required"), ("functions", [{}]), ("modalities", ["audio"])],
)
def test_chat_parameters_are_refused_likewise(field: str, value: Any) -> None:
    assert _refusal(parse_chat, _encode(CHAT | {field: value})).param == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 99}, "n is 99, expected less than or equal to 16"),
        ({"max_tokens": "7"}, "max_tokens is '7', expected an integer"),
        ({"temperature": True}, "temperature is true, expected a number"),
        ({"priority": "urgent"}, "priority is 'urgent', expected interactive or batch, or an integer"),
        ({"messages": {}}, "messages is an object, expected a list"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop: list should have at most 4 items after validation, not 5"),
        ({"tool_choice": {"type": "function"}}, "you must provide tool_choice.function"),
        ({"model": None}, "you must provide model"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type is 'xml', expected text, json_object or json_schema",
        ),
    ],
)
def test_an_error_says_what_was_given_and_what_was_expected(fields: dict[str, Any], message: str) -> None:
    assert _refusal(parse_chat, _encode(CHAT | fields)).message == message


def test_unknown_fields_are_found_at_every_depth() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "en"}], "mood": "x"}]
    request = parse_chat(_encode({"model": "tiny", "messages": messages, "temprature": 0.5, "stream_options": None}))
    assert list(unknown_fields(request)) == ["temprature", "messages.mood", "messages.content.lang"]
    assert list(unknown_fields(parse_chat(_encode(CHAT | {"store": False, "user": "u", "verbosity": "low"})))) == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": "x" * 10_000}, "metadata"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop": ["x" * 10_000, 1]}, "stop"),
        ({"x" * 10_000: 1, "n": "y" * 10_000}, "n"),
        ({"messages": [{"role": "x" * 10_000, "content": ""}]}, "messages"),
        ({"chat_template_kwargs": {"x": 2**64}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [{"y": -(2**63) - 1}]}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 10_000}}]}, "tools"),
        ({"logit_bias": {str(token): "x" for token in range(100_000)}}, "logit_bias"),
    ],
)
def test_an_error_holds_at_most_200_characters_of_the_body(fields: dict[str, Any], param: str) -> None:
    refusal = _refusal(parse_chat, _encode(CHAT | fields))
    assert refusal.param == param
    assert len(refusal.message) < 400


def test_values_that_ask_for_nothing_are_taken() -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": None,
        "max_tokens": None,
        "stop": None,
    }
    request = parse_chat(_encode(CHAT | neutral))
    assert (request.token_limit, request.stop_strings) == (None, [])


def test_fields_without_effect_are_accepted() -> None:
    notes = {"user": "u", "metadata": {"run": "7"}, "prompt_cache_key": "k", "safety_identifier": "s"}
    request = parse_chat(_encode(CHAT | notes | {"prompt_cache_options": {"mode": "implicit"}}))
    assert (request.metadata, [*unknown_fields(request)]) == ({"run": "7"}, [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {}}, "expected exactly one of json, json_object, regex, choice, grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "expected exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: list should have at least 1 item"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "not both"),
        ({"guided_choice": ["a"]}, "guided_choice is not supported: use structured_outputs.choice"),
    ],
)
def test_what_an_answer_cannot_be_held_to_is_refused(fields: dict[str, Any], words: str) -> None:
    assert words in _refusal(parse_completion, _encode(COMPLETION | fields)).message


def test_a_call_without_arguments_may_have_an_empty_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": ""}}
    request = parse_chat(_encode(CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    assert request.messages[0].as_template_input()["tool_calls"][0]["function"]["arguments"] == {}


def test_an_answer_of_the_server_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None}
    request = parse_chat(_encode(CHAT | {"messages": [*CHAT["messages"], answer]}))
    assert request.messages[1].as_template_input() == {"role": "assistant", "content": "Hi"}


def test_an_answer_that_is_only_reasoning_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    request = parse_chat(_encode(CHAT | {"messages": [*CHAT["messages"], answer]}))
    expected = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert request.messages[1].as_template_input() == expected


def test_text_parts_are_kept_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = parse_chat(_encode(CHAT | {"messages": [{"role": "developer", "content": parts}]}))
    assert request.messages[0].as_template_input() == {"role": "system", "content": ["one", "two"]}


def test_parameters_that_contradict_each_other_are_refused() -> None:
    assert _refusal(parse_chat, _encode(CHAT | {"top_logprobs": 2})).param == "top_logprobs"
    refusal = _refusal(parse_completion, _encode(COMPLETION | {"min_tokens": 5, "max_tokens": 4}))
    assert refusal.message == "min_tokens 5 is above max_tokens 4"


def test_token_ids_are_the_keys_of_a_bias() -> None:
    request = parse_completion(_encode(COMPLETION | {"logit_bias": {"15": -100, "7": 2.5}}))
    assert request.logit_bias == {15: -100.0, 7: 2.5}


def test_both_names_of_the_token_limit_work_and_may_not_contradict_each_other() -> None:
    assert parse_chat(_encode(CHAT | {"max_tokens": 5})).token_limit == 5
    assert parse_chat(_encode(CHAT | {"max_completion_tokens": 6})).token_limit == 6
    assert parse_chat(_encode(CHAT | {"max_tokens": 6, "max_completion_tokens": 6})).token_limit == 6
    refusal = _refusal(parse_chat, _encode(CHAT | {"max_tokens": 5, "max_completion_tokens": 6}))
    assert refusal.param == "max_completion_tokens"
