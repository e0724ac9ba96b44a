"""One generating HTTP request: its sequences, from the queue of the engine to the last word."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from llmservice_server.api.error import ENGINE_DEAD, ENGINE_ERROR, ApiError, invalid
from llmservice_server.api.request import GenerationRequest
from llmservice_server.api.sequence import Sequence
from llmservice_server.api.state import ServerState
from llmservice_server.api.terms import Terms
from llmservice_server.engine_client import EngineDeadError, OutputStream
from llmservice_server.messages import Generate, Output, Ready, SamplingParams
from llmservice_server.text.stop_strings import StopStrings
from llmservice_server.text.tokenizer import Tokenizer

_LONGEST_TIMER_S = 86_400.0 * 365  # a client may ask for any deadline, a timer is set for some

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class DeadlinePassedError(Exception):
    """The engine, which keeps the deadline as well, has not said so in time: it may be in a long step, or stuck."""


class Progress(NamedTuple):
    """What one step did for one choice, or all of them together."""

    sequence: Sequence
    text: str
    finish_reason: str | None


class Generation:
    """Asynchronous context: entered, the sequences are the engine's; left, however, they are ended and counted."""

    def __init__(
        self,
        state: ServerState,
        request: GenerationRequest,
        prompts: Many[list[int]],
        *,
        arrival_s: float,
        default_max_tokens: int | None,
        grammar: str | None,
        terms: Terms,
        log: MutableMapping[str, Any],
    ) -> None:
        """Raises ApiError where a prompt does not fit. `log` is given the figures of the access log at the end.

        `default_max_tokens` applies to a request without a limit; None: as many as the context has room for.
        """
        ready, tokenizer = state.require_ready()
        self._state = state
        self._log = log
        self.request_id = uuid.uuid4().hex
        self._stream: OutputStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        limits = [_token_limit(prompt, request.token_limit, default_max_tokens, ready, tokenizer) for prompt in prompts]
        _check_token_ids(request, tokenizer)
        self._messages = [
            Generate(
                request_id=f"{self.request_id}-{prompt_index * request.n + choice}",
                prompt_token_ids=prompt,
                sampling=_sampling(request, limits[prompt_index], choice, tokenizer, grammar),
                arrival_s=arrival_s,
                lane=terms.lane,
                deadline_s=None if terms.timeout_s is None else arrival_s + terms.timeout_s,
                queue_deadline_s=None if terms.queue_timeout_s is None else arrival_s + terms.queue_timeout_s,
                cache_salt=request.cache_salt,
            )
            for prompt_index, prompt in enumerate(prompts)
            for choice in range(request.n)
        ]
        self.sequences = [
            Sequence(
                request_id=message.request_id,
                index=index,
                prompt_index=index // request.n,
                prompt_token_ids=message.prompt_token_ids,
                stops=StopStrings(request.stop_strings, keep=request.include_stop_str_in_output),
                tokenizer=tokenizer,
                arrival_s=arrival_s,
                min_tokens=request.min_tokens,
            )
            for index, message in enumerate(self._messages)
        ]
        self._echoes_only = request.token_limit == 0
        self._by_id = {sequence.request_id: sequence for sequence in self.sequences}

    async def start(self, receive: Receive) -> Self:
        """Hand the sequences to the engine and watch the client. Raises ApiError where the queue is full."""
        lane, lengths = self._messages[0].lane, [len(message.prompt_token_ids) for message in self._messages]
        self._state.require_room(lane, lengths)
        self._stream = self._state.engine.generate(self._messages)
        for message, num_tokens in zip(self._messages, lengths, strict=True):
            self._state.backlog.enter(message.request_id, lane, num_tokens)
        self._watcher = asyncio.create_task(self._watch(receive))
        if (deadline_s := self._messages[0].deadline_s) is not None:
            delay_s = min(deadline_s - time.monotonic(), _LONGEST_TIMER_S)
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._stream.fail, DeadlinePassedError())
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is None:
            return
        if self._watcher is not None:
            self._watcher.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self._state.backlog.leave(self._by_id, time.monotonic())
        self._state.engine.abort(list(self._by_id))  # those that have ended are not known any more
        for sequence in self.sequences:
            sequence.close(self._state.metrics)
        self._log.update(self._log_fields)

    async def progress(self) -> AsyncIterator[list[Progress]]:
        """What each step did, until all sequences have ended. Raises ApiError, or ClientGoneError."""
        assert self._stream is not None  # noqa: S101  # entered
        unfinished = len(self.sequences)
        while unfinished:
            try:
                outputs = await self._stream.next()
            except EngineDeadError as error:
                self._fail_unfinished()
                raise ApiError(503, str(error), code=ENGINE_DEAD) from error
            except DeadlinePassedError as error:
                self._fail_unfinished()
                num_tokens = sum(sequence.num_tokens for sequence in self.sequences)
                waited = "while it waited" if num_tokens == 0 else f"after {num_tokens} tokens"
                raise ApiError(504, f"the request's deadline passed {waited}", code=ENGINE_ERROR) from error
            steps = [step for step in map(self._advance, outputs) if step is not None]
            unfinished -= sum(step.finish_reason is not None for step in steps)
            self._end_stopped()
            if steps:
                yield steps

    def _fail_unfinished(self) -> None:
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or "error"

    def _advance(self, output: Output) -> Progress | None:
        sequence = self._by_id[output.request_id]
        if sequence.finish_reason is not None:
            return None  # a stop string has ended it while the engine took another step
        if self._echoes_only and output.finish_reason in ("stop", "length"):
            # The engine cannot read a prompt without drawing a token behind it.
            output = msgspec.structs.replace(output, token_ids=[], logprobs=(), finish_reason="length")
        now = time.monotonic()
        text = sequence.advance(output, now, self._state.metrics)
        self._state.backlog.start(output.request_id, now)
        if output.finish_reason is not None:
            self._state.backlog.leave([output.request_id], now)
        if sequence.finish_reason in ("error", "abort"):
            raise ApiError(output.error_status, output.error or "the engine ended the request", code=ENGINE_ERROR)
        return Progress(sequence, text, sequence.finish_reason)

    def _end_stopped(self) -> None:
        if stopped := [sequence for sequence in self.sequences if sequence.stopped_by_string]:
            self._state.engine.abort([sequence.request_id for sequence in stopped], finished=True)
            for sequence in stopped:
                sequence.stopped_by_string = False

    async def _watch(self, receive: Receive) -> None:
        """End the generation when the client hangs up: after the body, its next message can only say that."""
        with contextlib.suppress(OSError):
            while (await receive())["type"] != "http.disconnect":
                pass
        if self._stream is not None:
            self._stream.fail(ClientGoneError())

    @property
    def _log_fields(self) -> dict[str, Any]:
        """For the access log: numbers only, never words."""
        first = min((sequence.ttft_s for sequence in self.sequences if sequence.ttft_s is not None), default=None)
        return {
            "sequences": len(self.sequences),
            "prompt_tokens": sum({each.prompt_index: each.num_prompt_tokens for each in self.sequences}.values()),
            "completion_tokens": sum(sequence.num_tokens for sequence in self.sequences),
            "ttft_s": None if first is None else round(first, 4),
            "finish_reasons": sorted({sequence.finish_reason or "abort" for sequence in self.sequences}),
        }


