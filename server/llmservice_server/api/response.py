"""What the two generating endpoints answer, whole or as server-sent events, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Literal

import msgspec

from llmservice_server.api.sequence import Sequence

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Text(msgspec.Struct):
    """A completion's choice, whole or in part."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class Message(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    role: str | None = None


class ChatDelta(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None = None


Choice = Text | ChatChoice | ChatDelta


class Answer(msgspec.Struct):
    """A whole answer, or one event of a stream; there `usage`, where it was asked for, is null in all but the last."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionFormat:
    """The shapes of /v1/completions."""

    id_prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> list[Choice]:
        return []

    def choice(self, index: int, text: str, finish_reason: str | None) -> Choice:
        return Text(index, text, finish_reason)

    def delta(self, index: int, text: str, finish_reason: str | None) -> list[Choice]:
        return [Text(index, text, finish_reason)]


class ChatFormat:
    """The shapes of /v1/chat/completions."""

    id_prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[Choice]:
        return [ChatDelta(index, Delta(role="assistant", content=""), None)]

    def choice(self, index: int, text: str, finish_reason: str | None) -> Choice:
        return ChatChoice(index, Message(text), finish_reason)

    def delta(self, index: int, text: str, finish_reason: str | None) -> list[Choice]:
        """The reason comes in an event of its own, after the last words."""
        parts: list[Choice] = []
        if text:
            parts.append(ChatDelta(index, Delta(content=text), None))
        if finish_reason is not None:
            parts.append(ChatDelta(index, Delta(), finish_reason))
        return parts


def usage(sequences: Many[Sequence]) -> Usage:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    prompts = {sequence.prompt_index: sequence for sequence in sequences}
    prompt_tokens = sum(sequence.num_prompt_tokens for sequence in prompts.values())
    completion_tokens = sum(sequence.num_tokens for sequence in sequences)
    cached = sum(sequence.num_cached_tokens for sequence in prompts.values())
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached))


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"
