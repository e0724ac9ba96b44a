"""What the two generating endpoints answer, whole or as server-sent events, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import ClassVar, Protocol

import msgspec

from llmservice_server.api.generation import Progress
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


class Choice(msgspec.Struct):
    """One of an answer's choices, whole or in part; each endpoint has its own."""

    index: int


class Answer(msgspec.Struct):
    """A whole answer, or one event of a stream; there `usage`, where it was asked for, is null in all but the last."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Many[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Layout(Protocol):
    """An endpoint's shapes, for one request."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    def opening(self, index: int) -> Many[Choice]:
        """What a choice's stream begins with."""

    def choice(self, progress: Progress) -> Choice:
        """A whole answer's choice, from everything that its sequence has come to."""

    def delta(self, progress: Progress) -> Many[Choice]:
        """What a stream says of a step that has text or ends the choice."""


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
