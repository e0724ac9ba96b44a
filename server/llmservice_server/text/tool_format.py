"""How models write tool calls: the ways that chat templates teach, and the grammars that hold a model to them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmservice_server.sampling.grammar import lark_grammar, with_white_space


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A function that may be called: its name, and the JSON schema of its arguments, an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `opening`, an object of name and arguments, `closing`.

    Where `opening` is empty, an answer that begins with a brace is a call.
    """

    opening: str
    closing: str
    separator: str  # between two calls
    arguments_key: str

    def head(self, name: str) -> str:
        """Everything of a call that comes before the arguments."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments_key}": '

    @property
    def tail(self) -> str:
        return "}" + self.closing

    @property
    def trigger(self) -> str:
        """What cannot be the beginning of words; empty: a brace at the very beginning."""
        return self.opening.strip()

    @property
    def tags(self) -> tuple[str, ...]:
        """Parts of a call that a vocabulary may have as single tokens."""
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

        `tag_ids`: the tags that are tokens of the model's vocabulary, which then writes them in no other way. Unless
        `required`, an answer may be words as well, with or without a call behind them; or, where `otherwise` is a
        schema, JSON of that schema.
        """
        more = f" ({_spell(self.separator, tag_ids)} call)*" if parallel else ""
        start, rules = f"call{more}", []
        if not required and otherwise is not None:
            start = f"answer | {start}"
            rules.append(f"answer: %json {json.dumps(with_white_space(otherwise))}")
        elif not required and self.trigger:
            start = f"WORDS | spoken{more}"
            rules += self._words_before_a_call(tag_ids)
        elif not required:
            start = f"WORDS | {start}"
            rules.append("WORDS: /([^{](.|\\n)*)?/")
        bodies = [f"tool_{index}" for index in range(len(tools))]
        rules += [f"call: {_spell(self.opening, tag_ids)} body", f"body: {' | '.join(bodies)}"]
        for body, tool in zip(bodies, tools, strict=True):
            head = _spell(self.head(tool.name).removeprefix(self.opening), tag_ids)
            schema = json.dumps(with_white_space(tool.arguments))
            rules.append(f"{body}: {head} %json {schema} {_spell(self.tail, tag_ids)}")
        return lark_grammar("\n".join([f"start: {start}", *rules]))

    def _words_before_a_call(self, tag_ids: Mapping[str, int]) -> list[str]:
        rest = _spell(self.opening.removeprefix(self.trigger), tag_ids)
        if self.trigger in tag_ids:  # spelled in letters it would be taken for a call all the same
            spelled = f"/(.|\\n)*{re.escape(self.trigger)}(.|\\n)*/"
            return [
                f"WORDS: /(.|\\n)*/ & ~{spelled}",
                f"spoken: WORDS {_spell(self.trigger, tag_ids)} {rest} body",
            ]
        return [
            "WORDS: /(.|\\n)*/",
            f"trigger[lazy]: WORDS {json.dumps(self.trigger)}",
            f"spoken: trigger {rest} body",
        ]


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments")  # Hermes, Qwen 2.5 and 3
LLAMA = ToolFormat("", "", "; ", "parameters")  # Llama 3.1 and later


def tool_format(chat_template: str) -> ToolFormat | None:
    """The way of writing calls that a template teaches its model; None: none that is known here."""
    if "<tool_call>" in chat_template and "<function=" not in chat_template:
        return HERMES
    return LLAMA if '"parameters": ' in chat_template else None


def _spell(text: str, tag_ids: Mapping[str, int]) -> str:
    """`text` in a grammar: letters in quotes, tags that are tokens by their ids."""
    if not tag_ids:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, tag_ids)) + ")", text)
    return " ".join(f"<[{tag_ids[part]}]>" if part in tag_ids else json.dumps(part) for part in parts if part)
