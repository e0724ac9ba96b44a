"""`response_format` and `structured_outputs`: what an answer has to conform to."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llmservice_server.http.protocol.base import JsonObject, Part
from llmservice_server.sampling.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

MAX_OFFERED_CHOICES = 4096
MAX_GRAMMAR_LENGTH = 65536  # characters
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
            return lark_grammar(self.grammar)
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
