"""Tool calls out of text that comes in pieces of any size."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.api.tool_calls import JsonObject, Parsed, ToolCallParser, merge
from llmservice_server.text.tool_format import HERMES, LLAMA, ToolFormat

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "now", "get_weather-2"]), OBJECT), max_size=3)
WORDS = st.text(max_size=12).filter(lambda words: "<tool_call>" not in words and not words.startswith("{"))


def _write(layout: ToolFormat, words: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    written = [layout.head(name) + json.dumps(arguments) + layout.tail for name, arguments in calls]
    return words + layout.separator.join(written)


def _parse(layout: ToolFormat, text: str, cuts: list[int]) -> tuple[str, Parsed]:
    parser = ToolCallParser(layout)
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    content, calls = "", []
    for start, end in itertools.pairwise(borders):
        parsed = parser.append(text[start:end])
        content += parsed.content
        calls += parsed.calls
    return content + parser.flush().content, Parsed(calls=calls)


@settings(deadline=None)
@given(words=WORDS, calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_however_the_text_is_cut_words_and_calls_are_the_same(
    words: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    content, parsed = _parse(HERMES, _write(HERMES, words, calls), cuts)
    assert content == words
    assert [(call.name, json.loads(call.arguments)) for call in merge(parsed.calls)] == calls
    assert [call.index for call in merge(parsed.calls)] == list(range(len(calls)))
    assert len({call.id for call in parsed.calls if call.id}) == len(calls)


@settings(deadline=None)
@given(words=WORDS, calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_llamas_answers_are_either_calls_or_words(
    words: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    assert _parse(LLAMA, words, cuts) == (words, Parsed())
    content, parsed = _parse(LLAMA, _write(LLAMA, "", calls), cuts)
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in merge(parsed.calls)] == calls


@pytest.mark.parametrize(
    ("text", "content", "names", "arguments"),
    [
        ("Hello <tool", "Hello <tool", [], []),
        ('Hello <tool_call>\n{"name": "ad', "Hello ", [], []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": "}', "", ["add"], ['{"a": "}']),
    ],
)
def test_an_answer_that_is_cut_off_shows_what_is_certain(
    text: str, content: str, names: list[str], arguments: list[str]
) -> None:
    shown, parsed = _parse(HERMES, text, [])
    calls = merge(parsed.calls)
    assert (shown, [call.name for call in calls], [call.arguments for call in calls]) == (content, names, arguments)


def test_arguments_are_shown_as_soon_as_they_are_there() -> None:
    parser = ToolCallParser(HERMES)
    parser.append(HERMES.head("add"))
    assert [call.arguments for call in parser.append('{"a": [1').calls] == ['{"a": [1']
    assert [call.arguments for call in parser.append(", 2").calls] == [", 2"]


@given(value=OBJECT, behind=st.text(max_size=5))
def test_the_end_of_an_object_is_found(value: dict[str, Any], behind: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scanner = JsonObject()
    assert scanner.scan(text + behind) == len(text)
    assert scanner.complete
