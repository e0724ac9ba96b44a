"""response_format and tools through the official client, whole and streamed; the model draws at random."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers
from pydantic import BaseModel, Field

from llmservice_server.http.protocol.chat import ToolCall
from llmservice_server.text.json_calls import HERMES
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}


class Answer(BaseModel):
    """What `parse` makes of an answer."""

    word: str = Field(max_length=6)
    number: int = Field(ge=0, le=99)


def _check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        schema = WEATHER if name == "get_weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(arguments), schema)


def test_the_clients_own_parse_reads_the_answer(client: openai.OpenAI) -> None:
    for seed in range(8):
        answer = client.chat.completions.parse(response_format=Answer, seed=seed, **CHAT).choices[0]
        assert isinstance(answer.message.parsed, Answer)
        assert answer.finish_reason == "stop"


def test_a_json_object_is_what_it_says(client: openai.OpenAI) -> None:
    ends = set()
    for seed in range(8):
        answer = client.chat.completions.create(response_format={"type": "json_object"}, seed=seed, **CHAT).choices[0]
        ends.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.message.content or ""), dict)
    assert "stop" in ends


def test_completions_keep_to_a_schema_too(server: Any) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 3, "max_tokens": 300, "response_format": format_}
    status, answer = server.post("/v1/completions", body)
    assert status == 200
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), WEATHER)
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[ab]{2,4}-\d{3}"}, r"[ab]{2,4}-\d{3}"),
        ({"choice": ["yes", 'a "quoted" no', "später/\\n"]}, r'yes|a "quoted" no|später/\\n'),
        ({"grammar": 'start: "<" /[a-c]+/ ">" | "nothing"'}, r"<[a-c]+>|nothing"),
        ({"json": {"enum": [1, 22]}}, r"1|22"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_an_answer_is_held_to_what_vllms_clients_ask_for(client: openai.OpenAI, asked: Any, pattern: str) -> None:
    body = {"structured_outputs": asked}
    for seed in range(4):
        answer = client.chat.completions.create(extra_body=body, seed=seed, **CHAT).choices[0]
        assert re.fullmatch(pattern, answer.message.content or "")
        assert answer.finish_reason == "stop"


def _streamed(client: openai.OpenAI, **options: Any) -> tuple[list[tuple[str, str]], str | None]:
    """The calls and the reason, put together from the deltas."""
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in client.chat.completions.create(stream=True, **options):
        pieces = chunk.choices[0].delta.tool_calls or []
        assert len({piece.index for piece in pieces}) == len(pieces)
        for piece in pieces:
            if piece.id is not None:
                assert (piece.id.startswith("call_"), piece.type) == (True, "function")
                calls[piece.index] = [piece.function.name, ""]
            calls[piece.index][1] += piece.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    return [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_are_the_same_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "logit_bias": {"1": seed}, **CHAT}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert calls
    assert choice.finish_reason in ("tool_calls", "length")
    if choice.finish_reason == "tool_calls":
        _check_calls(calls)
    assert _streamed(client, **options) == (calls, choice.finish_reason)


def test_the_clients_own_stream_helper_reads_the_calls(client: openai.OpenAI) -> None:
    bias = {"1": 100}  # the end of sequence: after the first call
    with client.chat.completions.stream(tools=TOOLS, tool_choice="required", logit_bias=bias, **CHAT) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    _check_calls([(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []])


def test_one_call_and_no_more_where_several_are_not_wanted(client: openai.OpenAI) -> None:
    for seed in range(8):
        answer = client.chat.completions.create(
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, **CHAT
        ).choices[0]
        assert len(answer.message.tool_calls or []) == 1
        assert answer.finish_reason == "tool_calls"


async def test_a_named_function_is_called_once_and_ends_with_stop(server: Any) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        pieces: list[Any] = []
        reason = None
        async for chunk in await client.chat.completions.create(tools=TOOLS, tool_choice=choice, stream=True, **CHAT):
            pieces += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
    assert reason == "stop"
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
    _check_calls([("get_weather", "".join(piece.function.arguments or "" for piece in pieces))])
    assert len(pieces) > 2


def test_left_to_itself_the_model_says_words(client: openai.OpenAI) -> None:
    words = client.chat.completions.create(tools=TOOLS, seed=1, **CHAT | {"max_tokens": 20}).choices[0]
    assert words.message.content
    assert words.message.tool_calls is None
    assert words.finish_reason == "length"


def test_a_model_that_begins_a_call_of_its_own_accord_must_finish_it(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """Its tokenizer has one token for the tag, as Qwen's has, so that a bias can make it begin."""
    spec = TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=1030, max_position_embeddings=512)
    write_tiny_model(tmp_path, spec)
    library = tiny_tokenizer.train(1024)
    library.add_tokens([tokenizers.AddedToken(HERMES.trigger, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    server = start_server(model=tmp_path).wait_until_ready()
    options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, **CHAT}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(6):
            bias = {"1024": 100 if seed % 2 else 18}  # at once, or behind some words
            choice = client.chat.completions.create(seed=seed, logit_bias=bias, **options).choices[0]
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls or []
            _check_calls([(call.function.name, call.function.arguments)])
            assert HERMES.trigger not in (choice.message.content or "")
            calls, reason = _streamed(client, seed=seed, logit_bias=bias, **options)
            assert (calls, reason) == ([(call.function.name, call.function.arguments)], "tool_calls")


def test_without_being_let_the_model_does_not_call(client: openai.OpenAI) -> None:
    with_tools = client.chat.completions.create(tools=TOOLS, tool_choice="none", seed=3, **CHAT)
    without = client.chat.completions.create(seed=3, **CHAT)
    assert with_tools.choices[0].message.content == without.choices[0].message.content
    assert with_tools.usage == without.usage


def test_calls_and_their_answers_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **CHAT)
    said = first.choices[0].message
    assert said.tool_calls is not None
    answer = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "22 C"}
    second = client.chat.completions.create(
        tools=TOOLS, **CHAT | {"messages": [*MESSAGES, said.model_dump(exclude_none=True), answer], "max_tokens": 5}
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_call_that_max_tokens_cuts_off_goes_back_into_the_conversation(client: openai.OpenAI) -> None:
    """Agents keep it with the error of their own parser, and would be refused from then on."""
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 900}}, "required": ["text"]}
    tools: Any = [{"type": "function", "function": {"name": "say", "parameters": text}}]
    first = client.chat.completions.create(tools=tools, tool_choice="required", **CHAT | {"max_tokens": 80})
    said = first.choices[0].message
    assert first.choices[0].finish_reason == "length"
    [call] = said.tool_calls or []
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "the arguments are no JSON"}
    turns = [*MESSAGES, said.model_dump(exclude_none=True), answer]
    second = client.chat.completions.create(tools=tools, **CHAT | {"messages": turns, "max_tokens": 5})
    assert second.usage is not None


