"""/v1/completions: the body and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import MAX_INT, LogprobsCount, TokenId
from llmservice_server.http.protocol.generation import (
    MAX_CHOICES,
    MAX_SEQUENCES,
    GenerationRequest,
    RequestedPromptLogprobs,
    Usage,
)

TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
# `TokenIds` is a member of its own because pydantic validates a list of one type five times faster.
Prompt = str | TokenIds | Annotated[list[str | TokenId | TokenIds], Field(fail_fast=True)]


def one_or_several(given: Prompt, param: str) -> list[str | list[int]]:
    """Texts or lists of token ids; ids stand directly in the list or in lists of their own.

    Raises ApiError on a mixture.
    """
    parts = [given] if isinstance(given, str) else given
    ids = [part for part in parts if isinstance(part, int)]
    if ids and len(ids) < len(parts):
        raise invalid(f"{param} mixes token ids with texts or lists: expected one kind", param=param)
    return [ids] if ids else [part for part in parts if not isinstance(part, int)]


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "llama", "prompt": "The capital of France is", "max_tokens": 8}]}
    )
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.refused,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT, description="0: only echo the prompt")] | None = None
    echo: bool = False
    logprobs: LogprobsCount | None = None
    best_of: Annotated[
        int | None, Field(ge=1, le=MAX_CHOICES, description="generate so many, return the n likeliest per token")
    ] = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        prompts = self.prompts
        if not prompts:
            raise invalid("prompt is an empty list: expected text or token ids", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens is 0, expected at least 1, or echo beside it", param="max_tokens")
        if len(prompts) * self.num_candidates > MAX_SEQUENCES:
            raise invalid(
                f"{len(prompts)} prompts with n {self.num_candidates} are too many: at most {MAX_SEQUENCES}", param="n"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise invalid(f"best_of {self.best_of} is below n {self.n}", param="best_of")
        if self.num_candidates > self.n and self.stream:
            raise invalid("best_of above n is not available when stream is true", param="best_of")
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            raise invalid("give either prompt_logprobs, or echo and logprobs, not both", param="prompt_logprobs")
        return self

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_candidates > self.n else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Raises ApiError where the list mixes texts and token ids."""
        return one_or_several(self.prompt, "prompt")


class CompletionLogprobs(BaseModel):
    """Parallel lists. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None
    prompt_logprobs: RequestedPromptLogprobs = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    choices: list[CompletionChoice]
    usage: Usage
