"""The choices of /v1/chat/completions, with their tool calls and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from llmservice_server.http.protocol.chat import ChatRequest
from llmservice_server.http.protocol.tools import NamedTool
from llmservice_server.http.response import Choice
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.token_bytes import TokenBytes
from llmservice_server.text.tool_calls import Call, Parsed, ToolCallParser, merge
from llmservice_server.types.messages import TokenLogprobs


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One object for each token."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first piece of a call has its id and name, the others have more of its arguments."""

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
    """In a stream the finish reason has an event of its own, after the last text."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, processor: OutputProcessor) -> None:
        tokenizer = processor.tokenizer
        self._token_bytes = tokenizer.token_bytes
        self._with_logprobs = request.logprobs
        self._tool_format = tokenizer.tool_format if request.callable_tools else None
        self._has_named_tool = isinstance(request.tool_choice, NamedTool)
        self._parsers: dict[int, ToolCallParser] = {}  # by choice

    def opening(self, index: int) -> Sequence[Choice]:
        return [ChatDelta(index, Delta(role="assistant", content=""))]

    def choice(self, output: CompletionOutput) -> ChatChoice:
        parsed = self._parse(output)
        message = Message(parsed.content)
        if calls := merge(parsed.calls):
            message.content = parsed.content if parsed.content.strip() else None
            message.tool_calls = [ToolCall(call.id or "", CalledFunction(call.name, call.arguments)) for call in calls]
        return ChatChoice(output.index, message, self._finish_reason(output), self._logprobs(output))

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        parts: list[Choice] = []
        index, logprobs, parsed = output.index, self._logprobs(output), self._parse(output)
        calls = [_call_delta(call) for call in parsed.calls] or None
        if parsed.content or calls or (logprobs is not None and logprobs.content):
            content = parsed.content if parsed.content or not calls else None
            parts.append(ChatDelta(index, Delta(content=content, tool_calls=calls), None, logprobs))
        if output.finish_reason is not None:
            parts.append(ChatDelta(index, Delta(), self._finish_reason(output)))
        return parts

    def _parse(self, output: CompletionOutput) -> Parsed:
        """Separate the text from the tool calls in it."""
        if self._tool_format is None:
            return Parsed(output.text)
        parser = self._parsers.setdefault(output.index, ToolCallParser(self._tool_format))
        parsed = parser.append(output.text)
        if output.finish_reason is not None:
            parsed.content += parser.flush().content
        return parsed

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        """As at OpenAI, a call of the tool that the request names ends with "stop"."""
        parser = self._parsers.get(output.index)
        called = parser is not None and parser.num_calls > 0 and not self._has_named_tool
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        return chat_logprobs(output.logprobs, self._token_bytes) if self._with_logprobs else None


def _call_delta(call: Call) -> ToolCallDelta:
    function = CalledFunction(call.name, call.arguments)
    return ToolCallDelta(call.index, function, call.id, None if call.id is None else "function")


def chat_logprobs(entries: Sequence[TokenLogprobs], tokens: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                tokens.text(entry.token_id),
                entry.logprob,
                _bytes(entry.token_id, tokens),
                [TopLogprob(tokens.text(top), logprob, _bytes(top, tokens)) for top, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def _bytes(token_id: int, tokens: TokenBytes) -> list[int] | None:
    return list(tokens[token_id]) or None
