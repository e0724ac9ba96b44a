"""/v1/rerank and /v1/score: the bodies and the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import Body, Part, TokenCount
from llmservice_server.http.protocol.embeddings import EmbeddingUsage

MAX_PAIRS = 2048  # of one request

Texts = Annotated[str | Annotated[list[str], Field(fail_fast=True)], Field(description="one text, or several")]


class Document(Part):
    text: str


class PairsRequest(Body):
    """What both bodies have in common."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "priority": (0,),
        "truncate_prompt_tokens": (),
        "truncation_direction": ("right", "Right"),
    }

    raw_scores: Annotated[bool, Field(description="the model's logit instead of its sigmoid")] = False
    truncate: Annotated[bool, Field(description="cut the longer text of a pair that is too long")] = False
    user: Annotated[str | None, Field(description="ignored")] = None


class RerankRequest(PairsRequest):
    """Jina's and Cohere's format with `documents`, TEI's with `texts`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "llama", "query": "a question", "documents": ["one", "another"]}]}
    )

    model: Annotated[str | None, Field(description="may be left out beside texts")] = None
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)] | None = None
    top_n: TokenCount | None = None
    return_documents: bool = True
    texts: Annotated[list[str], Field(fail_fast=True, description="TEI's format: the answer is a list")] | None = None
    return_text: bool = False

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise invalid("give either documents (Jina's format) or texts (TEI's)", param="documents")
        if self.documents is not None and self.model is None:
            raise invalid("you must provide model", param="model", code="missing_required_parameter")
        if not 1 <= len(self.contents) <= MAX_PAIRS:
            param = "documents" if self.texts is None else "texts"
            raise invalid(f"{param} holds {len(self.contents)} texts, expected 1 to {MAX_PAIRS}", param=param)
        return self

    @property
    def contents(self) -> list[str]:
        """The texts that are ranked."""
        given: Sequence[str | Document] = self.texts if self.texts is not None else self.documents or ()
        return [each if isinstance(each, str) else each.text for each in given]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, content) for content in self.contents]


class ScoreRequest(PairsRequest):
    """vLLM's format: one text against several, or as many against as many, under either pair of names."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "llama", "text_1": "a question", "text_2": ["one", "another"]}]}
    )

    model: str
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        names, others = ("text_1", "text_2"), ("queries", "documents")
        given = [name for name in (*names, *others) if getattr(self, name) is not None]
        if given not in ([*names], [*others]):
            raise invalid("give either text_1 and text_2, or queries and documents", param=given[0] if given else None)
        first, second = self._sides
        if not first or not second or len(first) not in (1, len(second)) or len(second) > MAX_PAIRS:
            raise invalid(
                f"{given[0]} holds {len(first)} texts and {given[1]} {len(second)}, expected one against up to "
                f"{MAX_PAIRS}, or as many against as many",
                param=given[0],
            )
        return self

    @property
    def _sides(self) -> tuple[list[str], list[str]]:
        sides = (self.text_1, self.text_2) if self.text_1 is not None else (self.queries, self.documents)
        first, second = ([side] if isinstance(side, str) else side or [] for side in sides)
        return first, second

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = self._sides
        return list(zip(first if len(first) > 1 else first * len(second), second, strict=True))


class RankedDocument(BaseModel):
    text: str


class Ranked(BaseModel):
    index: Annotated[int, Field(description="of the document in the request")]
    relevance_score: float
    document: Annotated[RankedDocument | None, Field(exclude_if=lambda document: document is None)] = None


class RerankAnswer(BaseModel):
    """The best first."""

    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class RankedText(BaseModel):
    """TEI's; the best first."""

    index: int
    score: float
    text: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None


class Score(BaseModel):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(BaseModel):
    """In the order of the pairs."""

    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
