"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence as Many
from typing import Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from llmservice_server.api.body import read_body
from llmservice_server.api.embedding_request import EmbeddingRequest, parse_embedding
from llmservice_server.api.error import ENGINE_DEAD, ENGINE_ERROR, ApiError, JsonResponse, invalid
from llmservice_server.api.generation import Receive
from llmservice_server.api.long_input import all_token_ids
from llmservice_server.api.state import ServerState
from llmservice_server.api.trace_attributes import describe
from llmservice_server.engine_client import EngineDeadError
from llmservice_server.messages import Embedded, Ready
from llmservice_server.text.tokenizer import Tokenizer

_CLIENT_GONE = 499  # nginx's status for it; nobody receives it, but the access log shows it


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str  # text: little-endian float32 in base64
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


async def embeddings(request: Request) -> Response:
    arrival_s = time.monotonic()
    state: ServerState = request.app.state.server
    state.require_embedding_room(1)
    body = await read_body(request)
    parsed = await state.long_input.run(len(body), parse_embedding, body)
    state.require_model(parsed.model)
    ready, tokenizer = state.require_ready()
    longest = ready.max_embedding_tokens
    inputs = await state.long_input.run(len(body), all_token_ids, parsed.inputs, tokenizer, longest, "input")
    describe(request.scope, parsed)
    _check(parsed, inputs, ready, tokenizer)
    state.require_embedding_room(len(inputs))
    answer = await _embed(state, inputs, request.receive)
    if answer is None:
        return Response(status_code=_CLIENT_GONE)
    num_tokens = sum(map(len, inputs))
    state.metrics.observe_embedding(len(inputs), num_tokens, time.monotonic() - arrival_s)
    request.scope["access_log"] |= {"inputs": len(inputs), "prompt_tokens": num_tokens}
    data = [
        Embedding(index, _encode(vector, parsed.dimensions, parsed.encoding_format))
        for index, vector in enumerate(answer.vectors)
    ]
    return JsonResponse(EmbeddingList(state.config.served_model_names[0], data, EmbeddingUsage(num_tokens, num_tokens)))


def _check(parsed: EmbeddingRequest, inputs: Many[list[int]], ready: Ready, tokenizer: Tokenizer) -> None:
    """Raises ApiError (400) for what the engine would refuse, in the words of the API."""
    if not all(inputs):
        raise invalid("an input is empty: expected at least one token", param="input")
    if (longest := max(map(len, inputs))) > ready.max_embedding_tokens:
        raise invalid(
            f"an input has {longest} tokens, expected at most {ready.max_embedding_tokens}, which is the smaller of "
            "--max-model-len and --max-num-batched-tokens: shorten it",
            param="input",
            code="context_length_exceeded",
        )
    if (largest := max(map(max, inputs))) >= tokenizer.vocab_size:
        raise invalid(f"token id {largest} is outside the vocabulary of {tokenizer.vocab_size}", param="input")
    if parsed.dimensions is not None and parsed.dimensions > ready.embedding_size:
        raise invalid(
            f"dimensions is {parsed.dimensions}, expected 1 to {ready.embedding_size}, the size of this model's "
            "embeddings",
            param="dimensions",
        )


async def _embed(state: ServerState, inputs: list[list[int]], receive: Receive) -> Embedded | None:
    """The engine's answer; None where the client has left. Raises ApiError."""
    answer = asyncio.ensure_future(state.engine.embed(inputs))
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([answer, gone], timeout=state.config.request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            if gone.done():
                return None
            raise ApiError(504, "the request's deadline passed while it waited", code=ENGINE_ERROR)
        embedded = answer.result()
    except EngineDeadError as error:
        raise ApiError(503, str(error), code=ENGINE_DEAD) from error
    finally:
        answer.cancel()
        gone.cancel()
    if embedded.error is not None:
        raise ApiError(embedded.error_status, embedded.error, code=ENGINE_ERROR)
    return embedded


async def _disconnect(receive: Receive) -> None:
    """Returns when the client hangs up: after the body, its next message can only say that."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode(vector: bytes, dimensions: int | None, encoding: str) -> list[float] | str:
    """The first `dimensions` numbers, of length 1 again: Matryoshka models are trained for it (arXiv 2205.13147)."""
    if dimensions is not None:
        shortened = np.frombuffer(vector, "<f4")[:dimensions]
        vector = (shortened / max(float(np.linalg.norm(shortened)), 1e-12)).astype("<f4").tobytes()
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers
