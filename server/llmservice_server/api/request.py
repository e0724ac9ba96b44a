"""The bodies of the two generating endpoints: what is understood, what is refused, and in which words.

Nothing is ignored silently: a parameter that is known but not supported yet is refused unless it has the value that
means nothing, and so is one that nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from llmservice_server.api.error import ApiError, invalid
from llmservice_server.api.message import Message
from llmservice_server.api.response_format import ResponseFormat
from llmservice_server.api.structured_outputs import StructuredOutputs
from llmservice_server.api.tools import MAX_TOOLS, Tool, ToolChoice, callable_tools
from llmservice_server.text.tool_format import ToolSchema

MAX_CHOICES = 16  # n
MAX_SEQUENCES = 128  # prompts × n of one request
MAX_BIASES = 1024
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 256  # characters, so that holding text back for them stays cheap

MAX_INT = 2**31 - 1  # of every number that goes to the engine: no model counts further, and no message holds more

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_INT)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogprobsCount = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the tokens so far in every event


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] = 0  # 0 and, as in vLLM, -1: off
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: TokenCount | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] = {}
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] = []
    include_stop_str_in_output: bool = False  # the stop string; a stop token has no text
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "batch", 0] = 0  # the lane; 0, vLLM's default, asks for none
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # shares cached prefixes with its like
    # What OpenAI's clients note of a request for others to read or to find it by; none has an effect on the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it may be anything."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.schema

    @property
    def is_structured(self) -> bool:
        """Whether the answer is held to a grammar."""
        return self.structured_outputs is not None or self.schema is not None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None: not even its own probability."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likewise for the prompt."""
        return None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None  # 0: the echo alone: how likely is the prompt?
    echo: bool = False
    logprobs: LogprobsCount | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several; ids stand directly in the list or in lists of their own. Raises ApiError on a mixture."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [part for part in given if isinstance(part, int)]
        if ids and len(ids) < len(given):
            raise invalid("prompt mixes token ids with texts or lists: expected one kind", param="prompt")
        return [ids] if ids else [part for part in given if not isinstance(part, int)]


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobsCount = 0
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None  # this and the next two as chat_prompt.py says
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def callable_tools(self) -> list[ToolSchema]:
        """What the model may call. Raises ApiError where tools and choice contradict each other."""
        return callable_tools(self.tools, self.tool_choice)

    @property
    def is_structured(self) -> bool:
        return super().is_structured or bool(self.callable_tools)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


# Known to OpenAI or vLLM and not supported yet, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "truncate_prompt_tokens": (),
}
_UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}
_UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_INSTEAD = {  # of what vLLM had, and has no more
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}

_EXPECTED = {
    "encoding_format": "float or base64",
    "messages.content.type": "text (other content is not supported yet)",
    "messages.role": "system, developer, user, assistant or tool",
    "messages.tool_calls.type": "function",
    "response_format.type": "text, json_object or json_schema",
    "tool_choice": "none, auto, required or a function",
    "tool_choice.type": "function",
    "tools.type": "function",
}

_R = TypeVar("_R", bound=GenerationRequest)
_S = TypeVar("_S", bound=msgspec.Struct)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError (400) that names the parameter."""
    request = _parse(body, CompletionRequest, _UNSUPPORTED | _UNSUPPORTED_COMPLETION)
    prompts = request.prompts
    if not prompts:
        raise invalid("prompt is an empty list: expected text or token ids", param="prompt")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens is 0, expected at least 1, or echo beside it", param="max_tokens")
    if len(prompts) * request.n > MAX_SEQUENCES:
        raise invalid(f"{len(prompts)} prompts with n {request.n} are too many: at most {MAX_SEQUENCES}", param="n")
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError (400) that names the parameter."""
    request = _parse(body, ChatRequest, _UNSUPPORTED | _UNSUPPORTED_CHAT)
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.token_limit:
        raise invalid(
            "max_tokens and max_completion_tokens contradict each other: give one of them",
            param="max_completion_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    _ = request.callable_tools  # raises
    return request


def _parse(body: bytes, kind: type[_R], unsupported: Mapping[str, tuple[Any, ...]]) -> _R:
    request = parse_fields(body, kind, unsupported)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed when stream is true", param="stream_options")
    if None not in (request.structured_outputs, request.response_format):
        raise invalid("give either response_format or structured_outputs, not both", param="structured_outputs")
    if request.token_limit is not None and request.min_tokens > request.token_limit:
        raise invalid(f"min_tokens {request.min_tokens} is above max_tokens {request.token_limit}", param="min_tokens")
    return request


def parse_fields(body: bytes, kind: type[_S], unsupported: Mapping[str, tuple[Any, ...]]) -> _S:
    """The body as a `kind`. `unsupported`: known fields that are refused unless they have one of these values.

    Raises ApiError (400) that names the field.
    """
    content = _decode(body)
    known = _field_names(kind)
    for name in content.keys() - known:
        if name in _INSTEAD:
            raise invalid(f"{name} is not supported: use {_INSTEAD[name]}", name, code="unsupported_parameter")
        if name not in unsupported:
            raise invalid(f"Unrecognized request argument supplied: {name}", param=name)
        if not any(_same(content[name], neutral) for neutral in unsupported[name]):
            raise invalid(f"{name} is not supported yet: leave it out", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert({name: content[name] for name in content.keys() & known}, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(error) from error


@cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind))


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and a number only to a number: False is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _decode(body: bytes) -> dict[str, Any]:
    """The body's fields; a null stands for an absent field, as OpenAI's own clients send it."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise invalid("the body must be a JSON object")
    if isinstance(messages := content.get("messages"), list):
        content["messages"] = [
            _without_nulls(message) if isinstance(message, dict) else message for message in messages
        ]
    return _without_nulls(content)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _explain(error: msgspec.ValidationError) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`", or names the missing field of the whole object."""
    reason, _, path = str(error).replace("`key` in ", "").partition(" - at `$")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        field = f"{path.rstrip('`')}.{missing[1]}".lstrip(".")
        return invalid(f"you must provide {field}", param=field, code="missing_required_parameter")
    field = path.rstrip("`").lstrip(".")
    if reason.startswith("Invalid enum value") and (expected := _EXPECTED.get(re.sub(r"\[[^]]*\]", "", field))):
        reason += f", expected {expected}"
    if unknown := re.fullmatch(r"Object contains unknown field `(\w+)`", reason):
        reason = f"{unknown[1]} is not supported: leave it out"
    return invalid(f"{field}: {reason}", param=re.split(r"[.\[]", field)[0] or None)
