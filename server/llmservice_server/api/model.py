"""What /v1/models says of a served name."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    id: str
    created: int  # seconds since 1970
    root: str  # the name that answers carry
    max_model_len: int | None  # None: still being loaded
    object: Literal["model"] = "model"
    owned_by: Literal["llmservice"] = "llmservice"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"
