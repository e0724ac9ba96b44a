"""Reasoning apart from the answer: between two tags, or in harmony's channels, which hold tool calls as well."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from llmservice_server.sampling.grammar import WHITE_SPACE, LarkRules, escaped
from llmservice_server.text.detokenizer import StopStrings
from llmservice_server.text.json_calls import JsonObject
from llmservice_server.text.tool_calls import Call, Parsed, ToolSchema, call_id, json_arguments

Beginning = Literal["open", "reasoning", "content"]
"""Where an answer begins. The prompt may have begun its reasoning or its content; open: it has begun neither."""


class AnswerParser(Protocol):
    """Parses one answer, which arrives in pieces of any size."""

    @property
    def num_calls(self) -> int: ...

    @property
    def in_call(self) -> bool:
        """Whether the last call is incomplete."""

    def append(self, text: str) -> Parsed:
        """What is certain after `text`."""

    def flush(self) -> Parsed:
        """What was held back, at the end of the answer."""


class TextParser:
    """For answers without tool calls."""

    num_calls = 0
    in_call = False

    def append(self, text: str) -> Parsed:
        return Parsed(text)

    def flush(self) -> Parsed:
        return Parsed()


class ReasoningTokens:
    """Counts the tokens of an answer's reasoning, without its markers."""

    def __init__(self, begin: Sequence[int], ends: Set[int], beginning: Beginning) -> None:
        """Reasoning stands behind the tokens `begin`, up to one of `ends`."""
        self._begin = list(begin)
        self._ends = ends
        self._last: list[int] = []  # tokens outside of reasoning, as many as `begin` has
        self._inside = beginning == "reasoning"
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._inside:
                self._last = [*self._last, token_id][-len(self._begin) :]
                self._inside = self._last == self._begin
            elif token_id in self._ends:
                self._inside = False
            else:
                self.num_tokens += 1


@dataclass(frozen=True, slots=True)
class Tags:
    """What reasoning stands between, and the tokens that these are made of."""

    begin: str
    end: str
    markers: tuple[str, ...]
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    """Tokens before and behind an answer in text, which are no part of it."""
    answer: tuple[str, str] | None = None
    """Likewise, two texts."""

    @property
    def pattern(self) -> str:
        """Of text that begins with reasoning."""
        return rf"\s*{escaped(self.begin)}(.|\n)*"

    def rules(self, rules: LarkRules, beginning: Beginning) -> str:
        """The grammar of reasoning before an answer; empty: there is none."""
        if beginning == "content":
            return ""
        _, reasoning = rules.text_until(self.end)
        rules.add(r"WHITE_SPACE: /[ \n]{1,4}/")
        if beginning == "reasoning":
            return f"{reasoning} WHITE_SPACE?"
        return f"({rules.literal(self.begin)} {reasoning} WHITE_SPACE?)?"

    def around(self, answer: str) -> str:
        """The grammar of an answer, a rule's right side, with what may stand around it."""
        if self.answer is None:
            return answer
        opening, closing = map(json.dumps, self.answer)
        return f"({opening} {WHITE_SPACE})? ({answer}) ({WHITE_SPACE} {closing})?"


