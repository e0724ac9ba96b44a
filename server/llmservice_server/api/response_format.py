"""`response_format`: free text, any JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`name` and `description` are labels of OpenAI's; every schema is kept to, so `strict` changes nothing."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the answer must be; None: anything."""
        if self.json_schema is not None:
            return self.json_schema.schema
        return {"type": "object"} if self.type == "json_object" else None
