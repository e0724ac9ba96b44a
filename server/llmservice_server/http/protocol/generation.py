"""The parameters that /v1/completions and /v1/chat/completions share, and what their answers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, Strict, model_validator

from llmservice_server.engine.config import LaneName
from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import (
    MAX_INT,
    MAX_INT64,
    Body,
    JsonObject,
    LogprobsCount,
    Part,
    TokenCount,
    TokenId,
)
from llmservice_server.sampling.grammar import choice_grammar, clients_grammar, json_grammar, regex_grammar

MAX_CHOICES = 16  # n
MAX_SEQUENCES = 128  # prompts × n of one request
MAX_BIASES = 1024
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 256  # characters, so that holding text back for them stays cheap

MAX_OFFERED_CHOICES = 4096
MAX_GRAMMAR_LENGTH = 65536  # characters


def _few_biases(bias: Any) -> Any:
    """Checked before the entries, each of which may give an error of its own."""
    if isinstance(bias, dict) and len(bias) > MAX_BIASES:
        raise ValueError(f"{len(bias)} entries are too many: at most {MAX_BIASES}")
    return bias


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
LogitBias = Annotated[
    dict[Annotated[TokenId, Strict(strict=False)], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few_biases),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(Part):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="vLLM's: every event has the usage so far")] = False


_Rules = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_OFFERED_CHOICES, fail_fast=True),
]


class StructuredOutputs(Part):
    """Exactly one of its fields."""

    json_schema: Annotated[JsonObject | None, Field(alias="json", description="a JSON schema")] = None
    json_object: bool = False
    regex: Annotated[_Rules | None, Field(description="in Rust's syntax, without look-around")] = None
    choice: _Choices | None = None
    grammar: Annotated[_Rules | None, Field(description="in llguidance's dialect of Lark")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model_extra:
            raise ValueError(f"{min(self.model_extra)} is not supported: leave it out")
        given = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(each is not None for each in given) != 1:
            raise ValueError("expected exactly one of json, json_object, regex, choice, grammar")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it is not JSON."""
        return {"type": "object"} if self.json_object else self.json_schema

    def as_grammar(self) -> str:
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return clients_grammar(self.grammar)
        return json_grammar(self.answer_schema or {})


class JsonSchema(Part):
    """`name` and `description` are OpenAI's labels; every schema is enforced, so `strict` changes nothing."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[JsonObject, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(Body):
    """What both endpoints take."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"store": (False,)}

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT, description="0 or -1: off")] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: TokenCount | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    logit_bias: LogitBias = {}
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] = []
    include_stop_str_in_output: Annotated[bool, Field(description="the stop string; a stop token has no text")] = False
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    bad_words: Annotated[
        list[BadWord], Field(max_length=128, fail_fast=True, description="never generated in their usual tokens")
    ] = []
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=16_384, fail_fast=True)] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: (
        Annotated[
            int,
            Field(ge=-1, le=MAX_INT, description="only the prompt's last tokens count; -1: as many as there is room"),
        ]
        | None
    ) = None
    prompt_logprobs: LogprobsCount | None = None
    priority: (
        LaneName
        | Annotated[int, Field(ge=-MAX_INT, le=MAX_INT, description="within the lane; the smallest is served first")]
    ) = 0
    cache_salt: (
        Annotated[
            str, Field(min_length=1, max_length=256, description="cached prefixes are shared between equal salts only")
        ]
        | None
    ) = None
    # Without effect on the answer, and therefore ignored.
    user: str | None = None
    metadata: dict[str, Any] = {}
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] = {}
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if None not in (self.structured_outputs, self.response_format):
            raise invalid("give either response_format or structured_outputs, not both", param="structured_outputs")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise invalid(f"min_tokens {self.min_tokens} is above max_tokens {self.token_limit}", param="min_tokens")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_candidates(self) -> int:
        """Answers that are generated for each prompt."""
        return self.n

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it may be anything."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.answer_schema

    @property
    def is_structured(self) -> bool:
        """Whether a grammar constrains the answer."""
        return self.structured_outputs is not None or self.answer_schema is not None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are returned with each; None: no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likewise for the prompt."""
        return self.prompt_logprobs


class PromptLogprob(BaseModel):
    logprob: float
    rank: Annotated[int | None, Field(description="1: the likeliest; null: beyond those that were asked for")]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
RequestedPromptLogprobs = Annotated[
    PromptLogprobs | None,
    Field(
        description="by token id, for each token of the prompt; null for the first; absent unless asked for",
        exclude_if=lambda entries: entries is None,
    ),
]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of all choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None,
        Field(description="absent for models without reasoning", exclude_if=lambda details: details is None),
    ] = None
