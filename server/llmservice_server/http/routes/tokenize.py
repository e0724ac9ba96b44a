"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter, Request

from llmservice_server.http.body import BodyRoute, num_body_bytes, run
from llmservice_server.http.prompts import chat_token_ids, require_known, token_ids
from llmservice_server.http.protocol.models import REFUSALS, error_responses
from llmservice_server.http.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from llmservice_server.http.state import ServingDep, StateDep
from llmservice_server.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute, responses=error_responses(*REFUSALS))


@router.post("/tokenize", response_model=TokenizeResponse, summary="Text or a chat to token ids")
async def tokenize(body: TokenizeRequest, request: Request, state: StateDep, serving: ServingDep) -> TokenizeResponse:
    if body.model is not None:
        state.require_model(body.model)
    ready, tokenizer = serving
    ids = await run(num_body_bytes(request), _encode, body, tokenizer, ready.max_model_len)
    words = tokenizer.words(ids) if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=ready.max_model_len, tokens=ids, token_strs=words)


@router.post("/detokenize", response_model=DetokenizeResponse, summary="Token ids to text")
async def detokenize(
    body: DetokenizeRequest, request: Request, state: StateDep, serving: ServingDep
) -> DetokenizeResponse:
    if body.model is not None:
        state.require_model(body.model)
    tokenizer = serving.tokenizer
    require_known(body.tokens, tokenizer, "tokens")
    text = await run(num_body_bytes(request), tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)


def _encode(body: TokenizeRequest, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    if body.prompt is None:
        return chat_token_ids(body, body.tools, tokenizer, max_tokens)
    add_special_tokens = body.add_special_tokens is not False
    return token_ids([body.prompt], tokenizer, max_tokens, "prompt", add_special_tokens=add_special_tokens)[0]
