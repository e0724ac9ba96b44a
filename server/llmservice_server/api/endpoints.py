"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmservice_server.api.body import read_body
from llmservice_server.api.chat_format import ChatFormat
from llmservice_server.api.chat_prompt import chat_prompt
from llmservice_server.api.completion_format import CompletionFormat
from llmservice_server.api.error import ApiError, JsonResponse
from llmservice_server.api.generation import ClientGoneError, Generation, Progress
from llmservice_server.api.long_input import all_token_ids
from llmservice_server.api.request import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    parse_chat,
    parse_completion,
)
from llmservice_server.api.response import DONE, Answer, Choice, Layout, event, usage
from llmservice_server.api.state import ServerState
from llmservice_server.api.structure import answer_grammar
from llmservice_server.api.terms import terms_of
from llmservice_server.api.trace_attributes import describe
from llmservice_server.text.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_CLIENT_GONE = 499  # nginx's status for it; nobody receives it, but the access log shows it

_Parsed = TypeVar("_Parsed", bound=GenerationRequest)


async def completions(request: Request) -> Response:
    arrival_s = time.monotonic()
    parsed, prompts, grammar = await _accept(request, parse_completion, _completion_prompts)
    generation = _generation(request, parsed, prompts, arrival_s, _DEFAULT_COMPLETION_TOKENS, grammar)
    return await _respond(request, parsed, generation, CompletionFormat(parsed, _tokenizer(request)))


async def chat_completions(request: Request) -> Response:
    arrival_s = time.monotonic()
    parsed, prompts, grammar = await _accept(request, parse_chat, _chat_prompts)
    generation = _generation(request, parsed, prompts, arrival_s, None, grammar)
    return await _respond(request, parsed, generation, ChatFormat(parsed, _tokenizer(request)))


async def _accept(
    request: Request, parse: Callable[[bytes], _Parsed], tokenize: Callable[[_Parsed, Tokenizer, int], list[list[int]]]
) -> tuple[_Parsed, list[list[int]], str | None]:
    """The request, its prompts and its answers' grammar.

    What can be refused is refused before work is done for it. Raises ApiError.
    """
    state: ServerState = request.app.state.server
    state.require_some_room()
    body = await read_body(request)
    parsed = await state.long_input.run(len(body), parse, body)
    state.require_model(parsed.model)
    ready, tokenizer = state.require_ready()
    grammar = await asyncio.to_thread(answer_grammar, parsed, tokenizer) if parsed.is_structured else None
    prompts = await state.long_input.run(len(body), tokenize, parsed, tokenizer, ready.max_request_tokens)
    return parsed, prompts, grammar


def _completion_prompts(parsed: CompletionRequest, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    return all_token_ids(parsed.prompts, tokenizer, max_tokens, "prompt")


def _chat_prompts(parsed: ChatRequest, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    tools = parsed.tools if parsed.callable_tools else ()
    return [chat_prompt(parsed, parsed.messages, tools, tokenizer, max_tokens)]


def _generation(
    request: Request,
    parsed: GenerationRequest,
    prompts: Many[list[int]],
    arrival_s: float,
    default_max_tokens: int | None,
    grammar: str | None,
) -> Generation:
    describe(request.scope, parsed)
    state: ServerState = request.app.state.server
    terms = terms_of(
        request.headers,
        parsed.priority or None,
        default_lane=request.scope.get("key_lane") or state.config.default_lane,
        timeout_s=state.config.request_timeout_s,
        queue_timeout_s=state.config.queue_timeout_s,
    )
    return Generation(
        state,
        parsed,
        prompts,
        arrival_s=arrival_s,
        default_max_tokens=default_max_tokens,
        terms=terms,
        grammar=grammar,
        log=request.scope["access_log"],
    )


def _tokenizer(request: Request) -> Tokenizer:
    state: ServerState = request.app.state.server
    _, tokenizer = state.require_ready()
    return tokenizer


async def _respond(request: Request, parsed: GenerationRequest, generation: Generation, layout: Layout) -> Response:
    state: ServerState = request.app.state.server
    model = state.config.served_model_names[0]
    identity = f"{layout.id_prefix}-{generation.request_id}"
    answer = Answer(id=identity, object=layout.whole, created=int(time.time()), model=model, choices=[])
    if parsed.stream:
        return EventStream(generation, answer, layout, parsed.stream_options or StreamOptions())
    texts: list[list[str]] = [[] for _ in generation.sequences]
    try:
        async with generation:
            await generation.start(request.receive)
            async for steps in generation.progress():
                for step in steps:
                    texts[step.sequence.index].append(step.text)
    except ClientGoneError:
        return Response(status_code=_CLIENT_GONE)
    answer.choices = [
        layout.choice(Progress(sequence, "".join(text), sequence.finish_reason))
        for sequence, text in zip(generation.sequences, texts, strict=True)
    ]
    answer.usage = usage(generation.sequences)
    return JsonResponse(answer)


class EventStream(Response):
    """Server-sent events, one write for everything that a step did.

    The status is sent with the first token, so that what goes wrong before it gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, layout: Layout, options: StreamOptions) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._layout = layout
        self._options = options
        self._answer = answer
        answer.object = layout.chunk
        if options.include_usage:
            answer.usage = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._generation:
                await self._generation.start(receive)
                async for steps in self._generation.progress():
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await self._write(send, self._opening())
                    await self._write(send, self._events(steps))
        except ClientGoneError:
            return
        except ApiError as error:
            if not started:
                raise
            await self._write(send, event(error.body), more=False)
            return
        await self._write(send, self._closing(), more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _opening(self) -> bytes:
        return b"".join(self._event(self._layout.opening(sequence.index)) for sequence in self._generation.sequences)

    def _events(self, steps: Many[Progress]) -> bytes:
        events = []
        for step in steps:
            if step.text or step.finish_reason is not None:
                events += [self._event([part]) for part in self._layout.delta(step)]
        return b"".join(events)

    def _closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        self._answer.choices = []
        self._answer.usage = usage(self._generation.sequences)
        return event(self._answer) + DONE

    def _event(self, choices: Many[Choice]) -> bytes:
        if not choices:
            return b""
        self._answer.choices = choices
        if self._options.continuous_usage_stats:
            self._answer.usage = usage(self._generation.sequences)
        return event(self._answer)
