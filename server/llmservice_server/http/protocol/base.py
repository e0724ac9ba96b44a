"""What all bodies have in common: strict types, nulls as absent fields, and fields that a model does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmservice_server.engine.request import MAX_LOGPROBS
from llmservice_server.http.error import invalid

MAX_INT = 2**31 - 1  # of every number that is sent to the engine
MAX_INT64 = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_INT)]
LogprobsCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for numbers that other JSON parsers do not read. The parser has bounded the depth."""
    pending: list[Any] = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, int) and not -MAX_INT64 - 1 <= part <= MAX_INT64:
            raise ValueError("holds an integer of more than 64 bits")
        elif isinstance(part, float) and abs(part) == float("inf"):
            raise ValueError("holds a number of more than 64 bits")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]


class Part(BaseModel):
    """An object within a body. Fields that it does not know are kept apart in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Body(Part):
    """A request's body. A null stands for an absent field, as OpenAI's own clients send it."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known parameters that are not supported, each with the values that change nothing and are therefore accepted."""
    instead: ClassVar[Mapping[str, str]] = {  # parameters that vLLM has removed
        "guided_choice": "structured_outputs.choice",
        "guided_grammar": "structured_outputs.grammar",
        "guided_json": "structured_outputs.json",
        "guided_regex": "structured_outputs.regex",
    }
    """What replaces other parameters that are not supported."""

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, content: Any) -> Any:
        """Drop nulls and parameters without effect. Raises ApiError for parameters that are not supported."""
        if not isinstance(content, dict):
            return content
        given = without_nulls(content)
        for name in given.keys() & cls.instead.keys():
            raise invalid(f"{name} is not supported: use {cls.instead[name]}", name, code="unsupported_parameter")
        for name in given.keys() & cls.refused.keys():
            if not any(_same(given[name], neutral) for neutral in cls.refused[name]):
                raise invalid(f"{name} is not supported yet: leave it out", name, code="unsupported_parameter")
            del given[name]
        return given


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and a number only to a number: False is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def unknown_fields(part: Part, path: str = "") -> Iterator[str]:
    """Names of fields that the models do not know, as `messages.nickname`."""
    for name in part.model_extra or ():
        yield path + name
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for item in value:
                if not isinstance(item, Part):
                    break  # lists of objects hold nothing else
                yield from unknown_fields(item, f"{path}{name}.")
