"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from llmservice_server.api.body import read_body
from llmservice_server.api.chat_prompt import chat_prompt
from llmservice_server.api.error import JsonResponse, invalid
from llmservice_server.api.long_input import all_token_ids
from llmservice_server.api.message import Message
from llmservice_server.api.request import TokenId, parse_fields
from llmservice_server.api.state import ServerState
from llmservice_server.api.tools import MAX_TOOLS, Tool
from llmservice_server.text.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`, the latter as a chat has them; without `model` the served one."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None  # None: True for a prompt; a template writes its own
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read_body(request)
    parsed = await state.long_input.run(len(body), parse_fields, body, TokenizeRequest, {})
    if parsed.model is not None:
        state.require_model(parsed.model)
    ready, tokenizer = state.require_ready()
    ids = await state.long_input.run(len(body), _encode, parsed, tokenizer, ready.max_model_len)
    words = tokenizer.words(ids) if parsed.return_token_strs else None
    return JsonResponse(TokenizeResponse(len(ids), ready.max_model_len, ids, words))


async def detokenize(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read_body(request)
    parsed = await state.long_input.run(len(body), parse_fields, body, DetokenizeRequest, {})
    if parsed.model is not None:
        state.require_model(parsed.model)
    _, tokenizer = state.require_ready()
    if (largest := max(parsed.tokens, default=0)) >= tokenizer.vocab_size:
        raise invalid(f"token id {largest} is outside the vocabulary of {tokenizer.vocab_size}", param="tokens")
    text = await state.long_input.run(len(body), tokenizer.decode, parsed.tokens, skip_special_tokens=False)
    return JsonResponse(DetokenizeResponse(text))


def _encode(parsed: TokenizeRequest, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    if (parsed.prompt is None) == (parsed.messages is None):
        raise invalid("give either prompt or messages", param="prompt")
    if parsed.prompt is not None:
        add_special_tokens = parsed.add_special_tokens is not False
        return all_token_ids([parsed.prompt], tokenizer, max_tokens, "prompt", add_special_tokens=add_special_tokens)[0]
    if parsed.add_special_tokens:
        raise invalid("add_special_tokens applies to a prompt: a chat template writes its own", "add_special_tokens")
    return chat_prompt(parsed, parsed.messages or (), parsed.tools, tokenizer, max_tokens)
