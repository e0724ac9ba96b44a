"""From a request's body to the engine's outputs: limits and parameters, admission, deadline, and the client's end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect

from llmservice_server.engine.config import LANES
from llmservice_server.http.error import ENGINE_DEAD, ENGINE_ERROR, ApiError, invalid
from llmservice_server.http.prompts import bad_token_ids, require_known
from llmservice_server.http.protocol.chat import ChatRequest
from llmservice_server.http.protocol.generation import GenerationRequest
from llmservice_server.http.state import ServerState, Serving
from llmservice_server.ipc.client import EngineDeadError, OutputStream
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import AdapterInfo, FinishReason, GenerateRequest, Output, Ready, SamplingParams

_LONGEST_TIMER_S = 86_400.0 * 365  # a client may ask for any deadline, but a timer has a range

LANE_HEADER = "x-llmservice-lane"
TIMEOUT_HEADER = "x-llmservice-timeout"
QUEUE_TIMEOUT_HEADER = "x-llmservice-queue-timeout"

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class DeadlinePassedError(Exception):
    """The engine checks the deadline as well but has not reported it in time: it is in a long step, or stuck."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    arrival_s: float  # monotonic
    lane: str
    priority: int  # within the lane; the smaller is served first
    timeout_s: float | None
    queue_timeout_s: float | None
    adapter: AdapterInfo | None = None
    client: str | None = None  # name of the API key; None: keys are not checked


def request_options(
    headers: Mapping[str, str],
    priority: str | int,
    *,
    arrival_s: float,
    default_lane: str,
    timeout_s: float | None,
    queue_timeout_s: float | None,
) -> RequestOptions:
    """The body's lane goes before the header's, and that before `default_lane`, the API key's or the service's.

    A client may choose a lower lane than its default and shorten the server's time limits, not the other way round.
    Raises ApiError: 400 for a header's invalid value, 403 for a higher lane.
    """
    named = priority if isinstance(priority, str) else None
    lane = named or headers.get(LANE_HEADER, default_lane)
    if lane not in LANES:
        raise invalid(f"{LANE_HEADER} is {lane!r}, expected one of {', '.join(LANES)}")
    if LANES.index(lane) < LANES.index(default_lane):
        raise _too_high(lane, default_lane, "priority" if named else None)
    return RequestOptions(
        arrival_s,
        lane,
        priority if isinstance(priority, int) else 0,
        _shorter(headers, TIMEOUT_HEADER, timeout_s),
        _shorter(headers, QUEUE_TIMEOUT_HEADER, queue_timeout_s),
    )


def _too_high(lane: str, highest: str, param: str | None) -> ApiError:
    message = (
        f"{param or LANE_HEADER} asks for the lane {lane}, but {highest} is the highest that this client may choose: "
        "leave it out, or ask the service's owner to raise spec.lanes.default (--default-lane) or for an API key of "
        f"the lane {lane}"
    )
    return ApiError(403, message, param=param, code="lane_not_allowed")


def _shorter(headers: Mapping[str, str], name: str, limit_s: float | None) -> float | None:
    text = headers.get(name)
    if text is None:
        return limit_s
    try:
        asked_s = float(text)
    except ValueError:
        asked_s = math.nan
    if not 0 < asked_s < math.inf:
        raise invalid(f"{name} is {text!r}, expected seconds, more than 0")
    return asked_s if limit_s is None else min(asked_s, limit_s)


def apply_defaults(body: GenerationRequest, defaults: Mapping[str, Any]) -> None:
    """Set what the request does not set itself."""
    for name in defaults.keys() - body.model_fields_set:
        setattr(body, name, defaults[name])


def output_processor(
    state: ServerState,
    serving: Serving,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    hashes: Sequence[bytes],
    *,
    default_max_tokens: int | None,
    grammar: str | None,
    options: RequestOptions,
) -> OutputProcessor:
    """For the answers to a request; `hashes` are of the prompts' blocks. Raises ApiError where a prompt does not fit.

    `default_max_tokens` applies to a request without a limit; None: as many as the context has room for.
    """
    ready, tokenizer = serving
    arrival_s = options.arrival_s
    limits = [_token_limit(prompt, request.token_limit, default_max_tokens, ready, tokenizer) for prompt in prompts]
    bad_words = bad_token_ids(request.bad_words, tokenizer)
    _check_token_ids(request, tokenizer, grammar, bad_words)
    request_id = uuid.uuid4().hex
    requests = [
        GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=_sampling_params(request, max_tokens, grammar, bad_words),
            arrival_s=arrival_s,
            lane=options.lane,
            priority=options.priority,
            client=options.client,
            deadline_s=None if options.timeout_s is None else arrival_s + options.timeout_s,
            queue_deadline_s=None if options.queue_timeout_s is None else arrival_s + options.queue_timeout_s,
            predicted_tokens=state.arrivals.predict(len(prompt), max_tokens),
            cache_salt=request.cache_salt,
            adapter=None if options.adapter is None else options.adapter.name,
            adapter_version="" if options.adapter is None else options.adapter.version,
            block_hashes=prompt_hash,
        )
        for prompt, max_tokens, prompt_hash in zip(prompts, limits, hashes, strict=True)
    ]
    kept = None
    if isinstance(request, ChatRequest):
        kept = tokenizer.formats.kept_tokens(calls=bool(request.callable_tools))
    return OutputProcessor(requests, tokenizer, state.metrics, final_only=not request.stream, kept=kept)


