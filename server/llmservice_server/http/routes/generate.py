"""POST /v1/completions, /v1/chat/completions and /v1/responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from llmservice_server.http.arrivals import COUNTED_HEADER
from llmservice_server.http.authentication import Client, client_name
from llmservice_server.http.body import SLOTS_HEADER, BodyRoute, num_body_bytes, run
from llmservice_server.http.chat_format import ChatFormat
from llmservice_server.http.completion_format import CompletionFormat
from llmservice_server.http.error import ApiError
from llmservice_server.http.generation import apply_defaults, generate, output_processor, request_options
from llmservice_server.http.prompts import answer_grammar, chat_token_ids, prompt_hashes, token_ids, truncated
from llmservice_server.http.protocol.chat import ChatCompletion, ChatRequest
from llmservice_server.http.protocol.completions import Completion, CompletionRequest
from llmservice_server.http.protocol.generation import GenerationRequest, StreamOptions
from llmservice_server.http.protocol.models import REFUSALS, error_responses
from llmservice_server.http.protocol.responses import Response, ResponsesRequest, own_names
from llmservice_server.http.response import (
    DONE,
    USAGE_HEADER,
    Choice,
    Chunk,
    EventWriter,
    Layout,
    event,
    usage,
    usage_report,
)
from llmservice_server.http.responses_format import ResponsesFormat
from llmservice_server.http.state import ServerState, Serving, ServingDep, StateDep
from llmservice_server.http.tracing import describe
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer

_Body = TypeVar("_Body", bound=GenerationRequest)

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_BYTES_PER_LOGPROB = 64
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a part of the answer as JSON, or [DONE]"}},
    "required": ["data"],
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events", "content": {"text/event-stream": {"schema": _EVENT}}},
    **error_responses(*REFUSALS, 403, 500, 504),  # 403: the lane
}


class GenerationRoute(BodyRoute):
    def admit(self, request: Request, state: ServerState, serving: Serving) -> None:
        state.require_task(serving, "generate")
        client: Client | None = request.scope.get("client_key")
        lane = _default_lane(state, client)
        try:
            state.require_some_room(serving, lane, client_name(request))
        except ApiError:
            if COUNTED_HEADER not in request.headers:
                state.arrivals.arrived_unread(lane)
            raise


def _default_lane(state: ServerState, client: Client | None) -> str:
    """The API key's or the service's."""
    return (None if client is None else client.lane) or state.config.default_lane


router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/completions", response_model=Completion, responses=_RESPONSES, summary="Complete prompts")
async def completions(body: CompletionRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    processor = await _processor(request, state, serving, body, _completion_prompts, _DEFAULT_COMPLETION_TOKENS)
    return await _respond(request, state, serving, body, processor, CompletionFormat(body, processor))


@router.post(
    "/v1/chat/completions", response_model=ChatCompletion, responses=_RESPONSES, summary="Answer a conversation"
)
async def chat_completions(body: ChatRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    processor = await _processor(request, state, serving, body, _chat_prompts, None)
    return await _respond(request, state, serving, body, processor, ChatFormat(body, processor))


@router.post("/v1/responses", response_model=Response, responses=_RESPONSES, summary="Answer with items")
async def responses(body: ResponsesRequest, request: Request, state: StateDep, serving: ServingDep) -> Any:
    with own_names():
        processor = await _processor(request, state, serving, body.chat, _chat_prompts, None)
    written = ResponsesFormat(body, processor, int(time.time()), _served_name(state, processor))
    if body.stream:
        return EventStream(state, serving, processor, written)
    outputs = await _outputs(request, state, serving, processor)
    return await whole(_num_logprobs(processor, outputs), lambda: written.answer(outputs))


def _completion_prompts(body: CompletionRequest, tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
    return token_ids(body.prompts, tokenizer, max_tokens, "prompt")


def _chat_prompts(body: ChatRequest, tokenizer: Tokenizer, max_tokens: int | None) -> list[list[int]]:
    tools = body.tools if body.callable_tools else ()
    return [chat_token_ids(body, tools, tokenizer, max_tokens)]


async def _processor(
    request: Request,
    state: ServerState,
    serving: Serving,
    body: _Body,
    prompts_of: Callable[[_Body, Tokenizer, int | None], list[list[int]]],
    default_max_tokens: int | None,
) -> OutputProcessor:
    """Raises ApiError; what can be refused is refused before work is done for it."""
    adapter = state.require_model(body.model)
    apply_defaults(body, state.sampling_defaults)
    ready, tokenizer = serving
    longest = ready.max_request_tokens if body.truncate_prompt_tokens is None else None
    prompts = await run(num_body_bytes(request), prompts_of, body, tokenizer, longest)
    grammar = await asyncio.to_thread(answer_grammar, body, tokenizer, prompts[0]) if body.is_structured else None
    room = ready.max_request_tokens - (body.token_limit or default_max_tokens or 1)
    given, prompts = prompts, truncated(prompts, body.truncate_prompt_tokens, max(1, room))
    if isinstance(body, CompletionRequest) and body.truncate_prompt_tokens is not None:
        echoed: list[str | int | list[int]] = [
            kept if len(kept) < len(ids) else prompt
            for prompt, ids, kept in zip(body.prompts, given, prompts, strict=True)
        ]
        body.prompt = echoed
    hashes = await run(num_body_bytes(request), prompt_hashes, prompts, ready, body.cache_salt, adapter)
    describe(request.scope, body)
    client: Client | None = request.scope.get("client_key")
    options = request_options(
        request.headers,
        body.priority,
        arrival_s=request.scope["arrival_s"],
        default_lane=_default_lane(state, client),
        timeout_s=state.config.request_timeout_s,
        queue_timeout_s=state.config.queue_timeout_s,
    )
    processor = output_processor(
        state,
        serving,
        body,
        prompts,
        hashes,
        default_max_tokens=default_max_tokens,
        options=replace(options, adapter=adapter, client=client_name(request)),
        grammar=grammar,
    )
    if COUNTED_HEADER not in request.headers:
        state.arrivals.arrived(processor.requests)
    return processor


async def _respond(
    request: Request,
    state: ServerState,
    serving: Serving,
    body: GenerationRequest,
    processor: OutputProcessor,
    layout: Layout,
) -> HttpResponse:
    model = _served_name(state, processor)
    identity = f"{layout.id_prefix}-{processor.request_id}"
    created = int(time.time())
    if body.stream:
        chunk = Chunk(identity, layout.chunk, created, model)
        writer = ChunkWriter(processor, chunk, layout, body.stream_options or StreamOptions())
        return EventStream(state, serving, processor, writer)
    outputs = _chosen(await _outputs(request, state, serving, processor), body)
    num_logprobs = _num_logprobs(processor, outputs)
    return await whole(num_logprobs, lambda: layout.answer(identity, created, model, outputs))


def _num_logprobs(processor: OutputProcessor, outputs: Sequence[CompletionOutput]) -> int:
    entries = [entry for output in outputs for entry in output.logprobs]
    entries += [entry for state in processor.states for entry in state.prompt_logprobs]
    return sum(1 + len(entry.top) for entry in entries)


async def whole(num_logprobs: int, answer: Callable[[], BaseModel]) -> HttpResponse:
    """The answer as JSON. It is made and written in a thread where it has so many log-probabilities that it is long."""
    num_bytes = num_logprobs * _BYTES_PER_LOGPROB
    written = await run(num_bytes, lambda: answer().model_dump_json(by_alias=True))
    return HttpResponse(written, media_type="application/json")


def _served_name(state: ServerState, processor: OutputProcessor) -> str:
    return processor.requests[0].adapter or state.config.served_model_names[0]


async def _outputs(
    request: Request, state: ServerState, serving: Serving, processor: OutputProcessor
) -> list[CompletionOutput]:
    steps = generate(state, serving, processor, request.receive, request.scope["access_log"])
    async with aclosing(steps):
        return [output async for step in steps for output in step]


def _chosen(outputs: Sequence[CompletionOutput], body: GenerationRequest) -> list[CompletionOutput]:
    """All answers in order, or with `best_of` the `n` of each prompt whose tokens are the likeliest on average."""
    answers = sorted(outputs, key=lambda output: output.index)
    if body.num_candidates == body.n:
        return answers
    chosen: list[CompletionOutput] = []
    for start in range(0, len(answers), body.num_candidates):
        candidates = answers[start : start + body.num_candidates]
        chosen += sorted(candidates, key=_mean_logprob, reverse=True)[: body.n]
    return chosen


def _mean_logprob(output: CompletionOutput) -> float:
    return sum(entry.logprob for entry in output.logprobs) / max(1, len(output.logprobs))


class EventStream(HttpResponse):
    """Server-sent events, one write for all outputs of a step.

    The status is sent with the first token, so that an error before it gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, serving: Serving, processor: OutputProcessor, writer: EventWriter) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._state = state
        self._serving = serving
        self._processor = processor
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, writer = False, self._writer
        steps = generate(self._state, self._serving, self._processor, receive, scope["access_log"])
        try:
            async with aclosing(steps):
                async for outputs in steps:
                    if not started:
                        started = True
                        if (stats := self._state.engine.stats) is not None:  # that of now: it may have waited for long
                            self.headers[SLOTS_HEADER] = str(stats.num_admissible)
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await self._write(send, writer.opening())
                    await self._write(send, writer.events(outputs))
        except ClientDisconnect:
            return
        except ApiError as error:
            if not started:
                raise
            await self._write(send, writer.failed(error) + _usage_comment(scope), more=False)
            return
        await self._write(send, writer.closing() + _usage_comment(scope) + writer.end, more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})


