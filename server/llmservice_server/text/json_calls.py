"""Calls written as JSON, with the syntax of each model around the function's name and its arguments."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmservice_server.sampling.grammar import LarkRules
from llmservice_server.text.tool_calls import (
    Parsed,
    ToolCallParser,
    ToolFormat,
    ToolSchema,
    call_id,
    json_arguments,
)

_HEAD = re.compile(
    r"""(?: \{\s* (?:"name" | "tool_call_id"\s*:\s*"\w*"\s*,\s* "tool_name")\s*:\s* "([\w.-]+)"\s*,
            \s* "(?:arguments|parameters)"\s*:
        | ([\w.-]+) (?:\[CALL_ID\]\w+)? \[ARGS\]
        | (?:function<｜tool▁sep｜>)? ([\w.-]+) (?:<｜tool▁sep｜>|\s*```json) ) \s* (?=\{)""",
    re.VERBOSE,
)
_APERTUS_HEAD = re.compile(r'\{\s*"([\w.-]+)"\s*:\s*(?=\{)')


def _short_id() -> str:
    """Mistral's chat templates refuse any other length."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat(ToolFormat):
    """A call is `head` with the function's name, a JSON object of arguments, `tail`."""

    number: str = ""  # before the call's number, which then stands before `head`
    head: str  # %s: the name
    tail: str = "}"
    found_head: re.Pattern[str] = _HEAD  # finds those of the other formats too

    def call(self, rules: LarkRules, tool: ToolSchema) -> str:
        head, tail = rules.literal(self.head % tool.name), f" {rules.literal(self.tail)}" if self.tail else ""
        if self.number:
            head = f"{rules.literal(self.number)} /[0-9]{{1,4}}/ {head}"
        return f"{head} {json_arguments(rules, tool)}{tail}"

    def parser(self, tools: Sequence[ToolSchema]) -> ToolCallParser:
        return JsonCallParser(self, self.found_head, JsonObject)


HERMES = JsonFormat(
    name="hermes",
    trigger="<tool_call>",
    start="\n",
    head='{"name": "%s", "arguments": ',
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
NEMOTRON = replace(
    MISTRAL,
    name="nemotron",
    trigger="<TOOLCALL>",
    end="]</TOOLCALL>",
    markers=("<TOOLCALL>", "</TOOLCALL>"),
    call_id=call_id,
)
GRANITE = replace(NEMOTRON, name="granite", trigger="<|tool_call|>", end="]", markers=("<|tool_call|>",))
"""Granite 3's; later ones write calls as Hermes."""
HUNYUAN = replace(
    NEMOTRON,
    name="hunyuan",
    trigger="<tool_calls>",
    end="]</tool_calls>",
    markers=("<tool_calls>", "</tool_calls>"),
)
PHI4_MINI = replace(NEMOTRON, name="phi4_mini", trigger="functools[", start="", end="]", markers=("functools[",))
"""As the template says that others have for it: its own takes no tools."""
APERTUS = replace(
    NEMOTRON,
    name="apertus",
    trigger="<|tools_prefix|>",
    head='{"%s": ',
    end="]<|tools_suffix|>",
    markers=("<|tools_prefix|>", "<|tools_suffix|>"),
    found_head=_APERTUS_HEAD,
)
DEEPSEEK_V31 = JsonFormat(
    name="deepseek_v31",
    trigger="<｜tool▁calls▁begin｜>",
    start="<｜tool▁call▁begin｜>",
    head="%s<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    separator="<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    markers=tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    name="deepseek_v3",
    head="function<｜tool▁sep｜>%s\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    separator="\n<｜tool▁call▁begin｜>",
)
"""R1's, too."""
COHERE = JsonFormat(
    name="cohere",
    trigger="<|START_ACTION|>",
    start="[\n    ",
    number='{"tool_call_id": "',
    head='", "tool_name": "%s", "parameters": ',
    separator=",\n    ",
    end="\n]<|END_ACTION|>",
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
)
LLAMA3_JSON = JsonFormat(
    name="llama3_json",
    trigger="",
    prefix="<|python_tag|>",
    head='{"name": "%s", "parameters": ',
    separator="; ",
    markers=("<|python_tag|>",),
)
JSON_FORMATS = (
    HERMES,
    MISTRAL,
    NEMOTRON,
    GRANITE,
    HUNYUAN,
    PHI4_MINI,
    APERTUS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    COHERE,
    LLAMA3_JSON,
)


class JsonCallParser(ToolCallParser):
    """Passes arguments on as they arrive."""

    def __init__(self, layout: ToolFormat, head: re.Pattern[str], arguments_of: Callable[[], Arguments]) -> None:
        super().__init__(layout)
        self._head = head  # the one group that matches is the function's name
        self._arguments_of = arguments_of
        self._arguments: Arguments | None = None  # the open call's

    @property
    def in_call(self) -> bool:
        return self._arguments is not None

    def _step(self, parsed: Parsed) -> bool:
        if self._arguments is None:
            head = self._head.search(self._pending)
            if head is None:
                return False
            self._begin_call(parsed, next(filter(None, head.groups())), head)
            self._arguments = self._arguments_of()
            return True
        self._add_arguments(parsed, self._arguments.append(self._pending))
        self._pending = self._arguments.rest
        if not self._arguments.complete:
            return False
        self._arguments = None
        return True

    def _flush_arguments(self, rest: str, parsed: Parsed) -> None:
        assert self._arguments is not None  # noqa: S101  # they are open
        self._add_arguments(parsed, self._arguments.flush())


class Arguments(Protocol):
    """Reads the arguments of one call, which arrive in pieces."""

    complete: bool
    rest: str  # of the last piece: what follows the arguments, or is not certain yet

    def append(self, text: str) -> str:
        """The JSON that `text`, which begins with the last `rest`, adds to them."""

    def flush(self) -> str:
        """The JSON of `rest`, of an answer that ends within them."""


class JsonObject:
    """Implements `Arguments`: finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False
        self.rest = ""

    def append(self, text: str) -> str:
        """What of `text` belongs to the object."""
        end = self._scan(text)
        self.rest = text[end:]
        return text[:end]

    def flush(self) -> str:
        return ""

    def _scan(self, text: str) -> int:
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