def test_arguments_that_are_cut_off_count_as_far_as_they_go() -> None:
    def given(arguments: str) -> Any:
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        return ToolCall.model_validate(call).as_template_input()["function"]["arguments"]

    written = '{"a" : "\u00e9\\u00e9\\ud83d\\ude00x\\n", "b": [1, -2.5e+3, true, null, {"c": {}}]}'
    whole = json.loads(written)
    for end in range(1, len(written)):
        begun = given(written[:end])
        assert begun.keys() <= whole.keys()
        assert whole["a"].startswith(begun.get("a", ""))
    assert (given(""), given("{"), given(written[:-4]), given(written)) == ({}, {}, whole, whole)
    for wrong in ("[1", '"a', "{]", "{'a", '{"a": 1} b', '{"a":' * 300, '{"a": NaN', '{"a": 1e999}', " ", "nul"):
        with pytest.raises(ValueError, match="the arguments of the call c are no JSON object"):
            given(wrong)


def test_of_all_tools_some_may_be_called(client: openai.OpenAI) -> None:
    def choice(mode: str) -> Any:
        only = {"type": "function", "function": {"name": "now"}}
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [only]}}

    for seed in range(4):
        answer = client.chat.completions.create(
            tools=TOOLS, tool_choice=choice("required"), parallel_tool_calls=False, seed=seed, **CHAT
        )
        assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["now"]
        assert answer.choices[0].finish_reason == "tool_calls"
    words = client.chat.completions.create(tools=TOOLS, tool_choice=choice("auto"), seed=1, **CHAT | {"max_tokens": 8})
    alone = client.chat.completions.create(tools=TOOLS, seed=1, **CHAT | {"max_tokens": 8})
    assert words.choices[0].message.content == alone.choices[0].message.content
    assert words.usage == alone.usage  # all tools are in the prompt


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2, "uniqueItems": True},
        {"type": "string", "maxLength": 5, "format": "path"},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "maxProperties": 1},
        {"oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "number", "enum": [1.5]}]},
        {"type": "string", "pattern": "^(?=a)b$"},
        {"type": "any"},
        {"$ref": "#/nowhere"},
    ],
    ids="-".join,
)
def test_what_no_grammar_can_say_is_left_out_of_a_tool_that_is_not_strict(
    client: openai.OpenAI, schema: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": None}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    options: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    choice = client.chat.completions.create(**options, **CHAT).choices[0]
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason in ("tool_calls", "length")
    if choice.finish_reason == "tool_calls":
        assert isinstance(json.loads(call.function.arguments), dict)


def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_executed(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(tools=TOOLS[:1], tool_choice="required", stop=["ity"], **CHAT).choices[0]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
         "response_format", "no answer can be held to this: Invalid type: strin"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format", 'Unimplemented keys: ["not"]'),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"regex": "(" * 9000}}, "structured_outputs", "(((( … ((((" ),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs", "nowhere"),
        ({"structured_outputs": {"grammar": "start: T\nT: " + " & ".join(f"/.*{n}.*/" for n in range(30))}},
         "structured_outputs", "one text must match too many patterns at once"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs", "beside tools must be json"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "belongs to the type json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens", "cannot be combined"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "get_weather is there more than once"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools", "expected the schema of an object"),
        ({"tools": [{"type": "function", "function": {
            "name": "a", "strict": True, "parameters": {"$ref": "#/nowhere"}}}]},
         "tools", "no answer can be held to this: the parameters of a: "),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}]},
         "tools", "tools[0].function.parameters.properties: expected an object"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": "b"}}}]},
         "tools", "tools[0].function.parameters.required: expected a list of names"),
        ({"tools": [{"type": "plugin"}]}, "tools", "expected function"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed beside tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "expected none, auto or required, or an object"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
         "tool_choice", "names other, which is not among the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "other"}}]}}},
         "tool_choice", "names other, which is not among the tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id belongs to messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}]}]},
         "messages", "the arguments of the call c are no JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_with_the_reason(
    server: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    status, answer = server.post("/v1/chat/completions", CHAT | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]
