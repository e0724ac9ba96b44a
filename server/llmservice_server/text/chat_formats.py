"""The formats of tool calls and reasoning by name, which of them a model uses, and what follows from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmservice_server.engine.config import ReasoningFormatName, ToolCallFormatName
from llmservice_server.sampling.grammar import LarkRules, behind, lark_grammar
from llmservice_server.text import json_calls
from llmservice_server.text.gemma import FUNCTIONGEMMA, GEMMA
from llmservice_server.text.olmo import OLMO3
from llmservice_server.text.reasoning import (
    CALL,
    CHANNEL,
    END,
    HARMONY_MARKERS,
    MESSAGE,
    START,
    TAGS,
    AnswerParser,
    AnswerTagsParser,
    Beginning,
    HarmonyParser,
    TextParser,
    ThinkParser,
    harmony_rules,
)
from llmservice_server.text.tool_calls import ToolFormat, ToolSchema
from llmservice_server.text.xml_calls import GLM, GLM_COMPACT, MINIMAX_M2, QWEN3_CODER, SEED_OSS

END_TOKENS: Mapping[str, tuple[str, ...]] = {
    "harmony": (CALL, "<|return|>"),
    "llama3_json": ("<|eom_id|>",),
    "gemma": ("<turn|>", "<|tool_response>"),
    "functiongemma": ("<start_function_response>",),
}
"""Tokens that end an answer in a format, also where generation_config.json does not name them."""


class ChatFormatError(ValueError):
    """The formats that were asked for do not belong together; the message says why."""


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The formats of a model; `none`: tool calls are refused, and reasoning is part of the content."""

    tool_calls: ToolCallFormatName = "auto"
    reasoning: ReasoningFormatName = "auto"

    def resolved(self, chat_template: str, vocabulary: Mapping[str, int]) -> FormatNames:
        """With `auto` replaced by what the template and the added tokens of the `vocabulary` show.

        Raises ChatFormatError where one is harmony and the other is another format.
        """
        calls, reasoning = self.tool_calls, self.reasoning
        if calls == "auto":
            calls = "harmony" if reasoning == "harmony" else _tool_call_format(chat_template)
        if reasoning == "auto":
            reasoning = "harmony" if calls == "harmony" else _reasoning_format(chat_template, vocabulary)
        if "harmony" in (calls, reasoning) and not {calls, reasoning} <= {"harmony", "none"}:
            raise ChatFormatError(
                f"the format of tool calls is {calls} and that of reasoning {reasoning}, but harmony is one format for "
                "both: set both to harmony, or one of them to none"
            )
        return FormatNames(calls, reasoning)


_CALLS_BEGIN: Mapping[str, ToolCallFormatName] = {
    "<|channel|>": "harmony",
    "<|tool_call>": "gemma",
    "<start_function_call>": "functiongemma",
    "<seed:tool_call>": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "<arg_key>": "glm",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<TOOLCALL>": "nemotron",
    "<|tool_call|>": "granite",
    "<tool_calls>": "hunyuan",
    "functools[": "phi4_mini",
    "<|tools_prefix|>": "apertus",
    "<｜tool▁calls▁begin｜>": "deepseek_v31",
    "<|START_ACTION|>": "cohere",
    "<function_calls>": "olmo3",
    '"parameters": ': "llama3_json",
    "<|python_tag|>": "llama3_json",
}
"""The first of these in a template shows its format."""


def _tool_call_format(template: str) -> ToolCallFormatName:
    for words, name in _CALLS_BEGIN.items():
        if words not in template:
            continue
        if name in ("deepseek_v31", "olmo3") and not re.search(r"\btools\b", template):
            return "none"  # DeepSeek's own templates and those of OLMo 3 Think do not show tools to the model
        if name == "deepseek_v31" and "```json" in template:
            return "deepseek_v3"
        return "qwen3_coder" if name == "hermes" and "<function=" in template else name
    return "none"


_REASONING_SHOWN: Mapping[str, ReasoningFormatName] = {
    "<|channel|>": "harmony",
    "<|channel>": "gemma",
    "<seed:think>": "seed_oss",
    "[THINK]": "mistral",
    "<|inner_prefix|>": "apertus",
    "<|START_THINKING|>": "cohere",
    "<|START_RESPONSE|>": "cohere",
}
"""Likewise; otherwise the tags are those of `think`, or there are none."""


def _reasoning_format(template: str, vocabulary: Mapping[str, int]) -> ReasoningFormatName:
    for words, name in _REASONING_SHOWN.items():
        if words in template:
            return name
    think = TAGS["think"]
    if think.begin in template or think.end in template:
        return "hunyuan" if "<answer>" in template else "ernie" if "<response>" in template else "think"
    return "think" if think.begin in vocabulary else "none"


