"""Tool calls: the grammar of a model's calls, and an incremental parser that finds them in its answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmservice_server.sampling.grammar import lark_grammar, with_white_space
from llmservice_server.text.detokenizer import StopStrings


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that may be called, with the JSON schema of its arguments, an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `opening`, a JSON object of name and arguments, `closing`.

    Where `opening` is empty, an answer that begins with a brace is a call.
    """

    opening: str
    closing: str
    separator: str  # between two calls
    arguments_key: str

    def head(self, name: str) -> str:
        """The part of a call before the arguments."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments_key}": '

    @property
    def tail(self) -> str:
        return "}" + self.closing

    @property
    def trigger(self) -> str:
        """The string that begins a call and cannot be text; empty: a brace at the beginning of the answer."""
        return self.opening.strip()

    @property
    def tags(self) -> tuple[str, ...]:
        """Parts of a call that may be single tokens of a vocabulary."""
        return tuple(tag for tag in (self.opening.strip(), self.closing.strip()) if tag)

    def grammar(
        self,
        tools: Sequence[ToolSchema],
        tag_ids: Mapping[str, int],
        *,
        required: bool,
        parallel: bool,
        otherwise: dict[str, Any] | None = None,
    ) -> str:
        """The grammar of answers that call `tools`, at most one unless `parallel`.

        `tag_ids`: the tags that are tokens of the model's vocabulary; a call contains them as these tokens only. Unless
        `required`, an answer may also be text, with or without calls after it, or, where `otherwise` is a schema, JSON
        of that schema.
        """
        more = f" ({_literal(self.separator, tag_ids)} call)*" if parallel else ""
        start, rules = f"call{more}", []
        if not required and otherwise is not None:
            start = f"answer | {start}"
            rules.append(f"answer: %json {json.dumps(with_white_space(otherwise))}")
        elif not required and self.trigger:
            start = f"TEXT | text_and_call{more}"
            rules += self._text_before_a_call(tag_ids)
        elif not required:
            start = f"TEXT | {start}"
            rules.append("TEXT: /([^{](.|\\n)*)?/")
        bodies = [f"tool_{index}" for index in range(len(tools))]
        rules += [f"call: {_literal(self.opening, tag_ids)} body", f"body: {' | '.join(bodies)}"]
        for body, tool in zip(bodies, tools, strict=True):
            head = _literal(self.head(tool.name).removeprefix(self.opening), tag_ids)
            schema = json.dumps(with_white_space(tool.arguments))
            rules.append(f"{body}: {head} %json {schema} {_literal(self.tail, tag_ids)}")
        return lark_grammar("\n".join([f"start: {start}", *rules]))

    def _text_before_a_call(self, tag_ids: Mapping[str, int]) -> list[str]:
        rest = _literal(self.opening.removeprefix(self.trigger), tag_ids)
        if self.trigger in tag_ids:  # other tokens that spell it would be parsed as a call as well
            spelled = f"/(.|\\n)*{re.escape(self.trigger)}(.|\\n)*/"
            return [
                f"TEXT: /(.|\\n)*/ & ~{spelled}",
                f"text_and_call: TEXT {_literal(self.trigger, tag_ids)} {rest} body",
            ]
        return [
            "TEXT: /(.|\\n)*/",
            f"trigger[lazy]: TEXT {json.dumps(self.trigger)}",
            f"text_and_call: trigger {rest} body",
        ]


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments")  # Hermes, Qwen 2.5 and 3
LLAMA = ToolFormat("", "", "; ", "parameters")  # Llama 3.1 and later


def tool_format(chat_template: str) -> ToolFormat | None:
    """The format of calls that a template describes to the model; None: no known one."""
    if "<tool_call>" in chat_template and "<function=" not in chat_template:
        return HERMES
    return LLAMA if '"parameters": ' in chat_template else None


def _literal(text: str, tag_ids: Mapping[str, int]) -> str:
    """`text` in a grammar: quoted, with the ids of tags that are tokens."""
    if not tag_ids:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, tag_ids)) + ")", text)
    return " ".join(f"<[{tag_ids[part]}]>" if part in tag_ids else json.dumps(part) for part in parts if part)


@dataclass(slots=True)
class Call:
    """A call, or a piece of it: then only the first one has `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """The content and the pieces of calls in some text."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)  # in order


class ToolCallParser:
    """Parses one answer, which conforms to the grammar of its `ToolFormat` but may be cut off by a limit.

    ```
    text ... <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>\\n<tool_call>...
    |- content -|-------- head --------------------|-args-|-- skipped up to the next head
    ```
    """

    def __init__(self, layout: ToolFormat) -> None:
        self._layout = layout
        self._head = re.compile(rf'\{{"name": "([\w-]+)", "{layout.arguments_key}": ')
        self._trigger = StopStrings([layout.trigger] if layout.trigger else [])
        self._in_calls = False
        self._begun = False
        self._pending = ""  # text that is not parsed yet
        self._arguments: JsonObject | None = None  # the open call's
        self.num_calls = 0

    def append(self, text: str) -> Parsed:
        """The content and pieces of calls that `text` completes."""
        parsed = Parsed()
        if not self._in_calls:
            text = self._take_content(text, parsed)
        self._pending += text
        while self._in_calls and self._step(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        """The content held back, at the end of the answer; an incomplete head of a call is dropped."""
        return Parsed() if self._in_calls else Parsed(self._trigger.flush())

    def _take_content(self, text: str, parsed: Parsed) -> str:
        """Move the content at the beginning of `text` to `parsed`; returns the rest, which belongs to calls."""
        if not self._layout.trigger:
            self._in_calls = not self._begun and text.startswith("{")
            self._begun = self._begun or bool(text)
            parsed.content = "" if self._in_calls else text
            return text if self._in_calls else ""
        parsed.content = self._trigger.append(text)
        self._in_calls = self._trigger.matched is not None
        return self._trigger.rest

    def _step(self, parsed: Parsed) -> bool:
        """Parse one more piece of the pending text; False where it is incomplete."""
        if self._arguments is None:
            head = self._head.search(self._pending)
            if head is None:
                return False
            self._pending = self._pending[head.end() :]
            self._arguments = JsonObject()
            parsed.calls.append(Call(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", head[1]))
            self.num_calls += 1
            return True
        length = self._arguments.scan(self._pending)
        piece, self._pending = self._pending[:length], self._pending[length:]
        if piece:
            parsed.calls.append(Call(self.num_calls - 1, arguments=piece))
        if not self._arguments.complete:
            return False
        self._arguments = None
        return True


def merge(pieces: Sequence[Call]) -> list[Call]:
    """Join the pieces of calls."""
    calls: list[Call] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(Call(piece.index, piece.id, piece.name))
        calls[-1].arguments += piece.arguments
    return calls


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
