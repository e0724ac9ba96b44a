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
from llmservice_server.tokenizer import Tokenizer


class Message(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Choice):
    message: Message
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    role: str | None = None


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

    def opening(self, index: int) -> Many[Choice]:
        return [ChatDelta(index, Delta(role="assistant", content=""))]

    def choice(self, progress: Progress) -> ChatChoice:
        sequence = progress.sequence
        return ChatChoice(sequence.index, Message(progress.text), progress.finish_reason, self._logprobs(sequence))

    def delta(self, progress: Progress) -> Many[Choice]:
        parts: list[Choice] = []
        index, logprobs = progress.sequence.index, self._logprobs(progress.sequence)
        if progress.text or (logprobs is not None and logprobs.content):
            parts.append(ChatDelta(index, Delta(content=progress.text), None, logprobs))
        if progress.finish_reason is not None:
            parts.append(ChatDelta(index, Delta(), progress.finish_reason))
        return parts

    def _logprobs(self, sequence: Sequence) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(sequence.take_logprobs(), self._tokenizer.token_bytes)
