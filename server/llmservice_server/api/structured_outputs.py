"""`structured_outputs`, vLLM's wider sister of `response_format`: also a regular expression, a choice or a grammar."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llmservice_server.sampling.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

MAX_CHOICES_TO_OFFER = 4096
MAX_GRAMMAR_LENGTH = 65536  # characters

Rules = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES_TO_OFFER)]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of its fields."""

    json: dict[str, Any] | None = None  # a JSON schema
    json_object: bool = False
    regex: Rules | None = None  # in Rust's syntax, without looking around
    choice: Choices | None = None
    grammar: Rules | None = None  # in llguidance's dialect of Lark

    def __post_init__(self) -> None:
        if sum(getattr(self, name) not in (None, False) for name in self.__struct_fields__) != 1:
            raise ValueError(f"expected exactly one of {', '.join(self.__struct_fields__)}")

    @property
    def schema(self) -> dict[str, Any] | None:
        """Of JSON answers; None: they are of another kind."""
        return {"type": "object"} if self.json_object else self.json

    def as_grammar(self) -> str:
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return lark_grammar(self.grammar)
        return json_grammar(self.schema or {})
