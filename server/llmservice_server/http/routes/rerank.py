"""POST /v1/rerank, /v2/rerank, /rerank and /v1/score: a cross-encoder's scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from llmservice_server.http.body import num_body_bytes, run
from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.embeddings import EmbeddingUsage
from llmservice_server.http.protocol.models import REFUSALS, error_responses
from llmservice_server.http.protocol.rerank import (
    Ranked,
    RankedDocument,
    RankedText,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)
from llmservice_server.http.routes.embeddings import EmbeddingRoute, embed
from llmservice_server.http.state import ServerState, Serving, ServingDep, StateDep
from llmservice_server.http.tracing import describe
from llmservice_server.text.tokenizer import EncodedPair

_RESPONSES = error_responses(*REFUSALS, 500, 504)


class PairsRoute(EmbeddingRoute):
    task = "score"


router = APIRouter(route_class=PairsRoute)


@router.post("/v1/rerank", response_model=RerankAnswer | list[RankedText], responses=_RESPONSES, summary="Rank texts")
@router.post("/v2/rerank", response_model=RerankAnswer | list[RankedText], responses=_RESPONSES, summary="Rank texts")
@router.post("/rerank", response_model=RerankAnswer | list[RankedText], responses=_RESPONSES, summary="Rank texts")
async def rerank(body: RerankRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    """With `documents` in Jina's format, with `texts` in TEI's."""
    if body.model is not None:
        state.require_base_model(body.model)
    scores, usage = await _scores(body, request, state, serving)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    contents = body.contents
    if body.texts is not None:
        return [
            RankedText(index=index, score=scores[index], text=contents[index] if body.return_text else None)
            for index in best
        ]
    results = [
        Ranked(
            index=index,
            relevance_score=scores[index],
            document=RankedDocument(text=contents[index]) if body.return_documents else None,
        )
        for index in best
    ]
    return RerankAnswer(model=state.config.served_model_names[0], results=results, usage=usage)


@router.post("/v1/score", response_model=ScoreList, responses=_RESPONSES, summary="Score pairs of texts")
async def score(body: ScoreRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    state.require_base_model(body.model)
    scores, usage = await _scores(body, request, state, serving)
    data = [Score(index=index, score=each) for index, each in enumerate(scores)]
    return ScoreList(model=state.config.served_model_names[0], data=data, usage=usage)


async def _scores(
    body: RerankRequest | ScoreRequest, request: Request, state: ServerState, serving: Serving
) -> tuple[list[float], EmbeddingUsage]:
    """Of each pair, and the tokens of all. Raises ApiError and ClientDisconnect."""
    ready, tokenizer = serving
    pairs, longest = body.pairs, ready.max_embedding_tokens
    num_tokens = longest if body.truncate else None
    encoded = await run(num_body_bytes(request), tokenizer.encode_pairs, pairs, num_tokens=num_tokens)
    describe(request.scope, body)
    _check_lengths(encoded, longest)
    inputs = [each.token_ids for each in encoded]
    vectors = await embed(state, inputs, request, [each.type_ids for each in encoded])
    usage = EmbeddingUsage(prompt_tokens=sum(map(len, inputs)), total_tokens=sum(map(len, inputs)))
    logits = np.frombuffer(b"".join(vectors), "<f4").astype(np.float64)
    scores = logits if body.raw_scores else 0.5 * (1 + np.tanh(0.5 * logits))  # the sigmoid, which never overflows so
    return scores.tolist(), usage


def _check_lengths(encoded: Sequence[EncodedPair], longest: int) -> None:
    too_long = [index for index, each in enumerate(encoded) if len(each.token_ids) > longest]
    if too_long:
        index = too_long[0]
        raise invalid(
            f"pair {index} has {len(encoded[index].token_ids)} tokens with the special ones, expected at most "
            f"{longest} ({len(too_long)} of {len(encoded)} pairs are too long): shorten its texts, or set truncate",
            code="context_length_exceeded",
        )