class ChatFormats:
    """How a model writes tool calls and reasoning."""

    def __init__(self, names: FormatNames, chat_template: str, vocabulary: Mapping[str, int]) -> None:
        """`vocabulary`: the ids of added tokens, special ones too. Raises ChatFormatError."""
        self.names = names.resolved(chat_template, vocabulary)
        self._is_harmony = "harmony" in (self.names.tool_calls, self.names.reasoning)
        self._tool_format = _tool_format(self.names.tool_calls, chat_template)
        markers: tuple[str, ...] = HARMONY_MARKERS if self._is_harmony else ()
        self._tags = TAGS.get(self.names.reasoning)
        markers += self._tags.markers if self._tags is not None else ()
        self._one_call = "single tool-call" in chat_template  # Llama 3.1's refuses a message with several
        self._kept = _ids(markers, vocabulary)
        self._opening = _ids(self._tags.opening if self._tags is not None else (), vocabulary)
        self._closing = _ids(self._tags.closing if self._tags is not None else (), vocabulary)
        self._tool_ids = _ids(self._tool_format.markers, vocabulary) if self._tool_format else {}
        ends = END_TOKENS.get(self.names.tool_calls, ()) + END_TOKENS.get(self.names.reasoning, ())
        self.end_token_ids = frozenset(_ids(ends, vocabulary).values())

    @property
    def can_call(self) -> bool:
        return self.names.tool_calls != "none"

    @property
    def distinguishes_json(self) -> bool:
        """Whether a call cannot be taken for an answer that is a JSON object."""
        return self._tool_format is None or bool(self._tool_format.trigger)

    def kept_tokens(self, *, calls: bool) -> dict[int, str]:
        """Tokens by the text that is parsed of them, where an answer may have `calls`.

        Some are kept although they may be special, and others dropped although they may be none.
        """
        kept = {token_id: marker for marker, token_id in (self._kept | (self._tool_ids if calls else {})).items()}
        return kept | dict.fromkeys((self._opening | self._closing).values(), "")

    def beginning(self, prompt_end: str, continued: str | None) -> Beginning:
        """Where an answer begins. `prompt_end`: the prompt's last words; `continued`: the message that it continues."""
        if self._is_harmony:
            return "open" if continued is None else "content"
        if (tags := self._tags) is None:
            return "content"
        if continued is not None:
            return "reasoning" if continued.rfind(tags.begin) > continued.rfind(tags.end) else "content"
        if prompt_end.rstrip().endswith(tags.begin):
            return "reasoning"
        return "content" if prompt_end.rstrip().endswith(tags.end) else "open"

    @property
    def reasoning_marks(self) -> tuple[str, frozenset[int]] | None:
        """What begins reasoning, and the tokens that end it; None where it cannot be told by tokens."""
        marks: dict[str, tuple[str, tuple[str, ...]]] = {name: (tags.begin, (tags.end,)) for name, tags in TAGS.items()}
        marks |= {"harmony": (f"{CHANNEL}analysis{MESSAGE}", (END, CALL, START))}
        begin, ends = marks.get(self.names.reasoning, ("", ()))
        return (begin, frozenset(self._kept[end] for end in ends)) if ends and self._kept.keys() >= {*ends} else None

    def parser(self, tools: Sequence[ToolSchema], beginning: Beginning) -> AnswerParser:
        """For one answer, which may call `tools`."""
        if self._is_harmony:
            calls = bool(tools) and self.can_call
            return HarmonyParser(beginning, calls=calls, reasoning=self.names.reasoning == "harmony")
        following: AnswerParser = TextParser()
        if tools and self._tool_format is not None:
            following = self._tool_format.parser(tools)
        if self._tags is not None and self._tags.answer is not None:
            following = AnswerTagsParser(following, *self._tags.answer)
        return following if self._tags is None else ThinkParser(following, beginning, self._tags)

    def behind_reasoning(self, grammar: str, beginning: Beginning) -> str:
        """The grammar of answers whose content is in `grammar`, with the reasoning before it."""
        rules = LarkRules(self._kept | self._opening)
        if beginning == "content":
            return grammar
        if self._is_harmony:
            return behind(grammar, rules.text(harmony_rules(rules, "@answer", (), beginning)))
        reasoning = "" if self._tags is None else self._tags.rules(rules, beginning)
        answer = "@answer" if self._tags is None else self._tags.around("@answer")
        return behind(grammar, rules.text(f"{reasoning} {self._opened(rules)} {answer}"))

    def _opened(self, rules: LarkRules) -> str:
        """The grammar of a token that may stand before an answer in text."""
        return f"({' | '.join(map(rules.literal, self._opening))})?" if self._opening else ""

    def tool_grammar(
        self,
        tools: Sequence[ToolSchema],
        beginning: Beginning,
        *,
        required: bool,
        parallel: bool,
        otherwise: str | None = None,
    ) -> str:
        """The grammar of answers that call `tools`, at most one unless `parallel`, with the reasoning before it.

        Unless `required`, an answer may also be text, with or without calls after it, or, where `otherwise` is a
        grammar, what that allows.
        """
        rules = LarkRules(self._kept | self._tool_ids | self._opening)
        answer = None if required else "" if otherwise is None else "@answer"
        if self._is_harmony:
            start = harmony_rules(rules, answer, tools, beginning)
        else:
            assert self._tool_format is not None  # noqa: S101  # the caller has checked `can_call`
            unless = self._tags.pattern if self._tags is not None and beginning == "open" else ""
            reasoning = "" if self._tags is None else self._tags.rules(rules, beginning)
            several = parallel and not self._one_call
            start = self._tool_format.answer(rules, tools, answer, parallel=several, unless=unless)
            start = start if self._tags is None else self._tags.around(start)
            start = f"{reasoning} {'' if required else self._opened(rules)} ({start})" if reasoning else start
        text = rules.text(start)
        return lark_grammar(text) if otherwise is None else behind(otherwise, text)


def _tool_format(name: ToolCallFormatName, template: str) -> ToolFormat | None:
    """None: none, or harmony, which has no format of calls of its own."""
    if name == "mistral" and "[ARGS]" in template:
        return json_calls.MISTRAL_ARGS
    if name == "glm" and "</arg_key><arg_value>" in template:
        return GLM_COMPACT
    formats = (*json_calls.JSON_FORMATS, QWEN3_CODER, SEED_OSS, MINIMAX_M2, GLM, GEMMA, FUNCTIONGEMMA, OLMO3)
    return {layout.name: layout for layout in formats}.get(name)


def _ids(markers: Sequence[str], vocabulary: Mapping[str, int]) -> dict[str, int]:
    return {marker: vocabulary[marker] for marker in markers if marker in vocabulary}
