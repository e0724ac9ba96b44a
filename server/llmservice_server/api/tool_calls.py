"""From what a model writes to the tool calls that a client sees, while it is being written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmservice_server.text.stop_strings import StopStrings
from llmservice_server.text.tool_format import ToolFormat


@dataclass(slots=True)
class Call:
    """A call, or what a step added to it: then `id` and `name` only stand in the first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What some text came to."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)  # pieces, in order


class ToolCallParser:
    """One choice's text, which keeps to the grammar of its `ToolFormat`; text that is cut off by a limit is no error.

    ```
    words ... <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>\\n<tool_call>...
    |- content -|-------- head --------------------|-args-|-- passed over up to the next head
    ```
    """

    def __init__(self, layout: ToolFormat) -> None:
        self._layout = layout
        self._head = re.compile(rf'\{{"name": "([\w-]+)", "{layout.arguments_key}": ')
        self._trigger = StopStrings([layout.trigger] if layout.trigger else [])
        self._calling = False
        self._begun = False
        self._pending = ""  # text that is not understood yet
        self._arguments: JsonObject | None = None  # the open call's
        self.num_calls = 0

    def append(self, text: str) -> Parsed:
        """What `text` makes certain."""
        parsed = Parsed()
        if not self._calling:
            text = self._words(text, parsed)
        self._pending += text
        while self._calling and self._step(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        """The words that were held back, at the end; half a call's head is nothing that a client could use."""
        return Parsed() if self._calling else Parsed(self._trigger.flush())

    def _words(self, text: str, parsed: Parsed) -> str:
        """Take the words off the beginning of `text`; returns what belongs to calls."""
        if not self._layout.trigger:
            self._calling = not self._begun and text.startswith("{")
            self._begun = self._begun or bool(text)
            parsed.content = "" if self._calling else text
            return text if self._calling else ""
        parsed.content = self._trigger.append(text)
        self._calling = self._trigger.matched is not None
        return self._trigger.rest

    def _step(self, parsed: Parsed) -> bool:
        """Understand one more piece of the pending text; False where it takes more text to do so."""
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
    """Whole calls."""
    calls: list[Call] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(Call(piece.index, piece.id, piece.name))
        calls[-1].arguments += piece.arguments
    return calls


class JsonObject:
    """Finds the end of an object in text that comes in pieces and is valid JSON as far as it goes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
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
