"""What the answers of the two generating endpoints have in common, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from pydantic import BaseModel
from starlette.datastructures import Headers

from llmservice_server.http.error import ApiError
from llmservice_server.http.protocol.generation import (
    CompletionTokensDetails,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from llmservice_server.text.detokenizer import TokenBytes
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.types.messages import TokenLogprobs

DONE = b"data: [DONE]\n\n"
USAGE_HEADER = "x-llmservice-usage"
"""A request with the value 1 is told its tokens: in the answer's header of this name, or at the end of its stream."""


class Choice(msgspec.Struct):
    """A piece of one of the choices; each endpoint has its own type."""

    index: int


class Chunk(msgspec.Struct):
    """One event of a stream. A requested `usage` is null in all events but the last."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[Choice] = ()
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Layout(Protocol):
    """An endpoint's answers, for one request."""

    id_prefix: ClassVar[str]
    chunk: ClassVar[str]

    @property
    def num_reasoning_tokens(self) -> int | None:
        """In the answers so far; None: the model does not reason."""

    def answer(self, identity: str, created: int, model: str, outputs: Sequence[CompletionOutput]) -> BaseModel:
        """The whole answer; its choices are `outputs` in order."""

    def opening(self, index: int) -> Sequence[Choice]:
        """The first event of a choice."""

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        """A piece of an answer, one event each."""


class EventWriter(Protocol):
    """Writes an endpoint's stream, for one request."""

    end: bytes
    """After the answer."""

    def opening(self) -> bytes:
        """Before the first output."""

    def events(self, outputs: Sequence[CompletionOutput]) -> bytes: ...

    def closing(self) -> bytes:
        """After the last one."""

    def failed(self, error: ApiError) -> bytes:
        """Instead of `closing` and `end`."""


def usage(processor: OutputProcessor, num_tokens: int | None = None, num_reasoning: int | None = None) -> Usage:
    """Of all choices; a prompt counts once, however many choices it has. `num_tokens`: generated, if not all count.

    `num_reasoning`: those of them that are reasoning; None: the model does not reason.
    """
    prompt, completion = processor.num_prompt_tokens, processor.num_tokens if num_tokens is None else num_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=processor.num_cached_tokens),
        completion_tokens_details=None
        if num_reasoning is None
        else CompletionTokensDetails(reasoning_tokens=num_reasoning),
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokens: TokenBytes) -> PromptLogprobs:
    """`entries` are those of the prompt's second token and the tokens after it."""
    listed: PromptLogprobs = [None]
    for entry in entries:
        by_id = {
            str(token_id): PromptLogprob(logprob=logprob, rank=rank, decoded_token=tokens.text(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        if str(entry.token_id) not in by_id:
            text = tokens.text(entry.token_id)
            by_id[str(entry.token_id)] = PromptLogprob(logprob=entry.logprob, rank=None, decoded_token=text)
        listed.append(by_id)
    return listed


def usage_report(scope: MutableMapping[str, Any]) -> str | None:
    """`PROMPT CACHED COMPLETION`, of a request that asks for it and has been computed: what the access log has."""
    log = scope["access_log"]
    if "prompt_tokens" not in log or Headers(scope=scope).get(USAGE_HEADER) != "1":
        return None
    return f"{log['prompt_tokens']} {log.get('cached_tokens', 0)} {log.get('completion_tokens', 0)}"


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def _encode(part: Any) -> Any:
    """The parts that events share with whole answers: usage and log-probabilities."""
    if isinstance(part, BaseModel):
        return part.model_dump()
    raise TypeError(f"no JSON of {type(part).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode)
