"""The responses of the two generating endpoints, whole or as server-sent events, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.token_bytes import TokenBytes
from llmservice_server.types.messages import TokenLogprobs

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """In vLLM's shape."""

    logprob: float
    rank: int | None  # None: not among the tokens that were requested
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of a prompt; null for the first, which has no context before it."""


class Choice(msgspec.Struct):
    """One of a response's choices, whole or a piece; each endpoint has its own type."""

    index: int


class Answer(msgspec.Struct):
    """A whole response, or one event of a stream, where a requested `usage` is null in all events but the last."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Layout(Protocol):
    """An endpoint's choices, for one request."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]

    def opening(self, index: int) -> Sequence[Choice]:
        """The first event of a choice."""

    def choice(self, output: CompletionOutput) -> Choice:
        """A whole answer."""

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        """A piece of an answer, one event each."""


def usage(processor: OutputProcessor, num_tokens: int | None = None) -> Usage:
    """Of all choices; a prompt counts once, however many choices it has. `num_tokens`: generated, if not all count."""
    prompt, completion = processor.num_prompt_tokens, processor.num_tokens if num_tokens is None else num_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(processor.num_cached_tokens))


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokens: TokenBytes) -> PromptLogprobs:
    """`entries` are those of the prompt's second token and the tokens after it."""
    listed: PromptLogprobs = [None]
    for entry in entries:
        by_id = {
            str(token_id): PromptLogprob(logprob, rank, tokens.text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        by_id.setdefault(str(entry.token_id), PromptLogprob(entry.logprob, None, tokens.text(entry.token_id)))
        listed.append(by_id)
    return listed


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"
