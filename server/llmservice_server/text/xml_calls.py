"""Tool calls in tags: a function and its arguments, the strings among them as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmservice_server.sampling.grammar import LarkRules, escaped, json_rule
from llmservice_server.text.detokenizer import StopStrings
from llmservice_server.text.tool_calls import (
    Parsed,
    ToolCallParser,
    ToolFormat,
    ToolSchema,
    definitions,
    members_rule,
    other_members,
    other_name,
    resolved,
    without_definitions,
)
from llmservice_server.types.errors import GrammarError

ANY_TEXT = "(.|\\n)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat(ToolFormat):
    """A call is `head` with the function's name, arguments, `tail`; an argument `key` with its name, a value, `close`.

    Strings are written as they are, other values as JSON.
    """

    head: str  # %s: the name
    key: str  # likewise
    close: str  # of a value
    between: str  # what follows it
    tail: str
    found_head: re.Pattern[str]  # these and the next find them also where a model writes them a little differently
    found_key: re.Pattern[str]
    found_tail: re.Pattern[str]
    wraps: bool  # in newlines, which are no part of a value

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        between, written = rules.literal(self.between), {}
        for key, schema in tool.properties.items():
            found = self.found_key.match(self.key % key)
            if found is None or found[1] != key:
                raise GrammarError(f"{tool.name}: calls of this model cannot name {key!r}: rename it")
            value = self._value(rules, schema, strict=tool.strict)
            written[key] = f"{rules.literal(self.key % key)} {value} {between}"
        more = ""
        if (others := other_members(tool.arguments)) is not None:
            before, after = map(rules.literal, self.key.split("%s"))
            name = other_name(rules, '[^<>"\\n]{1,64}', written)
            more = f"{before} {name} {after} {self._value(rules, others, strict=tool.strict)} {between}"
        body = members_rule(rules, tool.arguments, written, more=more)
        return f"{rules.literal(self.head % tool.name)} {body} {rules.literal(self.tail)}".strip()

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return XmlCallParser(self, tools)

    def _value(self, rules: LarkRules, schema: Mapping[str, Any], *, strict: bool) -> str:
        """The grammar of an argument, with the tag that ends it."""
        plain, strings, others = [], [], []
        for each in alternatives(schema):
            types = json_types(each)
            if (choices := choices_of(each)) is not None:
                plain += [json.dumps(choice if isinstance(choice, str) else json.dumps(choice)) for choice in choices]
            elif "string" not in types:
                others.append(each)
            elif (pattern := string_pattern(each)) == ANY_TEXT:
                return self._string(rules)
            else:
                strings.append(self._string(rules, pattern))
                others += [{**each, "type": sorted(types - {"string"})}] if types != {"string"} else []
        if others:
            options = [without_definitions(each) for each in others]
            either = {"anyOf": options, **definitions(schema)} if plain or strings else schema
            plain.append(json_rule(either, strict=strict))
        written = [f"({' | '.join(plain)}) {rules.literal(self.close)}"] if plain else []
        return f"({' | '.join(written + strings)})"

    def _string(self, rules: LarkRules, pattern: str = ANY_TEXT) -> str:
        unless = f"(.|\\n)*{escaped(self.close.strip())}(.|\\n)*"
        return rules.text_until(self.close, pattern=pattern, unless=unless)[1]


def string_pattern(schema: Mapping[str, Any]) -> str:
    """Of strings of the lengths that a schema allows. Raises GrammarError."""
    least, most = _length(schema, "minLength") or 0, _length(schema, "maxLength")
    if not least and most is None:
        return ANY_TEXT
    return f"(.|\\n){{{least},{'' if most is None else most}}}"


def _length(schema: Mapping[str, Any], keyword: str) -> int | None:
    length = schema.get(keyword)
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int | float) or length < 0 or length % 1:
        raise GrammarError(f"{keyword}: expected a whole number that is not negative")
    return int(length)


def choices_of(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else None


def options_of(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """The schemas of which a value needs to match one."""
    options = schema.get("anyOf", schema.get("oneOf"))
    return [option for option in options if isinstance(option, dict)] if isinstance(options, list) else None


def alternatives(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The schemas of which a value needs to match one: the options of a choice between several, else this one."""
    options = None if "type" in schema else options_of(schema)
    if options is None:
        return [schema]
    return [resolved({**option, **definitions(schema)}) for option in options]


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALL_TYPES = frozenset({*_JSON_TYPES.values(), "null"})


def json_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows: those of what is not found are no strings, names of no type stand for all."""
    return frozenset().union(*map(_types, alternatives(schema)))


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types = frozenset(name for name in _ALL_TYPES if name in names) or _ALL_TYPES
        return types | {"integer"} if "number" in types else types
    if (choices := choices_of(schema)) is not None:
        return frozenset(_JSON_TYPES.get(type(choice), "null") for choice in choices)
    if (options := options_of(schema)) is not None:
        return frozenset().union(*map(_types, options))
    return _ALL_TYPES - {"string"} if {"$ref", "allOf", "properties", "items"} & schema.keys() else _ALL_TYPES


def read_value(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON of an argument that is written as `text`."""
    types, value = json_types(schema), text
    if not any(text in (choices_of(each) or ()) for each in alternatives(schema)) and types != {"string"}:
        try:
            read = json.loads(text)
        except ValueError:
            read = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        kind = "" if isinstance(read, str) else _JSON_TYPES.get(type(read), "null")
        if kind in types or "string" not in types:
            value = read
    return json.dumps(value, ensure_ascii=False)


QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    trigger="<tool_call>",
    start="\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    head="<function=%s>\n",
    key="<parameter=%s>\n",
    close="\n</parameter>",
    between="\n",
    tail="</function>",
    found_head=re.compile(r"<function=([^>\s]+)>"),
    found_key=re.compile(r"\s*<parameter=([^>\n]+)>(?:\n|(?=[^\n]))"),
    found_tail=re.compile(r"\s*</function>"),
    wraps=True,
)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    trigger="<seed:tool_call>",
    separator="\n</seed:tool_call>\n<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    key="<parameter=%s>",
    close="</parameter>",
    found_key=re.compile(r"\s*<parameter=([^>\n]+)>"),
    wraps=False,
)
MINIMAX_M2 = replace(
    SEED_OSS,
    name="minimax_m2",
    trigger="<minimax:tool_call>",
    separator="",
    end="</minimax:tool_call>",
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    head='<invoke name="%s">\n',
    key='<parameter name="%s">',
    tail="</invoke>\n",
    found_head=re.compile(r'<invoke name="([^"]+)">'),
    found_key=re.compile(r'\s*<parameter name="([^"]+)">'),
    found_tail=re.compile(r"\s*</invoke>"),
)
GLM = XmlFormat(
    name="glm",
    trigger="<tool_call>",
    separator="</tool_call>\n<tool_call>",
    end="</tool_call>",
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    head="%s\n",
    key="<arg_key>%s</arg_key>\n<arg_value>",
    close="</arg_value>",
    between="\n",
    tail="",
    found_head=re.compile(r"<tool_call>\s*([^<>\s]+)\s*(?=<)"),
    found_key=re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>"),
    found_tail=re.compile(r"\s*</tool_call>"),
    wraps=False,
)
"""GLM-4.5's and 4.6's."""
GLM_COMPACT = replace(
    GLM, separator="</tool_call><tool_call>", head="%s", key="<arg_key>%s</arg_key><arg_value>", between=""
)
"""GLM-4.7's and later ones'."""


class XmlCallParser(ToolCallParser):
    """Passes strings on as they arrive, other arguments once they are complete."""

    def __init__(self, layout: XmlFormat, tools: Sequence[ToolSchema]) -> None:
        super().__init__(layout)
        self._format = layout
        self._schemas = {tool.name: (tool.properties, other_members(tool.arguments) or {}) for tool in tools}
        self._called: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None  # the open call's
        self._num_arguments = 0
        self._string: StopStrings | None = None  # finds the end of the open argument

    @property
    def in_call(self) -> bool:
        return self._called is not None

    def _step(self, parsed: Parsed) -> bool:
        if self._called is None:
            head = self._format.found_head.search(self._pending)
            if head is None:
                return False
            self._begin_call(parsed, head[1], head)
            self._called, self._num_arguments = self._schemas.get(head[1], ({}, {})), 0
            return True
        if self._string is not None:
            return self._take_string(self._string, parsed)
        return self._take_argument(*self._called, parsed)

    def _take_argument(self, schemas: Mapping[str, Any], others: Mapping[str, Any], parsed: Parsed) -> bool:
        """One argument, the beginning of a string, or the end of the call."""
        close, key = self._format.close, self._format.found_key.match(self._pending)
        schema = others if key is None else schemas.get(key[1], others)
        if key is not None and json_types(schema) == {"string"}:
            self._add_argument(parsed, key[1], '"')
            self._string = StopStrings([close, close.strip()])
            self._pending = self._pending[key.end() :]
            return True
        if key is not None and (end := self._end_of_value(key.end(), schema)) >= 0:
            text = self._pending[key.end() : end]
            text = text.removesuffix("\n") if self._format.wraps else text
            self._add_argument(parsed, key[1], read_value(text, schema))
            self._pending = self._pending[end + len(close.strip()) :]
            return True
        if ended := self._format.found_tail.match(self._pending):
            self._add_arguments(parsed, "}" if self._num_arguments else "{}")
            self._pending, self._called = self._pending[ended.end() :], None
            return True
        return False

    def _end_of_value(self, begin: int, schema: Mapping[str, Any]) -> int:
        """-1: it is not there yet. Strings within JSON may hold the tag that ends a value."""
        close = self._format.close.strip()
        end = self._pending.find(close, begin)
        while end >= 0 and "string" not in json_types(schema) and _ends_in_string(self._pending[begin:end]):
            end = self._pending.find(close, end + 1)
        return end

    def _add_argument(self, parsed: Parsed, key: str, value: str) -> None:
        self._add_arguments(parsed, f"{', ' if self._num_arguments else '{'}{json.dumps(key)}: {value}")
        self._num_arguments += 1

    def _take_string(self, string: StopStrings, parsed: Parsed) -> bool:
        self._add_arguments(parsed, escaped_json(string.append(self._pending)))
        self._pending = string.rest
        if string.matched is None:
            return False
        self._add_arguments(parsed, '"')
        self._string = None
        return True

    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        if self._string is not None:
            self._add_arguments(parsed, escaped_json(self._string.flush()))
        elif key := self._format.found_key.match(rest):
            self._add_argument(parsed, key[1], escaped_json(rest[key.end() :]))
        elif not self._num_arguments:
            self._add_arguments(parsed, "{")


def _ends_in_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    return False


def escaped_json(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
