"""The choices of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import ClassVar, Literal

import msgspec

from llmservice_server.api.generation import Progress
from llmservice_server.api.logprobs import ChatLogprobs, chat_logprobs
from llmservice_server.api.request import ChatRequest
from llmservice_server.api.response import Choice
from llmservice_server.api.sequence import Sequence
from llmservice_server.api.tool_calls import Call, Parsed, ToolCallParser, merge
from llmservice_server.api.tools import NamedTool
from llmservice_server.text.tokenizer import Tokenizer


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A call's first piece has its id and name, the others more of its arguments."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Choice):
    message: Message
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    role: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDelta(Choice):
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatFormat:
    """In a stream the reason comes in an event of its own, after the last words."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = request.logprobs
        self._tool_format = tokenizer.tool_format if request.callable_tools else None
        self._chosen = isinstance(request.tool_choice, NamedTool)
        self._parsers: dict[int, ToolCallParser] = {}  # by choice

    def opening(self, index: int) -> Many[Choice]:
        return [ChatDelta(index, Delta(role="assistant", content=""))]

    def choice(self, progress: Progress) -> ChatChoice:
        index, logprobs = progress.sequence.index, self._logprobs(progress.sequence)
        parsed = self._parse(progress)
        message = Message(parsed.content)
        if calls := merge(parsed.calls):
            message.content = parsed.content if parsed.content.strip() else None
            message.tool_calls = [ToolCall(call.id or "", CalledFunction(call.name, call.arguments)) for call in calls]
        return ChatChoice(index, message, self._reason(progress), logprobs)

    def delta(self, progress: Progress) -> Many[Choice]:
        parts: list[Choice] = []
        index, logprobs = progress.sequence.index, self._logprobs(progress.sequence)
        parsed = self._parse(progress)
        calls = [_call_delta(call) for call in parsed.calls] or None
        if parsed.content or calls or (logprobs is not None and logprobs.content):
            content = parsed.content if parsed.content or not calls else None
            parts.append(ChatDelta(index, Delta(content=content, tool_calls=calls), None, logprobs))
        if progress.finish_reason is not None:
            parts.append(ChatDelta(index, Delta(), self._reason(progress)))
        return parts

    def _parse(self, progress: Progress) -> Parsed:
        """What the step's text says in words, and what in tool calls."""
        if self._tool_format is None:
            return Parsed(progress.text)
        parser = self._parsers.setdefault(progress.sequence.index, ToolCallParser(self._tool_format))
        parsed = parser.append(progress.text)
        if progress.finish_reason is not None:
            parsed.content += parser.flush().content
        return parsed

    def _reason(self, progress: Progress) -> str | None:
        """As at OpenAI, a call that the client itself has chosen ends with "stop"."""
        parser = self._parsers.get(progress.sequence.index)
        called = parser is not None and parser.num_calls > 0 and not self._chosen
        return "tool_calls" if called and progress.finish_reason == "stop" else progress.finish_reason

    def _logprobs(self, sequence: Sequence) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(sequence.take_logprobs(), self._tokenizer.token_bytes)


def _call_delta(call: Call) -> ToolCallDelta:
    function = CalledFunction(call.name, call.arguments)
    return ToolCallDelta(call.index, function, call.id, None if call.id is None else "function")
