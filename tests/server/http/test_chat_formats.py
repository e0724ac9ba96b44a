"""Tool calls and reasoning in the formats of several families, through HTTP; the model draws at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import tokenizers
from openai.types.responses import ResponseStreamEvent

from llmservice_planner.command import main
from llmservice_server.text.reasoning import HARMONY_MARKERS, TAGS
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
THINK_MARKERS = TAGS["think"].markers
MARKERS = [*THINK_MARKERS, *HARMONY_MARKERS, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
TURNS = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}assistant: "
THINKS = "{% if enable_thinking | default(true) %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATES = {
    "qwen3_coder": TURNS + "{# <tool_call> <function=name> #}",
    "mistral": TURNS + "{# [TOOL_CALLS] [ARGS] #}",
    "llama3_json": TURNS + "{# <|python_tag|> #}",
    "harmony": "{{ reasoning_effort | default('medium') }}" + TURNS + "<|start|>assistant{# <|channel|> #}",
    "hermes think": TURNS + "{# <tool_call> #}" + THINKS,
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is the weather?"}]}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, server_process: Any) -> Any:
    """The server of a family by its name. The markers are special tokens, and `<|return|>` ends an answer."""
    folder: Path = tmp_path_factory.mktemp("markers")
    spec = TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=1040, max_position_embeddings=512)
    write_tiny_model(folder, spec)
    library = tiny_tokenizer.train(1024)
    library.add_tokens([tokenizers.AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    library.save(str(folder / "tokenizer.json"))
    for name, field, value in (
        ("config.json", "eos_token_id", library.token_to_id("<|return|>")),
        ("generation_config.json", "eos_token_id", library.token_to_id("<|return|>")),
        ("tokenizer_config.json", "eos_token", "<|return|>"),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    servers: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in servers:
            template = folder / f"{name}.jinja"
            template.write_text(TEMPLATES[name])
            flags = ("--served-model-name", "tiny", "--chat-template", str(template))
            servers[name] = server_process(folder, *flags)
        return servers[name].wait_until_ready()

    ends = {"<|end|>": 31, "</think>": 8}  # so that reasoning ends
    find.bias = {str(library.token_to_id(marker)): bias for marker, bias in ends.items()}  # type: ignore[attr-defined]
    yield find
    for server in servers.values():
        server.close()


def _answer(server: Any, **fields: Any) -> dict[str, Any]:
    status, answer = server.post("/v1/chat/completions", CHAT | {"max_tokens": 220} | fields)
    assert status == 200, answer
    return answer["choices"][0]


def _streamed(server: Any, **fields: Any) -> dict[str, Any]:
    """The choice that the deltas make, without the calls' ids."""
    body = json.dumps(CHAT | {"max_tokens": 220, "stream": True} | fields).encode()
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for line in server.request("POST", "/v1/chat/completions", body)[1].splitlines():
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            reason = choice.get("finish_reason") or reason
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name) or ""
            for piece in choice["delta"].get("tool_calls", ()):
                if "id" in piece:
                    message["tool_calls"].append([piece["function"]["name"], ""])
                message["tool_calls"][piece["index"]][1] += piece["function"].get("arguments", "")
    return message | {"finish_reason": reason}


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
    return texts | {"tool_calls": calls, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_tool_choice_holds_in_every_format_whole_and_streamed(start: Any, name: str) -> None:
    server = start(name)
    bias = start.bias
    named = {"type": "function", "function": {"name": "get_weather"}}
    num_complete = 0
    for seed, choice in enumerate([*(["required", named] * 2), "auto", "auto"]):
        fields = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "logit_bias": bias, "parallel_tool_calls": False}
        whole = _plain(_answer(server, **fields))
        assert whole == _streamed(server, **fields)
        assert not any(marker in whole["content"] + whole["reasoning_content"] for marker in MARKERS)
        if choice == "auto" or whole["finish_reason"] == "length":
            continue
        num_complete += 1
        assert whole["content"] == ""
        assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        [[called, arguments]] = whole["tool_calls"]
        assert choice == "required" or called == "get_weather"
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    assert num_complete
    without = _answer(server, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert "tool_calls" not in without["message"]


@pytest.mark.parametrize("name", ["hermes think", "harmony"])
def test_reasoning_is_apart_from_an_answer_that_conforms_to_a_schema(start: Any, name: str) -> None:
    server, bias = start(name), start.bias
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    num_reasoned = 0
    for seed in range(6):
        fields = {"response_format": schema, "seed": seed, "logit_bias": bias}
        whole = _plain(_answer(server, **fields))
        assert whole == _streamed(server, **fields)
        num_reasoned += bool(whole["reasoning_content"])
        if whole["finish_reason"] == "stop":
            jsonschema.validate(json.loads(whole["content"]), WEATHER)
    assert num_reasoned


def test_an_effort_of_none_turns_the_reasoning_of_a_template_off(start: Any) -> None:
    server = start("hermes think")
    asked = {"max_tokens": 8, "seed": 1}
    thought = _answer(server, **asked)["message"]
    assert (thought["content"], bool(thought["reasoning_content"])) == (None, True)
    plain = _answer(server, reasoning_effort="none", **asked)["message"]
    assert plain["content"]
    assert "reasoning_content" not in plain
    kept = _answer(server, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}, **asked)
    assert kept["message"]["reasoning_content"]


