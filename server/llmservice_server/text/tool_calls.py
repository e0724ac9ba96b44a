"""Tool calls: the grammar of a model's calls in each format, and incremental parsers that find them in its answers."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from llmservice_server.sampling.grammar import WHITE_SPACE, LarkRules, escaped, json_rule
from llmservice_server.text.detokenizer import StopStrings
from llmservice_server.types.errors import GrammarError

_PLAIN_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_PLAIN_KEYWORDS |= {"$schema", "$id", "$comment", "title", "description"}
"""Of an object's schema whose members can be written one by one."""
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE_ELSEWHERE = re.compile(r'"\$ref": "#(?="|/)(?!/(?:\$defs|definitions)/)')
_MAX_REFERENCES = 8  # that follow each other: some refer in circles
_MAX_MEMBERS_BYTES = 2**20  # of the schemas of one function's members, each with the definitions that it refers to
_BARE_TEXT = r"(\s*[^{\s](.|\n)*|\{(.|\n)*)?"
_BARE_CALL = r"\{\s*\"name\"(.|\n)*"
"""In a format without a trigger: text, JSON too where no space precedes it, and what is taken for a call."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that may be called, with the JSON schema of its arguments, an object."""

    name: str
    arguments: dict[str, Any]
    strict: bool = False
    """Whether arguments conform to the whole schema, in its order, or the request is refused."""

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        return properties(self.arguments)


def properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schema of each member of an object, with the definitions where it refers to them. Raises GrammarError."""
    shared = definitions(schema)
    members = {} if schema.get("properties") is None else schema["properties"]
    if not isinstance(members, dict):
        raise GrammarError("properties: expected an object with a schema for each name")
    found, num_bytes, num_shared = {}, 0, len(json.dumps(shared)) if shared else 0
    for key, each in members.items():
        whole = resolved(each | shared) if isinstance(each, dict) else {}
        found[key] = {name: value for name, value in whole.items() if name not in shared}
        if shared:
            written = json.dumps(found[key])
            num_bytes += len(written)
            if '"$' in written:
                found[key] = whole
                num_bytes += num_shared
        if num_bytes > _MAX_MEMBERS_BYTES:
            raise GrammarError(
                f"properties: each with the definitions that it refers to, they take more than {_MAX_MEMBERS_BYTES}"
                " bytes: give the function fewer properties, or definitions that are smaller"
            )
    return found


def other_members(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of an object's members that `properties` does not name; None: it has none."""
    others = schema.get("additionalProperties", "properties" not in schema)
    if isinstance(others, dict):
        return resolved(others | definitions(schema))
    return definitions(schema) if others else None


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in _DEFINITIONS if name in schema}


def without_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in _DEFINITIONS}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that one stands for which is no more than a reference to a definition, or all of one schema."""
    for _ in range(_MAX_REFERENCES):
        shared, said = definitions(schema), schema.keys() - _ANNOTATIONS - {*_DEFINITIONS}
        found: Any = None
        if said == {"$ref"}:
            found = referred(str(schema["$ref"]), shared)
        elif said == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            [found] = schema["allOf"]
        if not isinstance(found, dict):
            break
        schema = found | shared
    return schema


def referred(reference: str, shared: Mapping[str, Any]) -> Any:
    """What a JSON pointer into the definitions leads to; None: nothing."""
    found: Any = shared
    try:
        for part in reference.removeprefix("#/").split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return found


def arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, such that it refers to nothing but definitions.

    So its members can be written one by one. zod-to-json-schema refers to members where it first wrote what they have
    in common; it and pydantic refer to a definition of the whole schema, where that has a name or refers to itself.
    """
    schema = {"type": "object"} | schema
    moved, num_moved = _REFERENCE_ELSEWHERE.subn('"$ref": "#/$defs/(whole)', json.dumps(schema))
    if num_moved:
        schema = json.loads(moved)
        whole = without_definitions(schema)
        given = schema.get("$defs")
        schema["$defs"] = {**(given if isinstance(given, dict) else {}), "(whole)": whole}
    if schema["type"] != "object":
        return schema
    return {"type": "object"} | resolved({key: each for key, each in schema.items() if key != "type"})


