"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmservice_server.http.authentication import client_name
from llmservice_server.http.body import BodyRoute, num_body_bytes, run
from llmservice_server.http.error import ENGINE_DEAD, ENGINE_ERROR, ApiError, invalid
from llmservice_server.http.generation import disconnected
from llmservice_server.http.prompts import require_known, token_ids, truncated
from llmservice_server.http.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from llmservice_server.http.protocol.models import REFUSALS, error_responses
from llmservice_server.http.state import ServerState, Serving, ServingDep, StateDep
from llmservice_server.http.tracing import describe
from llmservice_server.ipc.client import EngineDeadError
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import Ready, Task


class EmbeddingRoute(BodyRoute):
    many_texts = True
    task: ClassVar[Task] = "embed"

    def admit(self, request: Request, state: ServerState, serving: Serving) -> None:
        state.require_task(serving, self.task)
        state.require_embedding_room(1, client_name(request))


router = APIRouter(route_class=EmbeddingRoute)

_NO_DATA = b'"data":[]'


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=error_responses(*REFUSALS, 500, 504),
    summary="Embed texts",
)
async def embeddings(body: EmbeddingRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    state.require_base_model(body.model)
    ready, tokenizer = serving
    inputs = await run(num_body_bytes(request), _inputs, body, ready, tokenizer)
    describe(request.scope, body)
    _check(body, inputs, ready, tokenizer)
    vectors = await embed(state, inputs, request)
    num_tokens = sum(map(len, inputs))
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return await written(EmbeddingList(model=state.config.served_model_names[0], data=[], usage=usage), vectors, body)


async def written(answer: EmbeddingList, vectors: Sequence[bytes], body: EmbeddingRequest) -> Response:
    """`answer` as JSON with `vectors` for its data. Other requests' tokens wait for one vector, not for all."""
    before, after = answer.model_dump_json().encode().split(_NO_DATA)
    pieces = [before, b'"data":[']
    for index, vector in enumerate(vectors):
        embedding = _encode(vector, body.dimensions, body.encoding_format)
        item = Embedding.model_construct(index=index, embedding=embedding)  # without validating every number
        pieces += [b"," if index else b"", item.model_dump_json().encode()]
        await asyncio.sleep(0)
    pieces += [b"]", after]
    # in a thread where it is long, in which joining does not hold the GIL
    return Response(await run(sum(map(len, pieces)), b"".join, pieces), media_type="application/json")


def _inputs(body: EmbeddingRequest, ready: Ready, tokenizer: Tokenizer) -> list[list[int]]:
    """A decoder's inputs are cut at their start, an encoder's at their end, where its tokenizer cuts them."""
    kept, longest = body.truncate_prompt_tokens, ready.max_embedding_tokens
    if kept is None:
        return token_ids(body.inputs, tokenizer, longest, "input")
    if ready.is_decoder:
        return truncated(token_ids(body.inputs, tokenizer, None, "input"), kept, longest)
    kept = longest if kept == -1 else kept
    texts = [given for given in body.inputs if isinstance(given, str)]
    encoded = tokenizer.encode_truncated(texts, kept)
    if (fewest := max(map(len, encoded), default=0)) > kept:  # nothing of the text is left between special tokens
        raise invalid(
            f"truncate_prompt_tokens is {kept}, expected more than the {fewest} tokens around every text",
            param="truncate_prompt_tokens",
        )
    cut = iter(encoded)
    return [next(cut) if isinstance(given, str) else given[:kept] for given in body.inputs]


def _check(body: EmbeddingRequest, inputs: Sequence[list[int]], ready: Ready, tokenizer: Tokenizer) -> None:
    """Raises ApiError (400) for what the engine would refuse, in the words of the API."""
    if not all(inputs):
        raise invalid("an input is empty: expected at least one token", param="input")
    if (longest := max(map(len, inputs))) > ready.max_embedding_tokens:
        raise invalid(
            f"an input has {longest} tokens, expected at most {ready.max_embedding_tokens}, which is {_bound(ready)}: "
            "shorten it",
            param="input",
            code="context_length_exceeded",
        )
    require_known(map(max, inputs), tokenizer, "input")
    if body.dimensions is not None and body.dimensions > ready.embedding_size:
        raise invalid(
            f"dimensions is {body.dimensions}, expected 1 to {ready.embedding_size}, the size of this model's "
            "embeddings",
            param="dimensions",
        )


def _bound(ready: Ready) -> str:
    if ready.is_decoder:
        return "the least of --max-model-len, --max-num-batched-tokens and max_seq_length in sentence_bert_config.json"
    return "the model's context, or --max-model-len"


async def embed(
    state: ServerState, inputs: list[list[int]], request: Request, type_ids: Sequence[list[int]] = ()
) -> list[bytes]:
    """The vector of each input, or of each pair with its `type_ids`. Raises ApiError and ClientDisconnect."""
    client = client_name(request)
    state.require_embedding_room(len(inputs), client)
    answer = state.engine.embed(inputs, type_ids, client)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        either: list[asyncio.Future[Any]] = [answer, gone]
        await asyncio.wait(either, timeout=state.config.request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            if gone.done():
                raise ClientDisconnect
            raise ApiError(504, "the request's deadline passed while it waited", code=ENGINE_ERROR)
        embedded = answer.result()
    except EngineDeadError as error:
        raise ApiError(503, str(error), code=ENGINE_DEAD) from error
    finally:
        answer.cancel()
        gone.cancel()
    if embedded.error is not None:
        raise ApiError(embedded.error_status, embedded.error, code=ENGINE_ERROR)
    num_tokens = sum(map(len, inputs))
    state.metrics.observe_embedding(len(inputs), num_tokens, time.monotonic() - request.scope["arrival_s"])
    request.scope["access_log"] |= {"inputs": len(inputs), "prompt_tokens": num_tokens}
    return embedded.vectors


def _encode(vector: bytes, dimensions: int | None, encoding: str) -> list[float] | str:
    """The first `dimensions` numbers, of length 1 again: Matryoshka models are trained for it (arXiv 2205.13147)."""
    if dimensions is not None:
        shortened = np.frombuffer(vector, "<f4")[:dimensions]
        vector = (shortened / max(float(np.linalg.norm(shortened)), 1e-12)).astype("<f4").tobytes()
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers
