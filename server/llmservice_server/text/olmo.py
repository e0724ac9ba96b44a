"""OLMo 3's tool calls: `name(key=value, …)`, one in a line, with values in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmservice_server.sampling.grammar import LarkRules, json_rule
from llmservice_server.text.json_calls import JsonCallParser
from llmservice_server.text.tool_calls import (
    Parsed,
    ToolCallParser,
    ToolFormat,
    ToolSchema,
    members_rule,
    other_members,
    other_name,
)
from llmservice_server.types.errors import GrammarError

_HEAD = re.compile(r"\A\s*(?:(?:</function_calls>\s*)?<function_calls>\s*)?([\w.-]+)\(")
_KEY = re.compile(r"[\s,]*(?:\)|([^=]+?)\s*=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoFormat(ToolFormat):
    """A call is the function's name and keyword arguments."""

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        for key in tool.properties:
            found = _KEY.match(f"{key}=")
            if found is None or found[1] != key:
                raise GrammarError(f"{tool.name}: calls of OLMo 3 cannot name {key!r}: rename it")
        written = {
            key: f"{rules.literal(f'{key}=')} {json_rule(schema, strict=tool.strict)}"
            for key, schema in tool.properties.items()
        }
        more = ""
        if (others := other_members(tool.arguments)) is not None:
            name = other_name(rules, "[A-Za-z_][A-Za-z0-9_]{0,63}", written)
            more = f'{name} "=" {json_rule(others, strict=tool.strict)}'
        body = members_rule(rules, tool.arguments, written, '", "', more)
        return f'{rules.literal(f"{tool.name}(")} {body} ")"'

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return _OlmoParser(self, _HEAD, _Arguments)


OLMO3 = OlmoFormat(
    name="olmo3",
    trigger="<function_calls>",
    separator="\n",
    end="</function_calls>",
    markers=("<function_calls>", "</function_calls>"),
)


class _OlmoParser(JsonCallParser):
    def flush(self) -> Parsed:
        if self.num_calls and not self.in_call and self._end not in self._pending:
            return Parsed()  # a further call begins without a mark
        return super().flush()


class _Arguments:
    """Implements `Arguments`: makes a JSON object of them, up to the parenthesis that ends them."""

    def __init__(self) -> None:
        self._between = "{"  # before the next key
        self._expects_key = True
        self._depth = 0  # within a value
        self._in_string = False
        self._escaped = False
        self.complete = False
        self.rest = ""

    def append(self, text: str) -> str:
        written, place = "", 0
        while place < len(text) and not self.complete:
            if not self._expects_key:
                written += self._take(text[place])
                place += 1
            elif (key := _KEY.match(text, place)) is None:
                break
            else:
                written += self._begin(key[1])
                place = key.end()
        self.rest = text[place:]
        return written

    def flush(self) -> str:
        return ""

    def _begin(self, key: str | None) -> str:
        """None: there is no further one."""
        self._expects_key, self.complete = False, key is None
        between, self._between = self._between, ", "
        if key is None:
            return "{}" if between == "{" else "}"
        return f"{between}{json.dumps(key)}: "

    def _take(self, letter: str) -> str:
        """One of a value, or what follows it."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = letter == "\\", letter != '"'
        elif self._depth == 0 and letter in ",)":
            self._expects_key, self.complete = letter == ",", letter == ")"
            return "}" if self.complete else ""
        elif self._depth == 0 and letter.isspace():
            return ""
        else:
            self._in_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
        return letter
