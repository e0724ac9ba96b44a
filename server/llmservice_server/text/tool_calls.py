"""Tool calls: the grammar of a model's calls in each format, and incremental parsers that find them in its answers."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmservice_server.sampling.grammar import LarkRules, escaped, with_white_space
from llmservice_server.text.detokenizer import StopStrings


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that may be called, with the JSON schema of its arguments, an object."""

    name: str
    arguments: dict[str, Any]


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


def _short_id() -> str:
    """Mistral's chat templates refuse any other length."""
    return uuid.uuid4().hex[:9]


def merge(pieces: Sequence[Call]) -> list[Call]:
    """Join the pieces of calls."""
    calls: list[Call] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(Call(piece.index, piece.id, piece.name))
        calls[-1].arguments += piece.arguments
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(ABC):
    """How a model writes calls: `trigger`, `start`, calls with a `separator` between them, `end`."""

    name: str
    trigger: str  # begins the calls and cannot be text; empty: a brace at the beginning of the answer
    start: str = ""
    separator: str = ""
    end: str = ""
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
        more = f" ({rules.literal(self.separator)} call)*" if parallel else ""
        start, end = (rules.literal(part) if part else "" for part in (self.start, self.end))
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
                text, _ = rules.text_until(self.prefix, pattern=r"(\s*[^{\s](.|\n)*)?", unless=unless)
                return f"{text} | {calls}"
        called = f"{rules.literal(self.trigger)} {calls}" if self.trigger else calls
        if otherwise != "":
            return called if otherwise is None else f"{otherwise} | {called}"
        text, until_trigger = rules.text_until(self.trigger, unless=unless)
        return f"{text} | {until_trigger} {calls}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat(ToolFormat):
    """A call is `head` with the function's name, a JSON object of arguments, `tail`."""

    head: str  # %s: the name
    tail: str = "}"

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        tail = f" {rules.literal(self.tail)}" if self.tail else ""
        return f"{rules.literal(self.head % tool.name)} %json {json.dumps(with_white_space(tool.arguments))}{tail}"

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return JsonCallParser(self)


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


HERMES = JsonFormat(
    name="hermes",
    trigger="<tool_call>",
    start="\n",
    head='{"name": "%s", "arguments": ',
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    trigger="<tool_call>",
    start="\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
MISTRAL = JsonFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    start="[",
    head='{"name": "%s", "arguments": ',
    separator=", ",
    end="]",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call_id=_short_id,
)
MISTRAL_ARGS = JsonFormat(
    name="mistral",
    trigger="[TOOL_CALLS]",
    head="%s[ARGS]",
    tail="",
    separator="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call_id=_short_id,
)
LLAMA3_JSON = JsonFormat(
    name="llama3_json",
    trigger="",
    prefix="<|python_tag|>",
    head='{"name": "%s", "parameters": ',
    separator="; ",
    markers=("<|python_tag|>",),
)


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
        marks = "|".join(map(re.escape, (*layout.markers, "</function>")))
        self._syntax = re.compile(rf"(?:[\s\[\]{{}},;]|{marks})*")
        self._call_end = re.compile(rf"[\s}},;\]]*(?:{re.escape(layout.end.strip() or '}')})?\s*")
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
        if self._in_arguments:
            self._flush_arguments(rest, parsed)
            return parsed
        if self.num_calls and (ended := self._call_end.match(rest)):
            rest = rest[ended.end() :]
        parsed.content = "" if self.num_calls and self._is_cut_off(rest) else rest
        return parsed

    def _is_cut_off(self, rest: str) -> bool:
        """Whether `rest` is the beginning of one more call, or of the syntax between calls."""
        trigger, end = self._layout.trigger, self._layout.end.strip()
        begins = rest.startswith((trigger, "{") if trigger else "{") and (not end or end not in rest)
        return begins or trigger.startswith(rest) or end.startswith(rest)

    def _take_content(self, parsed: Parsed) -> None:
        """Move the content at the beginning of the pending text to `parsed`; the rest belongs to calls."""
        if self._layout.trigger:
            parsed.content = self._trigger.append(self._pending)
            self._in_calls = self._trigger.matched is not None
            self._pending = self._layout.trigger + self._trigger.rest if self._in_calls else ""
            return
        prefix = self._layout.prefix
        if not self._is_text and prefix.startswith(self._pending):
            return
        self._in_calls = not self._is_text and self._pending.startswith(("{", prefix))
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
    def _in_arguments(self) -> bool: ...

    @abstractmethod
    def _step(self, parsed: Parsed) -> bool:
        """Parse one more piece of the pending text; False where it is incomplete."""

    @abstractmethod
    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        """Parse the last text of an answer that ends within a call's arguments."""


class JsonCallParser(ToolCallParser):
    """Passes arguments on as they arrive."""

    _HEAD = re.compile(
        r"""(?: \{\s* "name"\s*:\s* "(?P<quoted>[\w.-]+)"\s*,\s* "(?:arguments|parameters)"\s*:
            | (?P<bare>[\w.-]+) (?:\[CALL_ID\]\w+)? \[ARGS\] ) \s* (?=\{)""",
        re.VERBOSE,
    )

    def __init__(self, layout: ToolFormat) -> None:
        super().__init__(layout)
        self._arguments: JsonObject | None = None  # the open call's

    @property
    def _in_arguments(self) -> bool:
        return self._arguments is not None

    def _step(self, parsed: Parsed) -> bool:
        if self._arguments is None:
            head = self._HEAD.search(self._pending)
            if head is None:
                return False
            self._begin_call(parsed, head["quoted"] or head["bare"], head)
            self._arguments = JsonObject()
            return True
        length = self._arguments.scan(self._pending)
        piece, self._pending = self._pending[:length], self._pending[length:]
        self._add_arguments(parsed, piece)
        if not self._arguments.complete:
            return False
        self._arguments = None
        return True

    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        """All that there is has been passed on."""


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


class JsonObject:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """The number of characters of `text` that belong to the object."""
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return place + 1
        return len(text)