async def generate(
    state: ServerState,
    serving: Serving,
    processor: OutputProcessor,
    receive: Receive,
    log: MutableMapping[str, Any],
) -> AsyncGenerator[list[CompletionOutput], None]:
    """Send the requests to the engine; yields what each step brings, possibly nothing, until all answers have ended.

    A caller that leaves early (`aclosing`) aborts them. `log` receives the figures of the access log at the end. Raises
    ApiError, where the queue is full before anything is sent, and ClientDisconnect.
    """
    requests = processor.requests
    request_ids = [request.request_id for request in requests]
    lengths = [len(request.prompt_token_ids) for request in requests]
    lane, client, deadline_s = requests[0].lane, requests[0].client, requests[0].deadline_s
    predicted = [request.predicted_tokens or 0.0 for request in requests]
    state.require_room(serving, lane, lengths, sum(predicted), client)
    stream = state.engine.generate(requests)
    for request_id, num_tokens, predicted_tokens in zip(request_ids, lengths, predicted, strict=True):
        state.admission_queue.enter(request_id, lane, num_tokens, client, predicted_tokens)
    watcher = asyncio.create_task(_watch(receive, stream))
    delay_s = _LONGEST_TIMER_S if deadline_s is None else min(deadline_s - time.monotonic(), _LONGEST_TIMER_S)
    timer = asyncio.get_running_loop().call_later(delay_s, stream.fail, DeadlinePassedError())
    reason: FinishReason = "abort"  # of answers that are unfinished at the end
    try:
        while processor.num_unfinished:
            yield _process(state, processor, await stream.next())
    except EngineDeadError as error:
        reason = "error"
        raise ApiError(503, str(error), code=ENGINE_DEAD) from error
    except DeadlinePassedError as error:
        reason = "error"
        waited = f"after {processor.num_tokens} tokens" if processor.num_tokens else "while it waited"
        raise ApiError(504, f"the request's deadline passed {waited}", code=ENGINE_ERROR) from error
    finally:
        watcher.cancel()
        timer.cancel()
        state.admission_queue.leave(request_ids, time.monotonic())
        state.engine.abort(processor.close(reason))
        for answer in processor.states:
            state.arrivals.ended(answer)
        log.update(_log_fields(processor))


def _process(state: ServerState, processor: OutputProcessor, outputs: Sequence[Output]) -> list[CompletionOutput]:
    """Raises ApiError where an answer has failed."""
    now = time.monotonic()
    for output in outputs:
        state.admission_queue.start(output.request_id, now)
        if output.finish_reason is not None:
            state.admission_queue.leave([output.request_id], now)
    pieces = processor.process(outputs, now)
    if stopped := processor.take_stopped():
        state.engine.abort(stopped, finished=True)
        state.admission_queue.leave(stopped, now)
    for piece in pieces:
        if piece.finish_reason in ("error", "abort"):
            raise ApiError(piece.error_status, piece.error or "the engine ended the request", code=ENGINE_ERROR)
    return pieces


async def disconnected(receive: Receive) -> None:
    """Returns when the client disconnects: after the body, its next message can only be that."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _watch(receive: Receive, stream: OutputStream) -> None:
    await disconnected(receive)
    stream.fail(ClientDisconnect())


def _log_fields(processor: OutputProcessor) -> dict[str, Any]:
    """For the access log: numbers only, never text."""
    ttft_s = processor.ttft_s
    return {
        "lane": processor.requests[0].lane,
        "sequences": len(processor.states),
        "prompt_tokens": processor.num_prompt_tokens,
        "cached_tokens": processor.num_cached_tokens,
        "completion_tokens": processor.num_tokens,
        "ttft_s": None if ttft_s is None else round(ttft_s, 4),
        "finish_reasons": sorted({state.finish_reason or "abort" for state in processor.states}),
    }


def _sampling_params(
    request: GenerationRequest, max_tokens: int, grammar: str | None, bad_words: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        n=request.num_candidates,
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
        stop=request.stop_strings,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        grammar=grammar,
    )


def _check_token_ids(
    request: GenerationRequest, tokenizer: Tokenizer, grammar: str | None, bad_words: Sequence[tuple[int, ...]]
) -> None:
    """Raises ApiError where a parameter names a token that does not exist, or where no token remains to be sampled."""
    allowed = request.allowed_token_ids or ()
    require_known(request.logit_bias, tokenizer, "logit_bias")
    require_known(request.stop_token_ids, tokenizer, "stop_token_ids")
    require_known(allowed, tokenizer, "allowed_token_ids")
    param = "allowed_token_ids" if allowed else "bad_words"
    if grammar is not None and (allowed or bad_words):
        raise invalid(f"{param} cannot be combined with response_format, structured_outputs or tools", param)
    barred = {word[0] for word in bad_words if len(word) == 1}
    if request.min_tokens:
        barred |= tokenizer.eos_token_ids.union(request.stop_token_ids)
    if allowed and barred.issuperset(allowed):
        raise invalid("allowed_token_ids holds only tokens that bad_words or min_tokens forbid", param)


def _token_limit(
    prompt: list[int], max_tokens: int | None, default: int | None, ready: Ready, tokenizer: Tokenizer
) -> int:
    """How many tokens may be generated, at most. Raises ApiError where prompt and `max_tokens` exceed the context."""
    if not prompt:
        raise invalid("the prompt is empty: expected at least one token", param="prompt")
    room = ready.max_request_tokens - len(prompt)
    if room < 1 or (max_tokens is not None and max_tokens > room):
        wanted = f"{len(prompt)} in the prompt and {max_tokens or 1} to be generated"
        what = "maximum context length" if ready.max_request_tokens == ready.max_model_len else "KV cache"
        raise invalid(
            f"This model's {what} is {ready.max_request_tokens} tokens. However, you requested "
            f"{len(prompt) + (max_tokens or 1)} tokens ({wanted}): shorten the prompt or lower max_tokens",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
    require_known(prompt, tokenizer, "prompt")
    return min(room, default or room) if max_tokens is None else max_tokens
