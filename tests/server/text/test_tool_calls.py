"""Tool calls out of text that comes in pieces of any size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from llmservice_server.sampling.grammar import LarkRules, check_grammar, lark_grammar
from llmservice_server.text.chat_template import ChatTemplate
from llmservice_server.text.json_calls import HERMES, LLAMA3_JSON, JsonFormat, JsonObject
from llmservice_server.text.olmo import OLMO3
from llmservice_server.text.tool_calls import Parsed, ToolFormat, ToolSchema, arguments_schema, merge, properties
from llmservice_server.text.xml_calls import QWEN3_CODER
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.types.errors import GrammarError

TOKENIZER = LLTokenizer(tiny_tokenizer.train(1024).to_str(), eos_token=1)
TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ToolSchema("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def whole(grammar: str, text: str, tokenizer: LLTokenizer = TOKENIZER) -> bool:
    """The text is an answer that the grammar allows, and may end here."""
    check_grammar(grammar)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def grammar(layout: ToolFormat, tag_ids: dict[str, int], *, required: bool = False, parallel: bool = True) -> str:
    rules = LarkRules(tag_ids)
    return lark_grammar(rules.text(layout.answer(rules, TOOLS, None if required else "", parallel=parallel)))


def with_tags() -> tuple[LLTokenizer, dict[str, int]]:
    """A vocabulary in which the tags are tokens of their own, as in Qwen's."""
    library = tiny_tokenizer.train(1024)
    library.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in HERMES.markers])
    return LLTokenizer(library.to_str(), eos_token=1), {tag: library.token_to_id(tag) for tag in HERMES.markers}


@pytest.mark.parametrize(
    ("text", "auto", "auto_one", "required", "required_one"),
    [
        ("", True, True, False, False),
        ('Just words, {} and "quotes".\n', True, True, False, False),
        (ADD, True, True, True, True),
        ("Let me see.\n" + ADD, True, True, False, False),
        (f"{ADD}\n{NOW}", True, False, True, False),
        (f"{ADD}\n{ADD}\n{NOW}", True, False, True, False),
        ("<tool_call>", False, False, False, False),
        ("words <tool_call> words", False, False, False, False),
        (ADD.replace("add", "subtract"), False, False, False, False),
        (ADD.replace("1", '"one"'), False, False, False, False),
        (ADD.removesuffix("</tool_call>"), False, False, False, False),
        (f"{ADD} and words", False, False, False, False),
    ],
)
def test_hermes_calls_stand_alone_or_behind_words(
    text: str, auto: bool, auto_one: bool, required: bool, required_one: bool
) -> None:
    for tokenizer, tag_ids in ((TOKENIZER, {}), with_tags()):
        allowed = [
            whole(grammar(HERMES, tag_ids, required=must, parallel=many), text, tokenizer)
            for must, many in ((False, True), (False, False), (True, True), (True, False))
        ]
        assert allowed == [auto, auto_one, required, required_one]


def test_a_tag_that_is_a_token_is_not_spelled_in_letters() -> None:
    tokenizer, tag_ids = with_tags()
    rules = grammar(HERMES, tag_ids)
    for text, allowed in (("a <tool", True), ("a <tool_call>", False), ("a </tool_call>", True)):
        matcher = LLMatcher(tokenizer, rules, log_level=0)
        letters = TOKENIZER.tokenize_str(text)
        assert (matcher.consume_tokens(letters) and matcher.is_accepting()) == allowed


@pytest.mark.parametrize(
    ("text", "auto", "required"),
    [
        ("", True, False),
        ("The answer is {}.", True, False),
        ('{"name": "add", "parameters": {"a": 7}}', True, True),
        ('{"name": "add", "parameters": {"a": 7}}; {"name": "now", "parameters": {}}', True, True),
        ('{"name": "add"}', False, False),
        ('{"name" : "Ann"}', False, False),
        ('{"answer": {"name": "Ann"}}', True, False),
        ("{}", True, False),
    ],
)
def test_llama_calls_are_answers_that_begin_with_a_brace(text: str, auto: bool, required: bool) -> None:
    assert whole(grammar(LLAMA3_JSON, {}), text) == auto
    assert whole(grammar(LLAMA3_JSON, {}, required=True), text) == required


def test_the_tiny_template_writes_calls_as_the_grammar_does() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    special = {"bos_token": tiny_tokenizer.BOS, "eos_token": tiny_tokenizer.EOS}
    rendered = ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, special).render(conversation, tools)
    assert ADD in rendered
    assert "<tool_response>\n2\n</tool_response>" in rendered
    assert '{"name": "add"}' in rendered


POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
REFERRING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "to a member": (
        {"properties": {"a": POINT, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
        {"a": {"x": 1}, "b": {"x": 2}},
        {"a": {"x": 1}, "b": 2},
    ),
    "to a part of a member": (
        {"properties": {"a": {"anyOf": [POINT, {"type": "null"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}},
        {"a": None, "b": {"x": 2}},
        {"b": None},
    ),
    "to the whole": (
        {"properties": {"size": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}}},
        {"size": 1, "children": [{"size": 2, "children": []}]},
        {"size": 1, "children": [[]]},
    ),
    "to a definition": (
        {"properties": {"a": {"$ref": "#/$defs/Pair%3Ca~1b%3E"}}, "$defs": {"Pair<a/b>": POINT}},
        {"a": {"x": 2}},
        {"a": 2},
    ),
    "of the whole": (
        {"$ref": "#/definitions/Arguments", "definitions": {"Arguments": POINT}},
        {"x": 1},
        {"y": 1},
    ),
}


@pytest.mark.parametrize("name", REFERRING)
@pytest.mark.parametrize(
    ("layout", "call", "member"),
    [
        (HERMES, '{{"name": "f", "arguments": {{{}}}}}', '"{}": {},'),
        (QWEN3_CODER, "<function=f>\n{}</function>", "<parameter={}>\n{}\n</parameter>\n"),
        (OLMO3, "f({})", "{}={}, "),
    ],
)
def test_schemas_may_refer_to_any_place_of_theirs(name: str, layout: ToolFormat, call: str, member: str) -> None:
    given, right, wrong = REFERRING[name]
    tools, rules = [ToolSchema("f", arguments_schema(given))], LarkRules({})
    rule = rules.text(layout.answer(rules, tools, None, parallel=False))
    for arguments, expected in ((right, True), (wrong, False)):
        members = [member.format(key, json.dumps(value)) for key, value in arguments.items()]
        text = f"{layout.trigger}{layout.start}{call.format(''.join(members).rstrip(', '))}{layout.end}"
        assert whole(lark_grammar(rule), text) == expected
        if expected:
            _, parsed = _parse(layout, text, [], tools)
            assert [json.loads(each.arguments) for each in merge(parsed.calls)] == [arguments]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "now", "get_weather-2"]), OBJECT), max_size=3)
CONTENT = st.text(max_size=12).filter(lambda text: "<tool_call>" not in text and not text.startswith("{"))


def _write(layout: JsonFormat, text: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    written = [layout.head % name + json.dumps(arguments) + layout.tail for name, arguments in calls]
    begin, end = (layout.trigger + layout.start, layout.end) if calls else ("", "")
    return text + begin + layout.separator.join(written) + end


def _parse(layout: ToolFormat, text: str, cuts: list[int], tools: Sequence[ToolSchema] = TOOLS) -> tuple[str, Parsed]:
    parser = layout.parser(tools)
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    content, calls = "", []
    for start, end in itertools.pairwise(borders):
        parsed = parser.append(text[start:end])
        content += parsed.content
        calls += parsed.calls
    return content + parser.flush().content, Parsed(calls=calls)


@settings(deadline=None)
@given(text=CONTENT, calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_text_and_calls_do_not_depend_on_the_pieces(
    text: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    content, parsed = _parse(HERMES, _write(HERMES, text, calls), cuts)
    assert content == text
    assert [(call.name, json.loads(call.arguments)) for call in merge(parsed.calls)] == calls
    assert [call.index for call in merge(parsed.calls)] == list(range(len(calls)))
    assert len({call.id for call in parsed.calls if call.id}) == len(calls)


@settings(deadline=None)
@given(text=CONTENT, calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_llamas_answers_are_either_calls_or_text(
    text: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    assert _parse(LLAMA3_JSON, text, cuts) == (text, Parsed())
    content, parsed = _parse(LLAMA3_JSON, _write(LLAMA3_JSON, "", calls), cuts)
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in merge(parsed.calls)] == calls


@pytest.mark.parametrize(
    ("text", "content", "names", "arguments"),
    [
        ("Hello <tool", "Hello <tool", [], []),
        ('Hello <tool_call>\n{"name": "ad', 'Hello <tool_call>\n{"name": "ad', [], []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": "}', "", ["add"], ['{"a": "}']),
    ],
)
def test_an_answer_that_is_cut_off_has_what_is_certain(
    text: str, content: str, names: list[str], arguments: list[str]
) -> None:
    prefix, parsed = _parse(HERMES, text, [])
    calls = merge(parsed.calls)
    assert (prefix, [call.name for call in calls], [call.arguments for call in calls]) == (
        content,
        names,
        arguments,
    )


def test_arguments_are_shown_as_soon_as_they_are_there() -> None:
    parser = HERMES.parser(TOOLS)
    parser.append(HERMES.trigger + HERMES.start + HERMES.head % "add" + "{")
    assert [call.arguments for call in parser.append('"a": [1').calls] == ['"a": [1']
    assert [call.arguments for call in parser.append(", 2").calls] == [", 2"]


@given(value=OBJECT, behind=st.text(max_size=5))
def test_the_end_of_an_object_is_found(value: dict[str, Any], behind: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scanner = JsonObject()
    assert (scanner.append(text + behind), scanner.rest) == (text, behind)
    assert scanner.complete


def test_definitions_are_repeated_for_the_members_that_refer_to_them_and_within_a_bound() -> None:
    definition = {"type": "integer", "description": "n" * 20_000}
    definitions = {"$defs": {"n": definition}}
    members: dict[str, Any] = {"a": {"$ref": "#/$defs/n"}, "b": {"items": {"$ref": "#/$defs/n"}}, "c": True}
    schema = definitions | {"type": "object", "properties": members}
    assert properties(schema) == {"a": definition, "b": members["b"] | definitions, "c": {}}
    for number in range(100):
        members[f"a{number}"] = members["ab"[number % 2]]
    with pytest.raises(GrammarError, match="properties: each with the definitions that it refers to, they take"):
        properties(schema)


def test_definitions_are_written_once_for_the_options_of_a_member() -> None:
    numbers = {"type": "array", "items": {"$ref": "#/$defs/n"}}
    options = [{"type": "string", "maxLength": 3}, {"type": "integer"}, numbers]
    definitions = {"n": {"type": "integer", "description": "n" * 1000}}
    schema = {"type": "object", "properties": {"p": {"anyOf": options}}, "$defs": definitions}
    rules = LarkRules({})
    assert rules.text(QWEN3_CODER.call(rules, ToolSchema("f", schema))).count("n" * 1000) == 1
