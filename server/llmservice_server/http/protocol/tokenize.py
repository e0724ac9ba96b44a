"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import Body, JsonObject, TokenId
from llmservice_server.http.protocol.chat import Messages, RequestedEffort, Tools


class TokenizeRequest(Body):
    """Either `prompt` or `messages`, the latter as a chat has them; without `model` the served one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello"}]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject = {}
    reasoning_effort: RequestedEffort = None
    add_special_tokens: Annotated[
        bool | None, Field(description="of a prompt (default: true); a template writes its own")
    ] = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise invalid(
                "add_special_tokens applies to a prompt: a chat template writes its own", "add_special_tokens"
            )
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str
