"""Qwen3-Coder's tool calls: a function and its parameters in tags, the strings among them as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmservice_server.sampling.grammar import LarkRules, escaped, with_white_space
from llmservice_server.text.detokenizer import StopStrings
from llmservice_server.text.tool_calls import Parsed, ToolCallParser, ToolFormat, ToolSchema

_VALUE_END = "\n</parameter>"


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlFormat(ToolFormat):
    """A call is `<function=name>`, the arguments as `<parameter=key>` and a value, `</function>`.

    Strings are written as they are, other values as JSON.
    """

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        body, newline = [rules.literal(f"<function={tool.name}>\n")], json.dumps("\n")
        for key, schema in properties(tool.arguments).items():
            parameter = f"{json.dumps(f'<parameter={key}>')} {newline} {_value(rules, schema)} {newline}"
            body.append(parameter if key in tool.arguments.get("required", ()) else f"({parameter})?")
        if "properties" not in tool.arguments and tool.arguments.get("additionalProperties", True) is not False:
            body.append(f'("<parameter=" /[^>\\n]{{1,64}}/ ">\\n" {_string(rules)} "\\n")*')
        return " ".join([*body, rules.literal("</function>")])

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return XmlCallParser(self, tools)


def properties(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schema of each argument, with the definitions that it may refer to."""
    shared = {name: arguments[name] for name in ("$defs", "definitions") if name in arguments}
    schemas = arguments.get("properties", {})
    return {key: schema | shared if isinstance(schema, dict) else shared for key, schema in schemas.items()}


def _value(rules: LarkRules, schema: Mapping[str, Any]) -> str:
    """The grammar of an argument, with the tag that ends it."""
    choices = _choices(schema)
    if choices is not None:
        written = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        return f"({' | '.join(map(json.dumps, written))}) {json.dumps(_VALUE_END)}"
    if "string" not in json_types(schema):
        return f"%json {json.dumps(with_white_space(dict(schema)))} {json.dumps(_VALUE_END)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return _string(rules, f"(.|\\n){{{least},{most}}}" if least or most else "(.|\\n)*")


def _string(rules: LarkRules, pattern: str = "(.|\\n)*") -> str:
    return rules.text_until(_VALUE_END, pattern=pattern, unless=f"(.|\\n)*{escaped(_VALUE_END.strip())}(.|\\n)*")[1]


def _choices(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALL_TYPES = frozenset({*_JSON_TYPES.values(), "null"})


def json_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows; those behind a reference are taken to be no strings."""
    if "type" in schema:
        types = frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
        return types | {"integer"} if "number" in types else types
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return frozenset().union(*(json_types(option) for option in schema[word] if isinstance(option, dict)))
    return _ALL_TYPES - {"string"} if {"$ref", "allOf", "properties", "items"} & schema.keys() else _ALL_TYPES


def read_value(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON of an argument that is written as `text`."""
    types, value = json_types(schema), text
    if text not in (_choices(schema) or ()) and types != {"string"}:
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
)


class XmlCallParser(ToolCallParser):
    """Passes strings on as they arrive, other arguments once they are complete."""

    _HEAD = re.compile(r"<function=([^>\s]+)>")
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    _OPENING = re.compile(r"\s*<parameter=([^>\n]+)>(?:\n|(?=[^\n]))")
    _END = re.compile(r"\s*</function>")

    def __init__(self, layout: ToolFormat, tools: Sequence[ToolSchema]) -> None:
        super().__init__(layout)
        self._schemas = {tool.name: properties(tool.arguments) for tool in tools}
        self._called: Mapping[str, Mapping[str, Any]] | None = None  # the open call's
        self._num_arguments = 0
        self._string: StopStrings | None = None  # finds the end of the open argument

    @property
    def _in_arguments(self) -> bool:
        return self._called is not None

    def _step(self, parsed: Parsed) -> bool:
        if self._called is None:
            head = self._HEAD.search(self._pending)
            if head is None:
                return False
            self._begin_call(parsed, head[1], head)
            self._called, self._num_arguments = self._schemas.get(head[1], {}), 0
            return True
        if self._string is not None:
            return self._take_string(self._string, parsed)
        return self._take_argument(self._called, parsed)

    def _take_argument(self, schemas: Mapping[str, Any], parsed: Parsed) -> bool:
        """One argument, the beginning of a string, or the end of the call."""
        opening = self._OPENING.match(self._pending)
        if opening is not None and json_types(schemas.get(opening[1], {})) == {"string"}:
            self._add_argument(parsed, opening[1], '"')
            self._string = StopStrings([_VALUE_END, _VALUE_END.strip()])
            self._pending = self._pending[opening.end() :]
            return True
        if "</parameter>" in self._pending and (parameter := self._PARAMETER.match(self._pending)):
            self._add_argument(parsed, parameter[1], read_value(parameter[2], schemas.get(parameter[1], {})))
            self._pending = self._pending[parameter.end() :]
            return True
        if ended := self._END.match(self._pending):
            self._add_arguments(parsed, "}" if self._num_arguments else "{}")
            self._pending, self._called = self._pending[ended.end() :], None
            return True
        return False

    def _add_argument(self, parsed: Parsed, key: str, value: str) -> None:
        self._add_arguments(parsed, f"{', ' if self._num_arguments else '{'}{json.dumps(key)}: {value}")
        self._num_arguments += 1

    def _take_string(self, string: StopStrings, parsed: Parsed) -> bool:
        self._add_arguments(parsed, _escaped_json(string.append(self._pending)))
        self._pending = string.rest
        if string.matched is None:
            return False
        self._add_arguments(parsed, '"')
        self._string = None
        return True

    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        if self._string is not None:
            self._add_arguments(parsed, _escaped_json(self._string.flush()))
        elif opening := self._OPENING.match(rest):
            self._add_argument(parsed, opening[1], _escaped_json(rest[opening.end() :]))
        elif not self._num_arguments:
            self._add_arguments(parsed, "{")


def _escaped_json(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
