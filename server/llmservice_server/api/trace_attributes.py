"""What a trace says about a request, in the GenAI semantic conventions of OpenTelemetry. Never what was said."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from llmservice_server.api.embedding_request import EmbeddingRequest
from llmservice_server.api.request import GenerationRequest

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
}

_OF_FIGURES = {  # the access log's names
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "ttft_s": "gen_ai.response.time_to_first_chunk",
}


def describe(scope: MutableMapping[str, Any], request: GenerationRequest | EmbeddingRequest) -> None:
    """Tell the request's span, where it has one, what has been asked for."""
    if (span := scope.get("span")) is not None:
        span.update_name(f"{OPERATIONS[scope['path']]} {request.model}")
        span.set_attributes(of_request(request))


def of_request(request: GenerationRequest | EmbeddingRequest) -> dict[str, Any]:
    """Known once the body has been read."""
    attributes: dict[str, Any] = {"gen_ai.request.model": request.model}
    if isinstance(request, EmbeddingRequest):
        attributes["gen_ai.request.encoding_formats"] = [request.encoding_format]
        attributes["gen_ai.embeddings.dimension.count"] = request.dimensions
    else:
        attributes |= {
            "gen_ai.request.max_tokens": request.token_limit,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.choice.count": request.n,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.stream": request.stream,
        }
    return _given(attributes)


def of_answer(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Known at the end; `figures` are the access log's."""
    return _given({name: figures.get(figure) for figure, name in _OF_FIGURES.items()})


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