class ChunkWriter:
    """Implements `EventWriter`: every event is a piece of one choice."""

    end = DONE

    def __init__(self, processor: OutputProcessor, chunk: Chunk, layout: Layout, options: StreamOptions) -> None:
        self._processor = processor
        self._layout = layout
        self._options = options
        self._chunk = chunk  # written anew for each event
        self._num_tokens = 0  # in the events so far
        if options.include_usage:
            chunk.usage = None

    def opening(self) -> bytes:
        return b"".join(self._event(self._layout.opening(state.index)) for state in self._processor.states)

    def events(self, outputs: Sequence[CompletionOutput]) -> bytes:
        events = []
        for output in outputs:  # those of several steps, where the client or this process is slow
            self._num_tokens += len(output.token_ids)
            events += [self._event([part]) for part in self._layout.delta(output)]
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        self._chunk.choices = []
        self._chunk.usage = usage(self._processor, num_reasoning=self._layout.num_reasoning_tokens)
        return event(self._chunk)

    def failed(self, error: ApiError) -> bytes:
        return event(error.body)

    def _event(self, choices: Sequence[Choice]) -> bytes:
        if not choices:
            return b""
        self._chunk.choices = choices
        if self._options.continuous_usage_stats:
            self._chunk.usage = usage(self._processor, self._num_tokens, self._layout.num_reasoning_tokens)
        return event(self._chunk)


def _usage_comment(scope: Scope) -> bytes:
    report = usage_report(scope)
    return b"" if report is None else f": {USAGE_HEADER.removeprefix('x-')} {report}\n\n".encode()
