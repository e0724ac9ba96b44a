"""Formats of tool calls and reasoning: which one a model has, what is in an answer, and what a grammar allows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from llmservice_server.sampling.grammar import check_grammar, json_grammar
from llmservice_server.text.chat_formats import ChatFormatError, ChatFormats, FormatNames
from llmservice_server.text.reasoning import HARMONY_MARKERS, TAGS, Beginning, ReasoningTokens
from llmservice_server.text.tool_calls import Parsed, ToolSchema, merge
from llmservice_server.text.xml_calls import read_value
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.types.errors import GrammarError

TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ToolSchema("now", {"type": "object", "properties": {}, "additionalProperties": False}),
    ToolSchema("say", {"type": "object", "properties": {"text": {"type": "string"}, "loud": {"type": "boolean"}}}),
]
TEMPLATES = {
    "hermes": "<tool_call>\n{'name': name, 'arguments': arguments}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "seed_oss": "<seed:tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "seed_think": "<seed:think>{{ reasoning }}</seed:think>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ name }}">',
    "glm": "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>",
    "glm_compact": "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>",
    "gemma": "<|tool_call>call:{{ name }}",
    "functiongemma": "<start_function_call>call:{{ name }}",
    "channel": "<|channel>thought\n<channel|>",
    "mistral": "[TOOL_CALLS][{{ call }}]",
    "mistral_args": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "nemotron": "<TOOLCALL>[{{ call }}]</TOOLCALL>",
    "granite": "<|tool_call|> followed by a JSON list",
    "hunyuan": "<tool_calls>[{{ call }}]</tool_calls>",
    "hunyuan_think": "<think></think><answer></answer>",
    "ernie_think": "<think></think><response></response>",
    "phi4_mini": "functools[{{ call }}]",
    "apertus": '<|tools_prefix|>[{"{{ name }}": {}}]<|tools_suffix|>',
    "apertus_think": "<|inner_prefix|>{{ thoughts }}<|inner_suffix|>",
    "olmo3": "{{ tools }}<function_calls>{{ name }}(",
    "deepseek_v3": "{{ tools }}<｜tool▁calls▁begin｜>{{ name }}```json",
    "deepseek_v31": "{{ tools }}<｜tool▁calls▁begin｜>{{ name }}",
    "cohere": '<|START_ACTION|>[{"tool_name": "{{ name }}", "parameters": {}}]',
    "llama3_json": "{'\"parameters\": '}",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "think": "<think>",
    "mistral_think": "[THINK]",
    "cohere_think": "<|START_THINKING|>",
    "none": "{{ messages }}",
}
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER_SAY = (
    '<tool_call>\n<function=say>\n<parameter=text>\n12 <b>\n"é"\n</parameter>\n<parameter=loud>\nfalse\n</parameter>\n'
    "</function>\n</tool_call>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
SEED_SAY = (
    '<seed:tool_call>\n<function=say>\n<parameter=text>12 <b>\n"é"\n</parameter>\n<parameter=loud>false</parameter>\n'
    "</function>\n</seed:tool_call>"
)
SEED_NOW = "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
MINIMAX_SAY = (
    '<invoke name="say">\n<parameter name="text">12 <b>\n"é"\n</parameter>\n<parameter name="loud">false</parameter>\n'
    "</invoke>"
)
MINIMAX_NOW = '<invoke name="now">\n</invoke>'
GLM_SAY = (
    '<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>12 <b>\n"é"\n</arg_value>\n<arg_key>loud</arg_key>\n'
    "<arg_value>false</arg_value>\n</tool_call>"
)
GLM_ADD = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"  # GLM-4.7's
GLM_NOW = "<tool_call>now\n</tool_call>"
GEMMA_ADD, GEMMA_NOW = "<|tool_call>call:add{a:1}<tool_call|>", "<|tool_call>call:now{}<tool_call|>"
GEMMA_SAY = '<|tool_call>call:say{text:<|"|>12 <b>\n"é", {x:1}<|"|>,loud:false}<tool_call|>'
GEMMA_MORE = '<|tool_call>call:f{a:[1,<|"|>x<|"|>,{b: <|"|><|"|>, c:null}],d:{},<|"|>e f<|"|>:-1.5}<tool_call|>'
FUNCTIONGEMMA_ADD = "<start_function_call>call:add{a:1}<end_function_call>"
FUNCTIONGEMMA_NOW = "<start_function_call>call:now{}<end_function_call>"
FUNCTIONGEMMA_SAY = '<start_function_call>call:say{text:<escape>12 <b>\n"é"<escape>,loud:false}<end_function_call>'
APERTUS_CALLS = ['{"add": {"a": 1}}', '{"now": {}}']
APERTUS = "<|tools_prefix|>[%s]<|tools_suffix|>"
OLMO_SAY = r'say(text="12, (b)=\n\"é\" \\", loud=false)'
OLMO_MORE = 'f(a=[1, {"b": ")"}], c = {}, d=-1.5,)'
OLMO = "<function_calls>%s</function_calls>"
CALL_LIST = ['{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}']
LIST = f"[{', '.join(CALL_LIST)}]"
V3_ADD = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V3_NOW = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_ADD = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
V31_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
COHERE_ADD = '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}'
COHERE_NOW = '{"tool_call_id": "12", "tool_name": "now", "parameters": {}}'
COHERE_BOTH = f"{COHERE_ADD},\n    {COHERE_NOW}"
COHERE = "<|START_ACTION|>[\n    %s\n]<|END_ACTION|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'

# format, where the answer begins, text, content, reasoning, calls
ANSWERS: list[tuple[str, Beginning, str, str, str, list[tuple[str, str]]]] = [
    ("none", "content", "Just <think> [TOOL_CALLS] {words}", "Just <think> [TOOL_CALLS] {words}", "", []),
    ("hermes", "content", f"Well.\n{HERMES_ADD}\n{HERMES_NOW}", "Well.\n", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("hermes", "content", "a <tool_calls> b", "a <tool_calls> b", "", []),
    ("hermes", "content", "<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", "", []),
    ("hermes", "content", f"<tool_call>x</tool_call>{HERMES_NOW}", "<tool_call>x</tool_call><tool_call>\n", "",
     [("now", "{}")]),
    ("hermes", "content", '<tool_call>{"name":"now","arguments":{}}</tool_call> and', "and", "", [("now", "{}")]),
    ("hermes", "content", f"{HERMES_NOW}{HERMES_ADD[:20]}", "", "", [("now", "{}")]),
    ("hermes", "content", f"{HERMES_NOW}\n<tool_call>x</tool_call>", "<tool_call>x</tool_call>", "", [("now", "{}")]),
    ("hermes", "content", HERMES_NOW[:-3], "", "", [("now", "{}")]),
    ("hermes", "content", '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', "", []),
    ("hermes", "content", '<tool_call>\n{"name": "add", "arguments": {"a": "}', "", "", [("add", '{"a": "}')]),
    ("qwen3_coder", "content", f"Well. {CODER_SAY}\n{CODER_NOW}", "Well. ", "",
     [("say", '{"text": "12 <b>\\n\\"é\\"", "loud": false}'), ("now", "{}")]),
    ("qwen3_coder", "content", "<tool_call>\n<function=say>\n<parameter=text>\ncut of", "", "",
     [("say", '{"text": "cut of')]),
    ("qwen3_coder", "content", "<tool_call>\n<function=say><parameter=text>\n\n</parameter>\n<parameter=loud>\ntr", "",
     "", [("say", '{"text": "", "loud": tr')]),
    ("qwen3_coder", "content", "<tool_call>\n<function=say>\n<parameter=text>a</parameter>\n</function>", "", "",
     [("say", '{"text": "a"}')]),
    ("qwen3_coder", "content", "<tool_call>\n<function=sa", "<tool_call>\n<function=sa", "", []),
    ("seed_oss seed_think", "open", f"<seed:think>Hm.</seed:think>Well.\n{SEED_SAY}\n{SEED_NOW}", "Well.\n", "Hm.",
     [("say", '{"text": "12 <b>\\n\\"é\\"\\n", "loud": false}'), ("now", "{}")]),
    ("seed_oss", "content", "<seed:tool_call>\n<function=say>\n<parameter=text>cut of", "", "",
     [("say", '{"text": "cut of')]),
    ("minimax_m2", "content", f"Hi.<minimax:tool_call>\n{MINIMAX_SAY}\n{MINIMAX_NOW}\n</minimax:tool_call>", "Hi.", "",
     [("say", '{"text": "12 <b>\\n\\"é\\"\\n", "loud": false}'), ("now", "{}")]),
    ("minimax_m2", "content", '<minimax:tool_call>\n<invoke name="sa', '<minimax:tool_call>\n<invoke name="sa', "", []),
    ("glm", "content", f"Well.\n{GLM_SAY}\n{GLM_NOW}", "Well.\n", "",
     [("say", '{"text": "12 <b>\\n\\"é\\"\\n", "loud": false}'), ("now", "{}")]),
    ("glm", "content", "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>cut of", "", "",
     [("say", '{"text": "cut of')]),
    ("glm", "content", "<tool_call>say\n<arg_key>loud</arg_key>\n<arg_value>tr", "", "", [("say", '{"loud": tr')]),
    ("glm", "content", "<tool_call>sa", "<tool_call>sa", "", []),
    ("glm_compact", "content", f"{GLM_ADD}<tool_call>now</tool_call>", "", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("gemma channel", "open", f"<|channel>thought\nHm.\n<channel|>Well.{GEMMA_SAY}{GEMMA_NOW}", "Well.", "Hm.",
     [("say", '{"text":"12 <b>\\n\\"é\\", {x:1}","loud":false}'), ("now", "{}")]),
    ("gemma", "content", GEMMA_MORE, "", "",
     [("f", '{"a":[1,"x",{"b": "", "c":null}],"d":{},"e f":-1.5}')]),
    ("gemma", "content", '<|tool_call>call:say{text:<|"|>cut <', "", "", [("say", '{"text":"cut <')]),
    ("gemma", "content", "<|tool_call>call:say{te", "", "", [("say", "{")]),
    ("gemma", "content", "<|tool_call>call:sa", "<|tool_call>call:sa", "", []),
    ("gemma channel", "open", "<|channel>though", "<|channel>though", "", []),
    ("functiongemma", "content", f"Well.{FUNCTIONGEMMA_SAY}{FUNCTIONGEMMA_NOW}", "Well.", "",
     [("say", '{"text":"12 <b>\\n\\"é\\"","loud":false}'), ("now", "{}")]),
    ("functiongemma", "content", "<start_function_call>call:say{text:<escape>cut <esc", "", "",
     [("say", '{"text":"cut <esc')]),
    ("apertus apertus_think", "open",
     f"<|inner_prefix|>Hm.<|inner_suffix|>Well.{APERTUS % ', '.join(APERTUS_CALLS)}", "Well.", "Hm.",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("apertus", "content", '<|tools_prefix|>[{"now": {}}, {"ad', "", "", [("now", "{}")]),
    ("apertus", "content", f"{APERTUS % APERTUS_CALLS[1]} and", "and", "", [("now", "{}")]),
    ("apertus", "content", f"{APERTUS % 'nonsense'}", f"{APERTUS % 'nonsense'}", "", []),
    ("olmo3 think", "open", f"<think>Hm.</think>Well.\n{OLMO % f'{OLMO_SAY}{chr(10)}now()'}", "Well.\n", "Hm.",
     [("say", r'{"text": "12, (b)=\n\"é\" \\", "loud": false}'), ("now", "{}")]),
    ("olmo3", "content", OLMO % OLMO_MORE, "", "", [("f", '{"a": [1, {"b": ")"}], "c": {}, "d": -1.5}')]),
    ("olmo3", "content", OLMO % 'f(from date="a", b, (c)=1)', "", "", [("f", '{"from date": "a", "b, (c)": 1}')]),
    ("olmo3", "content", f"{OLMO % 'now()'}{OLMO % 'add(a=1)'}", "", "", [("now", "{}"), ("add", '{"a": 1}')]),
    ("olmo3", "content", f"{OLMO % 'now()'} and f(x)", "and f(x)", "", [("now", "{}")]),
    ("olmo3", "content", "<function_calls>now()\nad", "", "", [("now", "{}")]),
    ("olmo3", "content", "<function_calls>now()</function_", "", "", [("now", "{}")]),
    ("olmo3", "content", '<function_calls>say(text="cut of', "", "", [("say", '{"text": "cut of')]),
    ("olmo3", "content", "<function_calls>say(te", "", "", [("say", "")]),
    ("olmo3", "content", "<function_calls>sa", "<function_calls>sa", "", []),
    ("olmo3", "content", f"{OLMO % 'nonsense'}", f"{OLMO % 'nonsense'}", "", []),
    ("mistral", "content", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', "",
     "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("mistral", "content", 'Hi[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "Hi", "", [("now", "{}")]),
    ("mistral", "content", '[TOOL_CALLS][{"name": "now", "arguments": {}}] [see 1]', "[see 1]", "", [("now", "{}")]),
    ("mistral_args", "content", 'Hi[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]12ab[ARGS]{}', "Hi", "",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("mistral_args", "content", "[TOOL_CALLS]ad", "[TOOL_CALLS]ad", "", []),
    ("nemotron", "content", f"Hi <TOOLCALL>{LIST}</TOOLCALL>\n", "Hi ", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("nemotron", "content", f"<TOOLCALL>{LIST}</TOOLCALL> and", "and", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("granite", "content", f"<|tool_call|>{LIST}", "", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("granite", "content", "<|tool_call|> none", "<|tool_call|> none", "", []),
    ("hunyuan", "content", f"Hi <tool_calls>{LIST}</tool_calls>", "Hi ", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("hunyuan hunyuan_think", "open", "<think>\nHm.\n</think>\n<answer>\nHello\n <b>\n</answer>",
     "Hello\n <b>", "Hm.", []),
    ("hunyuan hunyuan_think", "open", f"<think></think>\n<answer>\nHi <tool_calls>{LIST}</tool_calls>\n</answer>",
     "Hi ", "",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("hunyuan hunyuan_think", "open", f"<think></think>\n<tool_calls>{LIST}</tool_calls>", "", "",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("hunyuan hunyuan_think", "open", "<answer>cut off </ans", "cut off </ans", "", []),
    ("hunyuan hunyuan_think", "open", "No tags </answer>", "No tags </answer>", "", []),
    ("ernie_think", "reasoning", "Hm.\n</think>\n\n<response>\nHello\n</response>\n", "Hello", "Hm.", []),
    ("phi4_mini", "content", f"Hi. functools{LIST}", "Hi. ", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("phi4_mini", "content", "from functools import cache", "from functools import cache", "", []),
    ("deepseek_v3 think", "reasoning", f"Hm.\n</think>Hi{DEEPSEEK % (V3_ADD + chr(10) + V3_NOW)}", "Hi", "Hm.",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("deepseek_v3", "content", (DEEPSEEK % V3_ADD).replace("function<｜tool▁sep｜>", ""), "", "",
     [("add", '{"a": 1}')]),
    ("deepseek_v3", "content", (DEEPSEEK % V3_ADD)[:-32], "", "", [("add", '{"a": 1}')]),
    ("deepseek_v31", "content", f"Hi{DEEPSEEK % (V31_ADD + V31_NOW)}", "Hi", "", [("add", '{"a": 1}'), ("now", "{}")]),
    ("deepseek_v31", "content", DEEPSEEK[:-18] % (V31_ADD + V31_NOW[:29]), "", "", [("add", '{"a": 1}')]),
    ("deepseek_v31", "content", (DEEPSEEK % "nonsense"), DEEPSEEK % "nonsense", "", []),
    ("cohere cohere_think", "open", f"<|START_THINKING|>Hm.<|END_THINKING|>{COHERE % COHERE_BOTH}", "", "Hm.",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("cohere cohere_think", "open", f"Well. {COHERE % COHERE_NOW}", "Well. ", "", [("now", "{}")]),
    ("cohere", "content", COHERE[:-16] % COHERE_ADD[:-3], "", "", [("add", '{"a": ')]),
    ("cohere", "content", "<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>[]<|END_ACTION|>", "", []),
    ("llama3_json", "content", '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "", "",
     [("add", '{"a": 1}'), ("now", "{}")]),
    ("llama3_json", "content", '<|python_tag|>{"name": "now", "parameters": {}}', "", "", [("now", "{}")]),
    ("llama3_json", "content", "<|python", "<|python", "", []),
    ("llama3_json", "content", '{"answer": 42}', '{"answer": 42}', "", []),
    ("llama3_json", "content", 'a {"name": "now", "parameters": {}}', 'a {"name": "now", "parameters": {}}', "", []),
    ("harmony", "open", f"{ANALYSIS}<|channel|>final<|message|>Hello.<|return|>", "Hello.", "Hm.", []),
    ("harmony", "open", f"{ANALYSIS}{HARMONY_ADD}<|call|>", "", "Hm.", [("add", '{"a": 1}')]),
    ("harmony", "open", f"{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{}}", "", "Hm.",
     [("add", "{}")]),
    ("harmony", "open", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_ADD}", "I look.", "",
     [("add", '{"a": 1}')]),
    ("harmony", "open", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FINAL}Here.",
     "I look.\nHere.", "", []),
    ("harmony", "open", f"{ANALYSIS}{ANALYSIS}{FINAL}Yes.", "Yes.", "Hm.\nHm.", []),
    ("harmony", "open", "<|channel|>analysis<|message|>cut <|en", "", "cut <|en", []),
    ("harmony", "open", "<|channel|>ana", "", "", []),
    ("harmony", "open", "<|channel|>commentary to=functions.ad", "<|channel|>commentary to=functions.ad", "", []),
    ("harmony", "open", "no channel", "no channel", "", []),
    ("harmony", "content", " on it goes", " on it goes", "", []),
    ("think", "open", "<think>\nHm,\n hm.\n</think>\n\nHello <think>.", "Hello <think>.", "Hm,\n hm.", []),
    ("think", "open", "\n<think></think>Hello", "Hello", "", []),
    ("think", "open", "<b> Hello", "<b> Hello", "", []),
    ("think", "open", " <th", " <th", "", []),
    ("think", "open", "<think>cut off </th", "", "cut off </th", []),
    ("think", "reasoning", "\nHm.\n</think>\n\nHello", "Hello", "Hm.", []),
    ("think", "reasoning", "Hm. \n", "", "Hm.", []),
    ("think", "content", "Hello </think>", "Hello </think>", "", []),
    ("mistral_args mistral_think", "open", "[THINK]Hm.[/THINK]Hi[TOOL_CALLS]now[ARGS]{}", "Hi", "Hm.", [("now", "{}")]),
    ("hermes think", "reasoning", f"<tool_call>?</think>\n\n{HERMES_ADD}", "", "<tool_call>?", [("add", '{"a": 1}')]),
    ("hermes think", "open", f"<think>a</think>b\n{HERMES_NOW}", "b\n", "a", [("now", "{}")]),
]  # fmt: skip


def formats(name: str, vocabulary: dict[str, int] | None = None) -> ChatFormats:
    """Of a model whose template holds those of the names."""
    return ChatFormats(FormatNames(), "".join(TEMPLATES[each] for each in name.split()), vocabulary or {})


def parse(name: str, beginning: Beginning, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = formats(name).parser(TOOLS, beginning)
    whole = Parsed()
    for piece in pieces:
        whole.extend(parser.append(piece))
    whole.extend(parser.flush())
    calls = merge(whole.calls)
    assert [call.index for call in calls] == list(range(parser.num_calls))
    return whole.content, whole.reasoning, [(call.name or "", call.arguments) for call in calls]


def splits(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    for start, end in itertools.combinations(range(0, len(text), 7), 2):
        yield [text[:start], text[start:end], text[end:]]


@pytest.mark.parametrize(("name", "beginning", "text", "content", "reasoning", "calls"), ANSWERS)
def test_what_is_in_an_answer_does_not_depend_on_its_pieces(
    name: str, beginning: Beginning, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in splits(text):
        assert parse(name, beginning, pieces) == (content, reasoning, calls), pieces


@pytest.mark.parametrize(("name", "beginning", "text"), [answer[:3] for answer in ANSWERS])
def test_an_answer_that_is_cut_off_anywhere_is_the_same_whole_and_letter_by_letter(
    name: str, beginning: Beginning, text: str
) -> None:
    for end in range(len(text)):
        assert parse(name, beginning, [text[:end]]) == parse(name, beginning, list(text[:end]))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, '"12"'),
        ("12", {"type": ["string", "null"]}, '"12"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("12", {"anyOf": [{"type": "number"}, {"type": "string"}]}, "12"),
        ("True", {"type": "boolean"}, "true"),
        ('{"a": [1]}', {"$ref": "#/$defs/a"}, '{"a": [1]}'),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("no number", {"type": "integer"}, '"no number"'),
        ("", {}, '""'),
    ],
)
def test_an_argument_in_xml_has_the_type_that_its_schema_allows(text: str, schema: dict[str, Any], value: str) -> None:
    assert read_value(text, schema) == value


@pytest.mark.parametrize(
    ("template", "vocabulary", "calls", "reasoning"),
    [
        (TEMPLATES["hermes"], [], "hermes", "none"),
        (TEMPLATES["hermes"], ["<think>"], "hermes", "think"),
        (TEMPLATES["hermes"] + "{{ content.split('</think>') }}", [], "hermes", "think"),
        (TEMPLATES["qwen3_coder"], [], "qwen3_coder", "none"),
        (TEMPLATES["seed_oss"] + TEMPLATES["seed_think"], [], "seed_oss", "seed_oss"),
        (TEMPLATES["minimax_m2"] + TEMPLATES["think"], [], "minimax_m2", "think"),
        (TEMPLATES["mistral"], [], "mistral", "none"),
        (TEMPLATES["llama3_json"], [], "llama3_json", "none"),
        (TEMPLATES["harmony"], [], "harmony", "harmony"),
        (TEMPLATES["glm"], ["<think>"], "glm", "think"),
        (TEMPLATES["glm_compact"], [], "glm", "none"),
        (TEMPLATES["gemma"] + TEMPLATES["channel"], [], "gemma", "gemma"),
        (TEMPLATES["functiongemma"], [], "functiongemma", "none"),
        (TEMPLATES["apertus"] + TEMPLATES["apertus_think"], [], "apertus", "apertus"),
        (TEMPLATES["olmo3"], ["<think>"], "olmo3", "think"),
        ("<function_calls>{{ message.function_calls }}</function_calls><think>", [], "none", "think"),
        (TEMPLATES["mistral_args"] + TEMPLATES["mistral_think"], ["<think>"], "mistral", "mistral"),
        (TEMPLATES["nemotron"], [], "nemotron", "none"),
        (TEMPLATES["granite"], [], "granite", "none"),
        (TEMPLATES["hunyuan"] + TEMPLATES["hunyuan_think"], [], "hunyuan", "hunyuan"),
        (TEMPLATES["ernie_think"], ["<think>"], "none", "ernie"),
        (TEMPLATES["phi4_mini"], [], "phi4_mini", "none"),
        (TEMPLATES["deepseek_v3"], ["<think>"], "deepseek_v3", "think"),
        (TEMPLATES["deepseek_v31"], [], "deepseek_v31", "none"),
        (TEMPLATES["deepseek_v3"].replace("tools", "calls"), [], "none", "none"),
        (tiny_tokenizer.CHAT_TEMPLATE, [], "hermes", "none"),
        (TEMPLATES["cohere"] + TEMPLATES["cohere_think"], ["<think>"], "cohere", "cohere"),
        ("<|START_RESPONSE|>{{ content }}<|END_RESPONSE|>", [], "none", "cohere"),
        ("{{ messages }}", [], "none", "none"),
    ],
)
def test_template_and_tokenizer_show_the_formats(
    template: str, vocabulary: list[str], calls: str, reasoning: str
) -> None:
    found = FormatNames().resolved(template, dict.fromkeys(vocabulary, 7))
    assert (found.tool_calls, found.reasoning) == (calls, reasoning)


def test_formats_that_are_asked_for_replace_those_of_the_template() -> None:
    chosen = FormatNames("mistral", "none").resolved(TEMPLATES["hermes"], {"<think>": 7})
    assert (chosen.tool_calls, chosen.reasoning) == ("mistral", "none")
    assert FormatNames("harmony").resolved("", {}).reasoning == "harmony"
    with pytest.raises(ChatFormatError, match="harmony is one format for both"):
        FormatNames("hermes", "harmony").resolved("", {})


@pytest.mark.parametrize(
    ("name", "prompt_end", "continued", "beginning"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", None, "reasoning"),
        ("think", "assistant\n<think>\n\n</think>\n\n", None, "content"),
        ("think", "assistant\n", None, "open"),
        ("think", "x", "<think>half a", "reasoning"),
        ("think", "x", "<think>a</think> half", "content"),
        ("harmony", "<|start|>assistant", None, "open"),
        ("harmony", "x", "half", "content"),
        ("hermes", "<think>", None, "content"),
    ],
)
def test_the_prompt_shows_where_the_answer_begins(
    name: str, prompt_end: str, continued: str | None, beginning: Beginning
) -> None:
    assert formats(name).beginning(prompt_end, continued) == beginning


ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
THINK_MARKERS, COHERE_TAGS = TAGS["think"].markers, TAGS["cohere"]
MARKERS = [*THINK_MARKERS, *HARMONY_MARKERS, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
MARKERS += [*TAGS["seed_oss"].markers, "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>"]
MARKERS += [*COHERE_TAGS.markers, *COHERE_TAGS.opening, "<|START_ACTION|>", "<|END_ACTION|>"]
MARKERS += ["</minimax:tool_call>", *ARGUMENTS, *TAGS["gemma"].markers, "<|tool_call>", "<tool_call|>", '<|"|>']
MARKERS += ["<start_function_call>", "<end_function_call>", "<escape>", "<|tools_prefix|>", "<|tools_suffix|>"]
MARKERS += ["<function_calls>", "</function_calls>"]
LETTERS = LLTokenizer(tiny_tokenizer.train(1024).to_str(), eos_token=1)


def _with_markers() -> tuple[LLTokenizer, dict[str, int]]:
    """A vocabulary in which the markers are special tokens."""
    library = tiny_tokenizer.train(1024)
    library.add_tokens([tokenizers.AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return LLTokenizer(library.to_str(), eos_token=1), {marker: library.token_to_id(marker) for marker in MARKERS}


TOKENS = _with_markers()


@lru_cache(maxsize=32)
def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    check_grammar(grammar)
    return LLMatcher(tokenizer, grammar, log_level=0)


def allowed(grammar: str, text: str, tokenizer: LLTokenizer) -> bool:
    matcher = matcher_of(grammar, tokenizer).deep_copy()
    return matcher.consume_tokens(tokenizer.tokenize_str(text, parse_special=True)) and matcher.is_accepting()


CALLS = {
    "hermes": [HERMES_ADD, HERMES_NOW],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        CODER_NOW,
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
        SEED_NOW,
    ],
    "minimax_m2": ['<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>', MINIMAX_NOW],
    "glm": ["<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", GLM_NOW],
    "glm_compact": [GLM_ADD, "<tool_call>now</tool_call>"],
    "gemma": [GEMMA_ADD, GEMMA_NOW],
    "functiongemma": [FUNCTIONGEMMA_ADD, FUNCTIONGEMMA_NOW],
    "apertus": APERTUS_CALLS,
    "olmo3": ["add(a=1)", "now()"],
    "mistral": CALL_LIST,
    "mistral_args": ['[TOOL_CALLS]add[ARGS]{"a": 1}', "[TOOL_CALLS]now[ARGS]{}"],
    "nemotron": CALL_LIST,
    "granite": CALL_LIST,
    "hunyuan": CALL_LIST,
    "phi4_mini": CALL_LIST,
    "deepseek_v3": [V3_ADD, V3_NOW],
    "deepseek_v31": [V31_ADD, V31_NOW],
    "cohere": [COHERE_ADD, COHERE_NOW],
    "llama3_json": ['{"name": "add", "parameters": {"a": 1}}', '{"name": "now", "parameters": {}}'],
    "harmony": [HARMONY_ADD, HARMONY_ADD.replace("add", "now").replace('{"a": 1}', "{}")],
}


def _join(name: str, calls: Sequence[str]) -> str:
    in_lines = ("olmo3", "hermes", "qwen3_coder", "seed_oss", "minimax_m2", "glm", "deepseek_v3")
    in_list = dict.fromkeys(("mistral", "nemotron", "granite", "hunyuan", "phi4_mini", "apertus"), ", ")
    joined = {"llama3_json": "; ", "cohere": ",\n    ", **in_list, **dict.fromkeys(in_lines, "\n")}.get(name, "").join(
        calls
    )
    around = {"mistral": "[TOOL_CALLS][%s]", "minimax_m2": "<minimax:tool_call>\n%s\n</minimax:tool_call>"}
    around |= {"nemotron": "<TOOLCALL>[%s]</TOOLCALL>", "granite": "<|tool_call|>[%s]", "phi4_mini": "functools[%s]"}
    around["hunyuan"] = "<tool_calls>[%s]</tool_calls>"
    around |= {"cohere": COHERE, "apertus": APERTUS, "olmo3": OLMO}
    around |= dict.fromkeys(("deepseek_v3", "deepseek_v31"), DEEPSEEK)
    return around.get(name, "%s") % joined


@pytest.mark.parametrize(
    ("name", "thinks", "in_tokens"),
    [
        *((name, thinks, True) for name in CALLS for thinks in (True, False)),
        *((name, thinks, False) for name in CALLS for thinks in (True, False) if name != "harmony"),
    ],
)
def test_every_format_has_a_grammar_for_every_tool_choice(name: str, thinks: bool, in_tokens: bool) -> None:
    tokenizer, vocabulary = TOKENS if in_tokens else (LETTERS, {})
    chosen = formats(f"{name} think" if thinks and name != "harmony" else name, vocabulary)
    beginning = chosen.beginning("assistant", None)
    reasoning = ANALYSIS if name == "harmony" else "<think>\nA {thought}.\n</think>\n\n" if thinks else ""
    words = f"{FINAL}Words, [] and {{}}." if name == "harmony" else "Words, [] and {}."
    one, wrong = _join(name, CALLS[name][:1]), _join(name, CALLS[name][:1]).replace("1", "true")
    two = _join(name, CALLS[name])

    def whole(text: str, *, required: bool, parallel: bool = True, tools: Sequence[ToolSchema] = TOOLS) -> bool:
        grammar = chosen.tool_grammar(tools, beginning, required=required, parallel=parallel)
        return allowed(grammar, text, tokenizer)

    for before in {"", reasoning}:
        assert whole(before + words, required=False)
        assert not whole(before + words, required=True)
        assert whole(before + one, required=False)
        assert whole(before + one, required=True)
        assert whole(before + one, required=True, parallel=False)
        assert not whole(before + wrong, required=True)
        assert not whole(before + wrong, required=False)
        assert not whole(before + one, required=True, tools=TOOLS[1:])
        if name != "harmony":  # a call ends its answers
            assert whole(before + two, required=True)
            assert not whole(before + two, required=True, parallel=False)
        schema = json_grammar({"type": "array"})
        either = chosen.tool_grammar(TOOLS, beginning, required=False, parallel=False, otherwise=schema)
        final = FINAL if name == "harmony" else ""
        for text, expected in ((one, True), (f"{final}[1, 2]", True), (words, False)):
            assert allowed(either, before + text, tokenizer) == expected
        assert allowed(chosen.behind_reasoning(schema, beginning), f"{before}{final}[1]", tokenizer)
        assert not allowed(chosen.behind_reasoning(schema, beginning), before + words, tokenizer)


RUN = {
    "type": "object",
    "properties": {"timeout": {"type": "integer"}, "command": {"type": "string"}, "note": {"type": "string"}},
    "required": ["command"],
}
SHUFFLED = {
    "hermes": '<tool_call>\n{"name": "run", "arguments": %s}\n</tool_call>',
    "mistral_args": "[TOOL_CALLS]run[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.run <|constrain|>json<|message|>%s",
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_arguments_that_are_not_required_stand_in_any_order(name: str) -> None:
    tokenizer, vocabulary = TOKENS
    for arguments, expected in (
        ('{"command": "make", "note": "Build", "timeout": 5}', True),
        ('{"note":"Build","timeout":5,"command":"make"}', True),
        ('{\n  "command" : "make"\n}', True),
        ('{"note": "Build", "timeout": 5}', False),
        ('{"command": "make", "other": 5}', False),
        ('{"command": "make",}', False),
        ('{"command": "make", "timeout": "5"}', False),
    ):
        for strict in (False, True):
            tools = [ToolSchema("run", RUN, strict)]
            grammar = formats(name, vocabulary).tool_grammar(tools, "open", required=True, parallel=True)
            in_order = not strict or "timeout" not in arguments  # the schema's
            if strict and "other" in arguments:  # which this schema allows
                continue
            assert allowed(grammar, SHUFFLED[name] % arguments, tokenizer) == (expected and in_order)


def test_parameters_in_xml_that_are_not_required_stand_in_any_order() -> None:
    grammar = formats("qwen3_coder").tool_grammar([ToolSchema("run", RUN)], "content", required=True, parallel=True)
    written = {key: f"<parameter={key}>\n1\n</parameter>\n" for key in RUN["properties"]}
    for order, expected in (("command note timeout", True), ("note timeout command", True), ("note timeout", False)):
        body = "".join(written[key] for key in order.split())
        text = f"<tool_call>\n<function=run>\n{body}</function>\n</tool_call>"
        assert allowed(grammar, text, LETTERS) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES_ADD.removesuffix("\n</tool_call>")),
        ("qwen3_coder", CODER_SAY.removesuffix("\n</tool_call>")),
        ("gemma", GEMMA_SAY.removesuffix("<tool_call|>")),
        ("harmony", HARMONY_ADD),
        ("hermes think", f"<think>Hm.</think>{HERMES_ADD}"),
    ],
)
def test_a_call_ends_with_its_arguments(name: str, text: str) -> None:
    parser = formats(name).parser(TOOLS, "open" if name == "harmony" or "think" in name else "content")
    complete = [bool(parser.append(letter)) and parser.num_calls > 0 and not parser.in_call for letter in text]
    assert complete[-1]
    assert not any(complete[: text.index("1") + 1])


def test_tokens_around_an_answer_are_no_part_of_it_and_a_grammar_allows_them() -> None:
    tokenizer, vocabulary = TOKENS
    chosen = formats("cohere cohere_think", vocabulary)
    kept = chosen.kept_tokens(calls=True)
    assert kept[vocabulary["<|START_RESPONSE|>"]] == ""
    assert kept[vocabulary["<|START_THINKING|>"]] == "<|START_THINKING|>"
    schema = json_grammar({"type": "array"})
    before = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>"
    assert allowed(chosen.behind_reasoning(schema, "open"), f"{before}[1]", tokenizer)
    for required in (True, False):
        grammar = chosen.tool_grammar(TOOLS, "open", required=required, parallel=True)
        assert allowed(grammar, f"{before}Words", tokenizer) != required
        assert allowed(grammar, COHERE % COHERE_NOW, tokenizer)


def test_a_grammar_allows_the_tags_around_an_answer() -> None:
    chosen, schema = formats("hunyuan hunyuan_think"), json_grammar({"type": "array"})
    called = f"<tool_calls>{LIST}</tool_calls>"
    for before, after in (("", ""), ("<answer>\n", "\n</answer>"), ("<think>\nHm.\n</think>\n<answer>\n", "")):
        assert allowed(chosen.behind_reasoning(schema, "open"), f"{before}[1]{after}", LETTERS)
        for required in (True, False):
            grammar = chosen.tool_grammar(TOOLS, "open", required=required, parallel=True)
            assert allowed(grammar, f"{before}{called}{after}", LETTERS)
            assert allowed(grammar, f"{before}Words{after}", LETTERS) != required


@pytest.mark.parametrize("in_tokens", [True, False], ids=["tokens", "letters"])
def test_reasoning_that_the_prompt_began_has_to_end_before_what_is_constrained(in_tokens: bool) -> None:
    tokenizer, vocabulary = TOKENS if in_tokens else (LETTERS, {})
    chosen = formats("hermes think", vocabulary)
    for required in (True, False):
        grammar = chosen.tool_grammar(TOOLS, "reasoning", required=required, parallel=True)
        assert allowed(grammar, f"Maybe {{}}?</think>\n{HERMES_ADD}", tokenizer)
        assert not allowed(grammar, HERMES_ADD, tokenizer)
    assert not allowed(chosen.behind_reasoning(json_grammar({}), "reasoning"), "[1]", tokenizer)
    assert allowed(chosen.behind_reasoning(json_grammar({}), "reasoning"), "Hm.</think>[1]", tokenizer)
    assert chosen.behind_reasoning(json_grammar({}), "content") == json_grammar({})


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "free\n</text> [1]", True),
        ({"type": "string", "maxLength": 3}, "four", False),
        ({"type": "string", "maxLength": 0}, "four", False),
        ({"type": "string", "minLength": 4.0, "maxLength": None}, "four", True),
        ({"enum": ["red", 3]}, "red", True),
        ({"enum": ["red", 3]}, "3", True),
        ({"enum": ["red", 3]}, "blue", False),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, "[1, 2]", True),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, '["a"]', False),
        ({"$ref": "#/$defs/color", "default": "red"}, "red", True),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, "red", True),
        ({"$ref": "#/$defs/color"}, "blue", False),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, "red", True),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, "null", True),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, "blue", False),
        ({"anyOf": [{"enum": ["red"]}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}, "[1]", True),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "null", True),
        ({"type": ["string", "null"], "maxLength": 3}, "null", True),
        ({"type": ["string", "null"], "maxLength": 3}, "four", False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "any text", True),
    ],
)
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    ],
)
def test_arguments_in_xml_conform_to_their_schemas(
    name: str, written: str, schema: dict[str, Any], value: str, expected: bool
) -> None:
    definitions = {"n": {"type": "integer"}, "color": {"type": "string", "enum": ["red", "green"]}}
    arguments = {"type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": definitions}
    tools = [ToolSchema("f", arguments)]
    grammar, text = formats(name).tool_grammar(tools, "content", required=True, parallel=False), written.format(value)
    assert allowed(grammar, text, LETTERS) == expected
    if expected:
        parser = formats(name).parser(tools, "content")
        [call] = merge(parser.append(text).calls)
        assert json.loads(call.arguments) == {"p": json.loads(read_value(value, tools[0].properties["p"]))}


TREE = {"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
ORDER = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 12},
        "size": {"enum": ["s", "m", 3]},
        "items": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
        "tree": {"$ref": "#/$defs/tree"},
        "more": {},
    },
    "required": ["size"],
    "$defs": {"tree": TREE},
}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{size:<|"|>m<|"|>}', {"size": "m"}),
        ("{size:3,items:[]}", {"size": 3, "items": []}),
        ('{note:<|"|>a, {"b"}: c<|"|>,size:3,items:[1,-2.5e3,null]}',
         {"note": 'a, {"b"}: c', "size": 3, "items": [1, -2500.0, None]}),
        ("{size:3,tree:{child:{child:{}}}}", {"size": 3, "tree": {"child": {"child": {}}}}),
        ('{size:3,more:{a:[true,<|"|><|"|>]}}', {"size": 3, "more": {"a": [True, ""]}}),
        ("{}", None),
        ("{size:4}", None),
        ('{note:<|"|>thirteen long<|"|>,size:3}', None),
        ('{size:3,note:<|"|>late<|"|>}', {"size": 3, "note": "late"}),
        ("{size:3,size:3}", None),
        ("{size:3,}", None),
        ("{,size:3}", None),
        ('{size:3,items:[<|"|>1<|"|>]}', None),
        ("{size:3,tree:{other:1}}", None),
        ("{size:3,unknown:1}", None),
    ],
)  # fmt: skip
def test_gemmas_arguments_conform_to_their_schemas(written: str, value: dict[str, Any] | None) -> None:
    tools = [ToolSchema("now", {}), ToolSchema("order", ORDER)]
    text = f"<|tool_call>call:order{written}<tool_call|>"
    for tokenizer, vocabulary in (TOKENS, (LETTERS, {})):
        chosen = formats("gemma channel", vocabulary)
        grammar = chosen.tool_grammar(tools, "open", required=True, parallel=True)
        for before in ("", "<|channel>thought\nHm.\n<channel|>"):
            assert allowed(grammar, before + text, tokenizer) == (value is not None)
    if value is not None:
        [call] = merge(formats("gemma").parser(tools, "content").append(text).calls)
        assert json.loads(call.arguments) == value


def test_gemmas_grammar_grows_with_the_arguments_and_is_the_same_every_time() -> None:
    many = {f"a{number}": {"type": "integer"} for number in range(40)}
    tools = [ToolSchema("f", {"type": "object", "properties": many})]
    grammar, again = (formats("gemma").tool_grammar(tools, "content", required=True, parallel=False) for _ in range(2))
    assert grammar == again, "it is compiled once"
    assert len(grammar) < 20_000
    assert allowed(grammar, "<|tool_call>call:f{a3:1,a39:2}<tool_call|>", LETTERS)
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        nested = {"type": "array", "items": nested}
    with pytest.raises(GrammarError, match="nested too deeply"):
        formats("gemma").tool_grammar(
            [ToolSchema("f", {"properties": {"a": nested}})], "content", required=True, parallel=False
        )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("olmo3", "a=b"),
        ("olmo3", "a "),
        ("qwen3_coder", "a>b"),
        ("minimax_m2", 'a"b'),
        ("glm", "a<b"),
        ("seed_oss", ""),
    ],
)
def test_calls_refuse_a_name_that_would_be_read_as_another(name: str, key: str) -> None:
    tools = [ToolSchema("f", {"type": "object", "properties": {key: {"type": "integer"}}})]
    with pytest.raises(GrammarError, match=f"cannot name {re.escape(repr(key))}"):
        formats(name).tool_grammar(tools, "content", required=True, parallel=False)


@pytest.mark.parametrize("key", ["dc:title", " a", "}", "", "<b>"])
@pytest.mark.parametrize("in_tokens", [True, False], ids=["tokens", "letters"])
def test_gemmas_calls_quote_a_name_that_would_be_read_as_another(key: str, in_tokens: bool) -> None:
    tokenizer, vocabulary = TOKENS if in_tokens else (LETTERS, {})
    tools = [ToolSchema("f", {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]})]
    grammar = formats("gemma", vocabulary).tool_grammar(tools, "content", required=True, parallel=False)
    text = f'<|tool_call>call:f{{<|"|>{key}<|"|>:1}}<tool_call|>'
    assert allowed(grammar, text, tokenizer)
    assert not allowed(grammar, f"<|tool_call>call:f{{{key}:1}}<tool_call|>", tokenizer)
    [call] = merge(formats("gemma").parser(tools, "content").append(text).calls)
    assert json.loads(call.arguments) == {key: 1}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{k:<|"|>v<|"|>}', True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "{k:1}", False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "{k:1}", True),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}, "{a:1}", False),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, '<|"|>red<|"|>', True),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, "1", False),
        ({"type": "string", "minLength": 1}, '<|"|>a<|"|>', True),
        ({"type": "string", "minLength": 1}, '<|"|><|"|>a<|"|>', False),
    ],
)
@pytest.mark.parametrize("in_tokens", [True, False], ids=["tokens", "letters"])
def test_gemmas_members_and_strings_conform_to_their_schemas(
    schema: dict[str, Any], value: str, expected: bool, in_tokens: bool
) -> None:
    tokenizer, vocabulary = TOKENS if in_tokens else (LETTERS, {})
    arguments = {"type": "object", "properties": {"p": schema}, "$defs": {"color": {"enum": ["red", "green"]}}}
    grammar = formats("gemma", vocabulary).tool_grammar(
        [ToolSchema("f", arguments)], "content", required=True, parallel=False
    )
    assert allowed(grammar, f"<|tool_call>call:f{{p:{value}}}<tool_call|>", tokenizer) == expected


def test_a_function_with_free_arguments_takes_any_parameters() -> None:
    tools = [ToolSchema("f", {"type": "object"})]
    grammar = formats("qwen3_coder").tool_grammar(tools, "content", required=True, parallel=False)
    parameter = "<parameter={}>\nx\n</parameter>\n"
    body = parameter.format("a") + parameter.format("b")
    assert allowed(grammar, f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", LETTERS)
    for tokenizer, vocabulary in (TOKENS, (LETTERS, {})):
        grammar = formats("glm_compact", vocabulary).tool_grammar(tools, "content", required=True, parallel=False)
        body = "".join(f"<arg_key>{key}</arg_key><arg_value>x\n</arg_value>" for key in "ab")
        assert allowed(grammar, f"<tool_call>f{body}</tool_call>", tokenizer)
        assert not allowed(grammar, f"<tool_call>f{body}", tokenizer)
    grammar = formats("minimax_m2").tool_grammar(tools, "content", required=True, parallel=False)
    body = '<parameter name="a">x</parameter>\n'
    assert allowed(grammar, f'<minimax:tool_call>\n<invoke name="f">\n{body}</invoke>\n</minimax:tool_call>', LETTERS)


@pytest.mark.parametrize(
    ("name", "written", "number"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
        ("gemma", "<|tool_call>call:f{{{}}}<tool_call|>", "{}:{}"),
        ("olmo3", "<function_calls>f({})</function_calls>", "{}={}"),
    ],
)
def test_arguments_that_a_schema_does_not_name_conform_to_the_one_of_all_others(
    name: str, written: str, number: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    tools = [ToolSchema("f", schema)]
    grammar = formats(name).tool_grammar(tools, "content", required=True, parallel=False)
    for key, value, expected in (
        ("a", "null", True),
        ("other", "1", True),
        ("other", "true", False),
        ("a", "1", False),
    ):
        text = written.format(number.format(key, value))
        assert allowed(grammar, text, LETTERS) == expected
        if expected:
            [call] = merge(formats(name).parser(tools, "content").append(text).calls)
            assert json.loads(call.arguments) == {key: json.loads(value)}


def test_tokens_of_a_format_are_kept_and_may_end_an_answer() -> None:
    vocabulary = TOKENS[1]
    chosen = formats("harmony", vocabulary)
    assert set(chosen.kept_tokens(calls=False).values()) == set(HARMONY_MARKERS)
    assert chosen.end_token_ids == {vocabulary["<|call|>"], vocabulary["<|return|>"]}
    hermes = formats("hermes think", vocabulary)
    assert set(hermes.kept_tokens(calls=False).values()) == set(THINK_MARKERS)
    assert set(hermes.kept_tokens(calls=True).values()) == {*THINK_MARKERS, "<tool_call>", "</tool_call>"}


def test_reasoning_is_counted_whatever_pieces_its_tokens_come_in() -> None:
    for pieces in ([[9, 7, 8, 1, 1, 5, 1, 7, 8, 1]], [[9, 7], [8], [1, 1], [5, 1, 7], [8, 1]]):
        counter = ReasoningTokens([7, 8], {5, 6}, "open")
        for piece in pieces:
            counter.append(piece)
        assert counter.num_tokens == 3
    counter = ReasoningTokens([7], {5}, "reasoning")
    counter.append([1, 2, 5, 3])
    assert counter.num_tokens == 2


def test_nothing_of_the_content_precedes_an_answer_that_is_constrained() -> None:
    chosen, schema = formats("harmony", TOKENS[1]), json_grammar({"type": "array"})
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    free = chosen.tool_grammar(TOOLS, "open", required=False, parallel=True)
    required = chosen.tool_grammar(TOOLS, "open", required=True, parallel=True)
    either = chosen.tool_grammar(TOOLS, "open", required=False, parallel=True, otherwise=schema)
    assert allowed(free, f"{preamble}{HARMONY_ADD}", TOKENS[0])
    assert not allowed(required, f"{preamble}{HARMONY_ADD}", TOKENS[0])
    assert not allowed(either, f"{preamble}{FINAL}[1]", TOKENS[0])
    assert not allowed(chosen.behind_reasoning(schema, "open"), f"{preamble}{FINAL}[1]", TOKENS[0])


def test_what_templates_refuse_to_repeat_is_not_generated() -> None:
    """Mistral's want ids of nine letters, Llama 3.1's one call in a message."""
    parser = formats("mistral").parser(TOOLS, "content")
    [call] = parser.append('[TOOL_CALLS][{"name": "now", "arguments": {').calls[:1]
    assert call.id is not None
    assert re.fullmatch("[a-z0-9]{9}", call.id)
    template = TEMPLATES["llama3_json"] + "{{ raise_exception('This model only supports single tool-calls at once!') }}"
    for chosen, several in ((ChatFormats(FormatNames(), template, {}), False), (formats("llama3_json"), True)):
        grammar = chosen.tool_grammar(TOOLS, "content", required=True, parallel=True)
        assert allowed(grammar, _join("llama3_json", CALLS["llama3_json"]), LETTERS) == several


def test_json_in_xml_may_hold_the_tag_that_ends_an_argument() -> None:
    edits = {"type": "array", "items": {"type": "string"}}
    tools = [ToolSchema("edit", {"type": "object", "properties": {"edits": edits, "again": {"type": "boolean"}}})]
    value = ["<parameter=a>\n</parameter>\n", 'b"</parameter>']
    written = f"<parameter=edits>\n{json.dumps(value)}\n</parameter>\n<parameter=again>\ntrue\n</parameter>\n"
    text = f"<tool_call>\n<function=edit>\n{written}</function>\n</tool_call>"
    chosen = formats("qwen3_coder")
    assert allowed(chosen.tool_grammar(tools, "content", required=True, parallel=False), text, LETTERS)
    for pieces in splits(text):
        parser, whole = chosen.parser(tools, "content"), Parsed()
        for piece in pieces:
            whole.extend(parser.append(piece))
        [call] = merge(whole.calls)
        assert json.loads(call.arguments) == {"edits": value, "again": True}


def test_strings_in_xml_are_shown_as_they_arrive() -> None:
    parser = formats("qwen3_coder").parser(TOOLS, "content")
    parser.append("<tool_call>\n<function=say>\n<parameter=text>\nfirst")
    assert [call.arguments for call in parser.append(' "second"\n').calls] == [' \\"second\\"']
    assert [call.arguments for call in parser.append("third").calls] == ["\\nthird"]