def required_members(schema: Mapping[str, Any]) -> list[str]:
    """Raises GrammarError."""
    names = [] if schema.get("required") is None else schema["required"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise GrammarError("required: expected a list of names")
    return names


def members_rule(
    rules: LarkRules, schema: Mapping[str, Any], written: Mapping[str, str], separator: str = "", more: str = ""
) -> str:
    """The grammar of an object's members, of which each has one in `written`; `more`: that of any number of others.

    Those that are required follow each other in the schema's order. The others may stand anywhere: a model that has to
    keep to an order leaves out what it has passed. How many follow each other is bounded, so that an answer ends.
    """
    names = required_members(schema)
    required = [text for key, text in written.items() if key in names]
    others = [*(text for key, text in written.items() if key not in names), *filter(None, [more])]
    if not others:
        return f" {separator} ".join(required)
    other, most = rules.new_name(), len(others)
    rules.add(f"{other}: {' | '.join(others)}")
    times = "*" if more else f"{{0,{most}}}"
    behind = f"({separator} {other}){times}"
    if not required:
        return f"({other} {behind})?"
    before = f"({other} {separator}){times}"
    return f"{before} {f' {separator} '.join(f'{each} {behind}' for each in required)}"


def other_name(rules: LarkRules, pattern: str, names: Collection[str]) -> str:
    """The grammar of a member's name that matches `pattern` and is none of `names`."""
    name = rules.new_name().upper()
    rules.add(f"{name}: /{pattern}/" + (f" & ~/({'|'.join(map(escaped, names))})/" if names else ""))
    return name


def json_arguments(rules: LarkRules, tool: ToolSchema) -> str:
    """The grammar of a JSON object of a function's arguments."""
    schema, members = tool.arguments, tool.properties
    is_plain = schema.keys() <= _PLAIN_KEYWORDS and not schema.get("additionalProperties")
    if tool.strict or not is_plain or not members or not members.keys() >= {*required_members(schema)}:
        return json_rule(schema, strict=tool.strict)
    colon = f'{WHITE_SPACE} ":" {WHITE_SPACE}'
    written = {
        key: f"{json.dumps(json.dumps(key, ensure_ascii=False))} {colon} {json_rule(each, strict=False)}"
        for key, each in members.items()
    }
    body = members_rule(rules, schema, written, f'{WHITE_SPACE} "," {WHITE_SPACE}')
    return f'"{{" {WHITE_SPACE} {body} {WHITE_SPACE} "}}"'


@dataclass(slots=True)
class Call:
    """A call, or a piece of it: then only the first one has `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What some text of an answer holds."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)  # pieces, in order
    reasoning: str = ""

    def extend(self, other: Parsed) -> None:
        self.content += other.content
        self.calls += other.calls
        self.reasoning += other.reasoning


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge(pieces: Sequence[Call]) -> list[Call]:
    """Join the pieces of each call: OpenAI's client before 3.20 takes two in one delta for two calls."""
    calls: list[Call] = []
    for piece in pieces:
        if calls and calls[-1].index == piece.index:
            calls[-1].arguments += piece.arguments
        else:
            calls.append(replace(piece))
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(ABC):
    """How a model writes calls: `trigger`, `start`, calls with a `separator` between them, `end`."""

    name: str
    trigger: str  # begins the calls and cannot be text; empty: a brace at the beginning of the answer
    start: str = ""
    separator: str = ""
    end: str = ""
    tail: str = ""  # of each call
    prefix: str = ""  # may stand before an answer's brace
    markers: tuple[str, ...]  # may be single tokens of a vocabulary, special ones too
    call_id: Callable[[], str] = call_id

    @abstractmethod
    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        """The grammar of one call."""

    @abstractmethod
    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser: ...

    def calls(self, rules: LarkRules, tools: Sequence[ToolSchema], *, parallel: bool) -> str:
        """The grammar of calls without the trigger: one, or several where `parallel`."""
        rules.add(f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}")
        for index, tool in enumerate(tools):
            rules.add(f"tool_{index}: {self.call(rules, tool)}")
        start, between, end = (rules.literal(part) if part else "" for part in (self.start, self.separator, self.end))
        more = f" ({between} call)*" if parallel else ""
        return f"{start} call{more} {end}".strip()

    def answer(
        self,
        rules: LarkRules,
        tools: Sequence[ToolSchema],
        otherwise: str | None,
        *,
        parallel: bool,
        unless: str = "",
    ) -> str:
        """The grammar of answers that call `tools`, or are `otherwise`.

        That is a rule, None: they must call, "": text, with or without calls after it, which does not match `unless`.
        """
        calls = self.calls(rules, tools, parallel=parallel)
        if not self.trigger:
            calls = f"({rules.literal(self.prefix)})? {calls}"
            if otherwise == "":
                unless = f"({unless})|({_BARE_CALL})" if unless else _BARE_CALL
                text, _ = rules.text_until(self.prefix, pattern=_BARE_TEXT, unless=unless)
                return f"{text} | {calls}"
        called = f"{rules.literal(self.trigger)} {calls}" if self.trigger else calls
        if otherwise != "":
            return called if otherwise is None else f"{otherwise} | {called}"
        text, until_trigger = rules.text_until(self.trigger, unless=unless)
        return f"{text} | {until_trigger} {calls}"


class ToolCallParser(ABC):
    """Parses one answer, which conforms to the grammar of its format but may be cut off by a limit.

    ```
    text ... <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>\\n<tool_call>...
    |- content -|-------- head --------------------|-args-|-- syntax up to the next head
    ```

    Where an answer does not conform, what is neither a call nor syntax is content.
    """

    def __init__(self, layout: ToolFormat) -> None:
        self._layout = layout
        self._trigger = StopStrings([layout.trigger] if layout.trigger else [])
        self._in_calls = False
        self._is_text = False  # for good
        self._pending = ""  # text that is not parsed yet
        self._tail, self._end = layout.tail.strip(), layout.end.strip("\n]")
        tail, end = re.escape(self._tail), re.escape(self._end)
        marks = "|".join(map(re.escape, (*layout.markers, self._tail or "}", "</function>")))
        self._syntax = re.compile(rf"(?:[\s\[\]{{}},;]|{marks})*")
        self._call_end = re.compile(rf"[\s}},;\]]*(?:{tail})?\s*(?:{end})?\s*")
        self.num_calls = 0

    def append(self, text: str) -> Parsed:
        """The content and pieces of calls that `text` completes."""
        parsed = Parsed()
        self._pending += text
        if not self._in_calls:
            self._take_content(parsed)
        while self._in_calls and self._step(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        """What is held back, at the end of the answer. A first call without a complete name is content."""
        if not self._in_calls:
            return Parsed(self._trigger.flush() + self._pending)
        parsed = Parsed()
        rest, self._pending = self._pending, ""
        if self.in_call:
            self._flush_arguments(rest, parsed)
            return parsed
        if self.num_calls and (ended := self._call_end.match(rest)):
            rest = rest[ended.end() :]
        parsed.content = "" if self.num_calls and self._is_cut_off(rest) else rest
        return parsed

    def _is_cut_off(self, rest: str) -> bool:
        """Whether `rest` is the beginning of one more call, or of the syntax between calls."""
        trigger, start = self._layout.trigger, self._layout.start
        beginnings = (trigger, start if start in self._layout.markers else "", "{")
        begins = rest.startswith(tuple(filter(None, beginnings))) and not (self._end and self._end in rest)
        return begins or any(part.startswith(rest) for part in (*beginnings, self._tail, self._end))

    def _take_content(self, parsed: Parsed) -> None:
        """Move the content at the beginning of the pending text to `parsed`; the rest belongs to calls."""
        if self._layout.trigger:
            parsed.content = self._trigger.append(self._pending)
            self._in_calls = self._trigger.matched is not None
            self._pending = self._layout.trigger + self._trigger.rest if self._in_calls else ""
            return
        starts, begun = ('{"name"', self._layout.prefix), "".join(self._pending.split())
        if not self._is_text and any(start.startswith(begun) for start in starts):
            return
        self._in_calls = not self._is_text and begun.startswith(starts)
        self._is_text = not self._in_calls
        if self._is_text:
            parsed.content, self._pending = self._pending, ""

    def _begin_call(self, parsed: Parsed, name: str, head: re.Match[str]) -> None:
        skipped = self._pending[: head.start()]
        if not self._syntax.fullmatch(skipped):
            parsed.content += skipped
        self._pending = self._pending[head.end() :]
        parsed.calls.append(Call(self.num_calls, self._layout.call_id(), name))
        self.num_calls += 1

    def _add_arguments(self, parsed: Parsed, arguments: str) -> None:
        if arguments:
            parsed.calls.append(Call(self.num_calls - 1, arguments=arguments))

    @property
    @abstractmethod
    def in_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""

    @abstractmethod
    def _step(self, parsed: Parsed) -> bool:
        """Parse one more piece of the pending text; False where it is incomplete."""

    @abstractmethod
    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        """Parse the last text of an answer that ends within a call's arguments."""
