"""/v1/responses through the official client, against the same chats; the model draws at random."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from llmservice_server.http.protocol.base import unknown_fields
from llmservice_server.http.protocol.responses import ResponsesRequest

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now"},
]
SPACE: dict[str, Any] = {"type": "namespace", "name": "mcp__clock", "description": "A clock.", "tools": TOOLS[1:]}
ASKED: dict[str, Any] = {"model": "tiny", "input": "What is the weather?", "max_output_tokens": 60}


class Answer(BaseModel):
    """What `parse` makes of an answer."""

    word: str = Field(max_length=6)
    number: int = Field(ge=0, le=99)


def test_an_answer_is_that_of_the_same_chat(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "extra_body": {"seed": 5}}
    turns: list[Any] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    last = {"role": "user", "content": "And now?"}
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief.\n\nIn French."}, *turns, last], max_tokens=24, **given
    )
    parts: Any = [{"type": "input_text", "text": "And now?"}]
    response = client.responses.create(
        instructions="Be brief.",
        input=[{"role": "developer", "content": "In French."}, *turns, last | {"content": parts}],
        max_output_tokens=24,
        **given,
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.object, response.model, response.instructions) == ("response", "tiny", "Be brief.")
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens == 24
    [message] = response.output
    assert (message.type, message.status) == ("message", "incomplete")  # the tokens ended before the answer
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_events_make_the_answer(client: openai.OpenAI) -> None:
    given = ASKED | {"extra_body": {"seed": 3}}
    whole = client.responses.create(**given)
    events = list(client.responses.create(stream=True, **given))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_the_clients_own_parse_reads_the_answer(client: openai.OpenAI) -> None:
    for seed in range(4):
        asked = ASKED | {"max_output_tokens": 200, "extra_body": {"seed": seed}}
        response = client.responses.parse(text_format=Answer, **asked)
        assert isinstance(response.output_parsed, Answer)
        assert response.status == "completed"
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        with client.responses.stream(text_format=Answer, **asked) as stream:
            final = stream.get_final_response()
        assert (final.output_parsed, final.usage) == (response.output_parsed, response.usage)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_calls_are_items_and_go_back_with_their_outputs(client: openai.OpenAI, choice: Any) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 200}
    response = client.responses.create(**asked, extra_body={"seed": 1})
    events = list(client.responses.create(stream=True, **asked, extra_body={"seed": 1}))
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), WEATHER if call.name == "get_weather" else {"type": "object"})
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments == call.arguments
    items: Any = [{"role": "user", "content": "What is the weather?"}, *response.output]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    again = client.responses.create(model="tiny", input=[*items, output], tools=TOOLS, max_output_tokens=8)
    assert again.usage is not None
    assert response.usage is not None
    assert again.usage.input_tokens > response.usage.input_tokens
    assert [tool.name for tool in again.tools if tool.type == "function"] == ["get_weather", "now"]


def test_functions_of_a_namespace_are_called_in_it(client: openai.OpenAI) -> None:
    asked = ASKED | {"tools": [SPACE], "tool_choice": "required", "parallel_tool_calls": False}
    response = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    [call] = [item for item in response.output if item.type == "function_call"]
    [done] = [event.item for event in events if event.type == "response.output_item.done"]
    assert done.type == "function_call"
    assert [(each.namespace, each.name) for each in (call, done)] == [("mcp__clock", "now")] * 2
    assert [tool.type for tool in response.tools] == ["namespace"]
    items: Any = [{"role": "user", "content": "Hello"}, call]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    again = client.responses.create(model="tiny", input=[*items, output], tools=asked["tools"], max_output_tokens=4)
    assert again.usage is not None


def test_the_model_sees_a_namespace_in_names_and_its_description_at_the_first_function() -> None:
    called = {"type": "function_call", "namespace": "mcp__clock", "name": "now", "arguments": "{}", "call_id": "1"}
    functions = [{"type": "function", "name": name, "description": name.upper()} for name in ("now", "x" * 64)]
    body = {"model": "m", "input": [called], "tools": [SPACE | {"tools": functions}]}
    chat = ResponsesRequest.model_validate(body).chat
    assert [(tool.function.name, tool.function.description) for tool in chat.tools] == [
        *(("mcp__clock__now", "A clock.\n\nNOW"), (f"mcp__clock__{'x' * 64}", "X" * 64)),
    ]
    assert chat.messages[0].tool_calls[0].function.name == "mcp__clock__now"


def test_a_web_search_is_left_out_and_named_in_the_header(client: openai.OpenAI) -> None:
    search: Any = {"type": "web_search", "external_web_access": False, "user_location": {"type": "approximate"}}
    raw = client.responses.with_raw_response.create(**ASKED, tools=[search, *TOOLS])
    response, without = raw.parse(), client.responses.create(**ASKED, tools=TOOLS)
    assert raw.headers["x-ignored-parameters"] == "tools.web_search"
    assert response.tools == without.tools
    assert response.usage is not None
    assert without.usage is not None
    assert response.usage.input_tokens == without.usage.input_tokens


def test_a_format_that_is_null_is_free_text(server: Any) -> None:
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "reasoning": {"effort": "max"}}
    status, answer = server.post("/v1/responses", asked | {"text": {"format": None, "verbosity": "low"}})
    assert (status, answer["text"]) == (200, {"format": {"type": "text"}, "verbosity": "low"})


def test_log_probabilities_are_of_all_tokens(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert response.usage is not None
    assert len(part.logprobs) == response.usage.output_tokens
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not supported yet"),
    ({"store": True}, "store is not supported yet"),
    ({"background": True}, "background is not supported yet"),
    ({"max_tokens": 7}, "max_tokens is not supported: use max_output_tokens"),
    ({"messages": []}, "messages is not supported: use input"),
    ({"response_format": {"type": "text"}}, "response_format is not supported: use text.format"),
    ({"truncation": "auto"}, "truncation is not supported yet"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].type is 'mcp', expected function, namespace, web_search"),
    ({"tools": [{"name": "f"}]}, "you must provide tools[0].type"),
    ({"tools": [SPACE | {"tools": [{"type": "custom", "name": "f"}]}]}, "tools[0].tools[0].type is 'custom'"),
    ({"tools": [SPACE, {"type": "function", "name": "mcp__clock__now"}]}, "mcp__clock__now is there more than once"),
    ({"tools": [SPACE | {"tools": TOOLS[1:] * 65}] * 2}, "tools has 130 functions, expected at most 128"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice is only allowed beside tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type is 'web_search'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "have the client set store to false"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type is 'input_image', expected input_text or output_text",
    ),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input holds no message"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "you must provide input[0].call_id"),
    ({"include": ["file_search_call.results"]}, "include: file_search_call.results is not supported"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema belongs to the type json_schema"),
    ({"tool_choice": "required"}, "tool_choice is only allowed beside tools"),
    ({"top_logprobs": 2}, "top_logprobs is only allowed when include has message.output_text.logprobs"),
    ({"max_output_tokens": 100_000}, "maximum context length"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_not_supported_is_refused_by_name(server: Any, fields: dict[str, Any], words: str) -> None:
    status, answer = server.post("/v1/responses", {"model": "tiny", "input": "Hello"} | fields)
    assert status == 400
    assert words in answer["error"]["message"]


BAD_SCHEMA = {"type": "object", "properties": 3}
BAD_CALL = [
    {"role": "user", "content": "go"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{]"},
]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": BAD_CALL}, "input", "the arguments of the call 1 are no JSON object"),
        ({"input": "a " * 9000}, "input", "a text of 180"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "shorten the prompt or lower max_output_tokens"),
        ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens", "min_tokens 5 is above max_output_tokens 4"),
        ({"tools": [TOOLS[0] | {"parameters": BAD_SCHEMA}]}, "tools", "tools[0].parameters.properties: expected"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "text.format",
            "text.format: no answer",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give either text.format or structured_outputs, not both",
        ),
        ({"stream_options": {}}, "stream_options", "stream_options is only allowed when stream is true"),
    ],
)
def test_errors_name_the_fields_of_a_response(server: Any, fields: dict[str, Any], param: str, words: str) -> None:
    status, answer = server.post("/v1/responses", {"model": "tiny", "input": "Hello"} | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


def test_many_items_of_one_kind_are_one_message() -> None:
    said = [{"role": "developer", "content": "x"}] * 100_000
    called = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * 100_000
    messages = ResponsesRequest.model_validate({"model": "m", "input": said + called}).chat.messages
    assert [message.role for message in messages] == ["system", "assistant"]
    assert (messages[0].text.count("x"), len(messages[1].tool_calls)) == (100_000, 100_000)


def test_items_of_an_answer_are_one_message_of_the_assistant() -> None:
    called = {"type": "function_call", "name": "f", "arguments": "{}", "id": None, "status": None}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    items = [
        {"role": "user", "content": "go"},
        *(thought, said, called | {"call_id": "1"}, called | {"call_id": "2"}),
        *({"type": "function_call_output", "call_id": number, "output": "ok"} for number in "12"),
        *(thought | {"content": None, "summary": [{"type": "summary_text", "text": "So."}]}, said, said),
    ]
    request = ResponsesRequest.model_validate({"model": "m", "input": items})
    assert [*unknown_fields(request)] == []
    messages = request.chat.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    first, second, third = (message for message in messages if message.role == "assistant")
    assert (first.reasoning_content, first.text, [call.id for call in first.tool_calls]) == ("Hm.", "A", ["1", "2"])
    assert (second.reasoning_content, second.text, second.tool_calls) == ("So.", "A", [])
    assert (third.reasoning_content, third.text) == (None, "A")


@pytest.mark.parametrize(
    ("instructions", "first", "expected"),
    [
        (None, ("developer", "developer"), ["system: A\n\nB", "user: go"]),
        (None, ("developer", "system"), ["system: A\n\nB", "user: go"]),
        ("", ("developer", "user"), ["system: A", "user: B", "user: go"]),
        ("", ("user", "user"), ["user: A", "user: B", "user: go"]),
        ("I", ("system", "developer"), ["system: I\n\nA\n\nB", "user: go"]),
    ],
)
def test_the_system_has_one_message_at_the_beginning(
    instructions: str | None, first: tuple[str, str], expected: list[str]
) -> None:
    items = [{"role": role, "content": text} for role, text in zip((*first, "user"), ("A", "B", "go"), strict=True)]
    request = ResponsesRequest.model_validate({"model": "m", "instructions": instructions, "input": items})
    seen = [message.as_template_input() for message in request.chat.messages]
    assert [f"{message['role']}: {message['content']}" for message in seen] == expected


def test_texts_of_a_message_stay_apart() -> None:
    texts = [{"type": "input_text", "text": text} for text in "AB"]
    request = ResponsesRequest.model_validate({"model": "m", "input": [{"role": "user", "content": texts}]})
    assert request.chat.messages[0].as_template_input() == {"role": "user", "content": ["A", "B"]}


def test_outputs_follow_the_message_with_their_calls_where_a_text_stands_between() -> None:
    text = {"type": "output_text", "text": "A", "annotations": None, "logprobs": None}
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"role": "assistant", "content": [text]},
        {"type": "function_call_output", "call_id": "1", "output": "ok"},
    ]
    messages = ResponsesRequest.model_validate({"model": "m", "input": items}).chat.messages
    assert [(message.role, message.text, len(message.tool_calls)) for message in messages] == [
        *(("user", "go", 0), ("assistant", "A", 1), ("tool", "ok", 0)),
    ]


def test_the_fields_that_codex_sends_are_known() -> None:
    """Of codex-rs/codex-api/src/common.rs."""
    tool = {"type": "function", "name": "f", "description": "F", "strict": False, "parameters": {"type": "object"}}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A"}],
            "phase": "commentary",
        },
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    body = {"model": "m", "instructions": "I", "input": items, "tools": [tool], "tool_choice": "auto"}
    body |= {"parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False}
    body |= {"stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    body |= {"text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "1"}}
    request = ResponsesRequest.model_validate(body)
    assert [*unknown_fields(request)] == []
    assert [message.role for message in request.chat.messages] == ["system", "user", "assistant", "tool"]