def _sampling(
    request: GenerationRequest, max_tokens: int, choice: int, tokenizer: Tokenizer, grammar: str | None
) -> SamplingParams:
    eos = frozenset[int]() if request.ignore_eos else tokenizer.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        seed=None if request.seed is None else (request.seed + choice) % 2**63,  # so that the choices differ
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        stop_token_ids=tuple(sorted(eos.union(request.stop_token_ids))),
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        grammar=grammar,
    )


def _check_token_ids(request: GenerationRequest, tokenizer: Tokenizer) -> None:
    """Raises ApiError where a parameter names a token that does not exist."""
    for param, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        if (largest := max(ids, default=0)) >= tokenizer.vocab_size:
            raise invalid(
                f"{param}: token id {largest} is outside the vocabulary of {tokenizer.vocab_size}", param=param
            )


def _token_limit(
    prompt: list[int], max_tokens: int | None, default: int | None, ready: Ready, tokenizer: Tokenizer
) -> int:
    """How many tokens may be generated. Raises ApiError where prompt and `max_tokens` exceed the context."""
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
    if (largest := max(prompt)) >= tokenizer.vocab_size:
        raise invalid(f"token id {largest} is outside the vocabulary of {tokenizer.vocab_size}", param="prompt")
    return min(room, default or room) if max_tokens is None else max(1, max_tokens)