def test_usage_counts_the_tokens_of_reasoning(start: Any) -> None:
    server = start("hermes think")
    body = CHAT | {"max_tokens": 60, "logit_bias": start.bias, "logprobs": True, "seed": 3}
    _, answer = server.post("/v1/chat/completions", body)
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens.index("</think>")}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    last = server.request("POST", "/v1/chat/completions", json.dumps(streamed).encode())[1].splitlines()[-4]
    assert json.loads(last[6:])["usage"] == answer["usage"]


def test_the_effort_is_part_of_the_prompt_where_the_template_reads_it(start: Any) -> None:
    server, body = start("harmony"), {"messages": CHAT["messages"], "return_token_strs": True}
    for more, effort in (({}, "medium"), ({"reasoning_effort": "low"}, "low")):
        assert "".join(server.post("/tokenize", body | more)[1]["token_strs"]).startswith(effort)
    status, answer = server.post("/v1/chat/completions", CHAT | {"reasoning_effort": "extreme"})
    assert (status, answer["error"]["param"]) == (400, "reasoning_effort")


def test_the_server_reports_its_formats(start: Any) -> None:
    server = start("hermes think")
    report = json.loads(server.get("/sizing")[1])
    assert (report["tool_call_format"], report["reasoning_format"]) == ("hermes", "think")
    [line] = [line for line in server.log if line["message"] == "the tokenizer is loaded"]
    assert (line["tool_call_format"], line["reasoning_format"]) == ("hermes", "think")


def test_tools_are_refused_by_a_server_without_a_format(start_server: Callable[..., Any]) -> None:
    server = start_server("--tool-call-format", "none").wait_until_ready()
    status, answer = server.post("/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_an_unknown_format_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--model", "absent", "--tool-call-format", "xml"])
    known = (
        "mistral, nemotron, granite, hunyuan, phi4_mini, apertus, deepseek_v3, deepseek_v31, cohere, olmo3, llama3_json"
    )
    assert (
        f"hermes, qwen3_coder, seed_oss, minimax_m2, glm, gemma, functiongemma, {known}, harmony"
        in capsys.readouterr().err.replace("'", "")
    )


@pytest.mark.parametrize("name", ["hermes think", "harmony"])
def test_a_response_has_the_reasoning_the_text_and_the_calls_of_the_chat(start: Any, name: str) -> None:
    server, kinds = start(name), set[str]()
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for seed, choice in enumerate(["required", "auto", "auto", "none"]):
        fields = {"tool_choice": choice, "seed": seed, "logit_bias": start.bias, "parallel_tool_calls": False}
        chat = _plain(_answer(server, tools=TOOLS, **fields))
        asked = {"model": "tiny", "input": "What is the weather?", "tools": tools, "max_output_tokens": 220, **fields}
        status, response = server.post("/v1/responses", asked)
        assert status == 200
        found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        for item in response["output"]:
            kinds.add(item["type"])
            match item["type"]:
                case "message":
                    found["content"] += item["content"][0]["text"]
                case "reasoning":
                    found["reasoning_content"] += item["content"][0]["text"]
                case "function_call":
                    found["tool_calls"].append([item["name"], item["arguments"]])
        assert found == {key: chat[key] for key in found}
        events = _events(server, asked)
        for event in events:
            _of_client.validate_python(event)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [_without_ids(item) for item in done] == [_without_ids(item) for item in response["output"]]
        assert events[-1]["response"]["usage"] == response["usage"]
        assert (events[-1]["response"]["status"] == "completed") == (chat["finish_reason"] != "length")
    assert kinds >= {"reasoning", "function_call"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["any", "named"])
def test_a_call_that_a_stop_string_cuts_off_is_an_incomplete_item(start: Any, choice: Any) -> None:
    tools = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    asked = {"model": "tiny", "input": "What is the weather?", "tools": tools, "tool_choice": choice, "seed": 1}
    asked |= {"logit_bias": start.bias, "max_output_tokens": 220, "parallel_tool_calls": False}
    for stop, status in (("city", "incomplete"), ([], "completed")):
        _, response = start("hermes think").post("/v1/responses", asked | {"stop": stop})
        [call] = [item for item in response["output"] if item["type"] == "function_call"]
        assert (response["status"], call["status"]) == ("completed", status)


def test_events_have_the_log_probabilities_of_all_tokens_of_a_text(start: Any) -> None:
    server = start("hermes think")
    asked = {"model": "tiny", "input": "What is the weather?", "logit_bias": start.bias}
    num_texts = 0
    for seed in range(6):
        given = asked | {"include": ["message.output_text.logprobs"], "stop": ["e"], "seed": seed}
        _, whole = server.post("/v1/responses", given)
        events = _events(server, given)
        told = [
            entry for event in events if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())
        ]
        texts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
        num_texts += len(texts)
        expected = [entry["token"] for text in texts for entry in text["logprobs"]]
        assert [entry["token"] for entry in told] == expected
    assert num_texts


_of_client = pydantic.TypeAdapter[Any](ResponseStreamEvent)


def _events(server: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.request("POST", "/v1/responses", json.dumps(asked | {"stream": True}).encode())[1].splitlines()
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}
