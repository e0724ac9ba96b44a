"""/v1/embeddings: the body and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import MAX_INT, Body
from llmservice_server.http.protocol.completions import Prompt, one_or_several

MAX_INPUTS = 2048  # of one request, as with OpenAI


class EmbeddingRequest(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "llama", "input": ["one text", "another"]}]})
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "normalize": (True,),
        "priority": (0,),
    }

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1, le=MAX_INT, description="only the last tokens count; -1: as many as there is room")]
        | None
    ) = None
    user: Annotated[str | None, Field(description="ignored")] = None

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.input == []:
            raise invalid("input is an empty list: expected text or token ids", param="input")
        if len(self.inputs) > MAX_INPUTS:
            raise invalid(f"{len(self.inputs)} inputs are too many: at most {MAX_INPUTS} a request", param="input")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """Raises ApiError where the list mixes texts and token ids."""
        return one_or_several(self.input, "input")


class Embedding(BaseModel):
    index: int
    embedding: Annotated[list[float] | str, Field(description="text: little-endian float32 in base64")]
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
