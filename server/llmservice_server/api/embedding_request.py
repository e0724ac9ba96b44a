"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llmservice_server.api.error import invalid
from llmservice_server.api.request import MAX_INT, TokenId, parse_fields

MAX_INPUTS = 2048  # of one request, as with OpenAI


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    model: str
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    user: str | None = None  # OpenAI's name for the end user: free text, of no effect on the answer

    @property
    def inputs(self) -> list[str | list[int]]:
        """One or several; ids stand directly in the list or in lists of their own. Raises ApiError on a mixture."""
        given = [self.input] if isinstance(self.input, str) else self.input
        ids = [part for part in given if isinstance(part, int)]
        if ids and len(ids) < len(given):
            raise invalid("input mixes token ids with texts or lists: expected one kind", param="input")
        return [ids] if ids else [part for part in given if not isinstance(part, int)]


# Known to vLLM and not supported, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "normalize": (True,),
    "priority": (0,),
    "truncate_prompt_tokens": (),
}


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Raises ApiError (400) that names the parameter."""
    request = parse_fields(body, EmbeddingRequest, _UNSUPPORTED)
    if len(request.inputs) > MAX_INPUTS:
        raise invalid(f"{len(request.inputs)} inputs are too many: at most {MAX_INPUTS} a request", param="input")
    return request