_THINK = Tags("<think>", "</think>", ("<think>", "</think>"))
TAGS = {
    "think": _THINK,
    "hunyuan": replace(_THINK, answer=("<answer>", "</answer>")),
    "ernie": replace(_THINK, answer=("<response>", "</response>")),
    "seed_oss": Tags("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    "mistral": Tags("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "apertus": Tags("<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")),
    "gemma": Tags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    "cohere": Tags(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        ("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
}
"""By the names of formats."""


class ThinkParser:
    """Reasoning stands between two tags at the beginning of an answer, without white space around it.

    ```
    <think>\\n ... \\n</think>\\n\\n ...
    |- open-|- reasoning -|- content, by the parser for what follows
    ```
    """

    def __init__(self, following: AnswerParser, beginning: Beginning, tags: Tags) -> None:
        self._following = following
        self._state = beginning
        self._begin = tags.begin
        self._end = StopStrings([tags.end])
        self._held = ""  # what may be the first tag, or white space before a tag
        self._drops_space = beginning == "reasoning"

    @property
    def num_calls(self) -> int:
        return self._following.num_calls

    @property
    def in_call(self) -> bool:
        return self._following.in_call

    def append(self, text: str) -> Parsed:
        if self._state == "open":
            self._held += text
            begun = self._held.lstrip()
            if self._begin.startswith(begun):
                return Parsed()
            self._state = "reasoning" if begun.startswith(self._begin) else "content"
            self._drops_space = self._state == "reasoning"
            text, self._held = begun.removeprefix(self._begin) if self._drops_space else self._held, ""
        parsed = Parsed()
        if self._state == "reasoning":
            self._reason(self._end.append(text), parsed)
            if self._end.matched is None:
                return parsed
            self._state, self._held, self._drops_space, text = "content", "", True, self._end.rest
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        parsed.extend(self._following.append(text))
        return parsed

    def _reason(self, text: str, parsed: Parsed) -> None:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        text = self._held + text
        parsed.reasoning = text.rstrip()
        self._held = text[len(parsed.reasoning) :]

    def flush(self) -> Parsed:
        parsed = Parsed()
        if self._state == "reasoning":
            self._reason(self._end.flush(), parsed)
        elif self._state == "open":
            parsed = self._following.append(self._held)
        parsed.extend(self._following.flush())
        return parsed


class AnswerTagsParser:
    """Leaves out two tags around an answer, with the white space at them."""

    def __init__(self, following: AnswerParser, begin: str, end: str) -> None:
        self._following = following
        self._between = ThinkParser(TextParser(), "open", Tags(begin, end, ()))

    @property
    def num_calls(self) -> int:
        return self._following.num_calls

    @property
    def in_call(self) -> bool:
        return self._following.in_call

    def append(self, text: str) -> Parsed:
        found = self._between.append(text)
        return self._following.append(found.reasoning + found.content)

    def flush(self) -> Parsed:
        found = self._between.flush()
        parsed = self._following.append(found.reasoning + found.content)
        parsed.extend(self._following.flush())
        return parsed


CHANNEL, MESSAGE, END, CALL, START = "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>"
HARMONY_MARKERS = (START, END, MESSAGE, CHANNEL, "<|constrain|>", "<|return|>", CALL)
_ANSWERING = f"{START}assistant"


def harmony_rules(
    rules: LarkRules,
    answer: str | None,
    tools: Sequence[ToolSchema],
    beginning: Beginning,
) -> str:
    """The grammar of messages: analysis, then a final one of `answer`, or a call of one of `tools`.

    `answer` is a rule, "" for text and None for none: the answer is a call.
    """
    text, message = rules.text_until(END)
    last = []
    if answer is not None:
        if beginning == "content":
            return answer or text
        last.append(f"{rules.literal(f'{CHANNEL}final{MESSAGE}')} {answer or text}")
    for tool in tools:
        head = rules.literal(f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}")
        last.append(f"{head} {json_arguments(rules, tool)}")
    channel = '("analysis" | "commentary")' if answer == "" else '"analysis"'  # commentary is content
    rules.add(
        f"message: {rules.literal(CHANNEL)} {channel} {rules.literal(MESSAGE)} {message} {rules.literal(_ANSWERING)}"
    )
    return f"message* ({' | '.join(last)})"


class HarmonyParser:
    """Messages on channels: analysis is reasoning, one with a recipient is a call, every other one is content.

    ```
    <|channel|>analysis<|message|> ... <|end|><|start|>assistant<|channel|>final<|message|> ... <|return|>
    |---------- header -----------|-text-|-------------------- header --------------------|-text-|
    ```
    """

    _RECIPIENT = re.compile(r"\bto=([^\s<]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
    _ENDS = (END, CALL, "<|return|>", START, CHANNEL)
    _NO_CALL = re.compile(r"(<\|start\|>)?(assistant)?(<\|channel\|>\w*)?\s*")

    def __init__(self, beginning: Beginning, *, calls: bool, reasoning: bool) -> None:
        self._with_calls = calls
        self._with_reasoning = reasoning
        self._header: str | None = None if beginning == "content" else ""  # None: within a message
        self._kind: Literal["content", "reasoning", "call"] = "content"
        self._text = StopStrings(self._ENDS)
        self._arguments = JsonObject()  # the last call's
        self._written: set[str] = set()  # kinds
        self.num_calls = 0

    @property
    def in_call(self) -> bool:
        return self.num_calls > 0 and not self._arguments.complete

    def append(self, text: str) -> Parsed:
        parsed = Parsed()
        while text:
            if self._header is not None:
                self._header += text
                header, mark, text = self._header.partition(MESSAGE)
                if mark:
                    self._begin(header, parsed)
                continue
            self._add(self._text.append(text), parsed)
            text = ""
            if (ended := self._text.matched) is not None:
                self._header, text = "", (ended if ended in (START, CHANNEL) else "") + self._text.rest
                self._text = StopStrings(self._ENDS)
        return parsed

    def flush(self) -> Parsed:
        """An incomplete header of a call is content."""
        parsed = Parsed()
        if self._header is None:
            self._add(self._text.flush(), parsed)
        elif not self._NO_CALL.fullmatch(self._header):
            parsed.content = self._header
        return parsed

    def _begin(self, header: str, parsed: Parsed) -> None:
        self._header, recipient, channel = None, self._RECIPIENT.search(header), self._CHANNEL.search(header)
        if recipient is not None and self._with_calls:
            self._kind = "call"
            name = recipient[1].removeprefix("functions.")
            parsed.calls.append(Call(self.num_calls, call_id(), name))
            self.num_calls += 1
            self._arguments = JsonObject()
        elif channel is not None and channel[1] == "analysis" and self._with_reasoning:
            self._kind = "reasoning"
        else:
            self._kind = "content"
        if self._kind in self._written:  # another message
            self._add("\n", parsed)

    def _add(self, text: str, parsed: Parsed) -> None:
        if text and self._kind != "call":
            self._written.add(self._kind)
        if self._kind == "reasoning":
            parsed.reasoning += text
        elif self._kind == "content":
            parsed.content += text
        elif text:
            parsed.calls.append(Call(self.num_calls - 1, arguments=text))
            self._arguments.append(text)
