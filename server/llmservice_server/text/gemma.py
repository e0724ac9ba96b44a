"""Tool calls of Gemma 4 and FunctionGemma: `call:name{key:value,…}`.

Keys are bare, and strings stand between two quote tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llmservice_server.sampling.grammar import LarkRules, escaped
from llmservice_server.text.json_calls import JsonCallParser
from llmservice_server.text.tool_calls import (
    ToolCallParser,
    ToolFormat,
    ToolSchema,
    definitions,
    members_rule,
    other_members,
    other_name,
    properties,
    referred,
    resolved,
)
from llmservice_server.text.xml_calls import (
    ANY_TEXT,
    choices_of,
    escaped_json,
    json_types,
    options_of,
    string_pattern,
)
from llmservice_server.types.errors import GrammarError

_HEAD = re.compile(r"(?:<\|tool_call>|<start_function_call>)\s*call:([\w.-]+)\s*(?=\{)")
_NAME = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # of a member that the schema does not name
_BARE_KEY = re.compile(r"[^\s:}<]([^:]*[^\s:])?")
_LITERALS = {
    "integer": r"/-?(0|[1-9][0-9]{0,18})/",
    "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,3})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaFormat(ToolFormat):
    """Strings are written as they are, other values as JSON but for the keys of objects."""

    quote: str

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        try:
            arguments = _Values(rules, tool.arguments, self.quote).object(tool.arguments)
        except RecursionError as error:
            raise GrammarError(f"the schema of {tool.name} is nested too deeply: flatten it") from error
        return f"{rules.literal(f'call:{tool.name}')} {arguments}"

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return JsonCallParser(self, _HEAD, partial(_Arguments, self.quote))


GEMMA = GemmaFormat(
    name="gemma",
    trigger="<|tool_call>",
    separator="<tool_call|><|tool_call>",
    end="<tool_call|>",
    quote='<|"|>',
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
FUNCTIONGEMMA = replace(
    GEMMA,
    name="functiongemma",
    trigger="<start_function_call>",
    separator="<end_function_call><start_function_call>",
    end="<end_function_call>",
    quote="<escape>",
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
)


class _Values:
    """The grammar of values, with the definitions of one function's arguments."""

    def __init__(self, rules: LarkRules, arguments: Mapping[str, Any], quote: str) -> None:
        self._rules = rules
        self._quote = quote
        self._shared = definitions(arguments)
        self._of_references: dict[str, str] = {}
        self._any: str | None = None

    def object(self, schema: Mapping[str, Any]) -> str:
        schema = {key: each for key, each in schema.items() if key not in self._shared}
        written = {key: f'{self._key(key)} ":" {self.value(each)}' for key, each in properties(schema).items()}
        more = ""
        if (others := other_members(schema)) is not None:
            more = f'{other_name(self._rules, _NAME, written)} ":" {self.value(others)}'
        members = members_rule(self._rules, schema, written, '","', more)
        return f'"{{" {members} "}}"'

    def _key(self, key: str) -> str:
        """Bare, unless it would be read as another name."""
        return json.dumps(key) if _BARE_KEY.fullmatch(key) else self._rules.literal(f"{self._quote}{key}{self._quote}")

    def value(self, schema: Mapping[str, Any]) -> str:
        schema = resolved({**schema})
        if (reference := schema.get("$ref")) is not None:
            return self._referred(str(reference))
        if (choices := choices_of(schema)) is not None:
            return f"({' | '.join(self._choice(each) for each in choices)})"
        if (options := options_of(schema)) is not None:
            return f"({' | '.join(map(self.value, options))})"
        if "type" not in schema:
            kind = next((kind for word, kind in (("properties", "object"), ("items", "array")) if word in schema), None)
            return self._anything() if kind is None else self._of_type(kind, schema)
        return f"({' | '.join(self._of_type(kind, schema) for kind in sorted(json_types(schema)))})"

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            items = schema.get("items")
            item = self._rule(self.value(items if isinstance(items, dict) else {}))
            return f'"[" ({item} ("," {item})*)? "]"'
        return self.object(schema) if kind == "object" else _LITERALS[kind]

    def _choice(self, choice: Any) -> str:
        if isinstance(choice, str):
            return self._rules.literal(f"{self._quote}{choice}{self._quote}")
        return json.dumps(json.dumps(choice))

    def _string(self, schema: Mapping[str, Any]) -> str:
        pattern, quoted = string_pattern(schema), f"{ANY_TEXT}{escaped(self._quote)}{ANY_TEXT}"
        _, text = self._rules.text_until(self._quote, pattern=pattern, unless="" if pattern == ANY_TEXT else quoted)
        return f"{self._rules.literal(self._quote)} {text}"

    def _referred(self, reference: str) -> str:
        """Of a definition, which may refer to itself; of others, anything."""
        if reference not in self._of_references:
            schema = referred(reference, self._shared)
            if not isinstance(schema, dict):
                return self._anything()
            self._of_references[reference] = rule = self._rules.new_name()
            self._rules.add(f"{rule}: {self.value(schema)}")
        return self._of_references[reference]

    def _anything(self) -> str:
        if self._any is None:
            self._any = self._rules.new_name()
            field = f'/{_NAME}/ ":" {self._any}'
            kinds = [self._string({}), *_LITERALS.values(), f'"{{" ({field} ("," {field})*)? "}}"']
            self._rules.add(f'{self._any}: {" | ".join(kinds)} | "[" ({self._any} ("," {self._any})*)? "]"')
        return self._any

    def _rule(self, content: str) -> str:
        name = self._rules.new_name()
        self._rules.add(f"{name}: {content}")
        return name


class _Arguments:
    """Implements `Arguments`: makes JSON of them."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._open: list[str] = []  # braces and brackets
        self._in_string = False
        self._expects_key = False
        self.complete = False
        self.rest = ""

    def append(self, text: str) -> str:
        written, place, quote = "", 0, self._quote
        while place < len(text) and not self.complete:
            if self._in_string:
                piece, taken = self._take_string(text[place:])
            elif quote.startswith(text[place : place + len(quote)]):
                piece, taken = ('"', len(quote)) if text.startswith(quote, place) else ("", 0)
                self._in_string, self._expects_key = bool(taken), self._expects_key and not taken
            elif self._expects_key and not (text[place].isspace() or text[place] == "}"):
                key, colon, _ = text[place:].partition(":")
                piece, taken = (json.dumps(key.strip()), len(key)) if colon else ("", 0)
                self._expects_key = not colon
            else:
                piece, taken = text[place], 1
                self._take(piece)
            if not taken:
                break
            written, place = written + piece, place + taken
        self.rest = text[place:]
        return written

    def flush(self) -> str:
        return escaped_json(self.rest) if self._in_string else ""

    def _take_string(self, text: str) -> tuple[str, int]:
        """JSON of what belongs to the string, its end included, and how much of `text` that is."""
        string, end, _ = text.partition(self._quote)
        if end:
            self._in_string = False
            return escaped_json(string) + '"', len(string) + len(self._quote)
        held = next(size for size in range(len(self._quote) - 1, -1, -1) if text.endswith(self._quote[:size]))
        return escaped_json(text[: len(text) - held]), len(text) - held

    def _take(self, letter: str) -> None:
        if letter in "{[":
            self._open.append(letter)
        elif letter in "}]":
            self._open.pop()
        if not letter.isspace():
            self._expects_key = letter in "{," and self._open[-1:] == ["{"]
        self.complete = not self._open
