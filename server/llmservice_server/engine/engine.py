"""The engine: requests in, tokens out, one step at a time. It imports no HTTP, sockets or text processing."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from llmservice_server.engine.adapters import Adapters
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.interfaces import GrammarCompiler, Plan, Started, StepInFlight, StepResult
from llmservice_server.engine.request import Request, Status, why_refused
from llmservice_server.engine.scheduler import make_scheduler
from llmservice_server.engine.step_timer import StepTimer, StepWork, step_work
from llmservice_server.types.errors import GrammarError, failure_sentence, request_failure
from llmservice_server.types.messages import (
    Embedded,
    FinishReason,
    GenerateRequest,
    LoadAdapter,
    Output,
    Ready,
    Stats,
    StepOutputs,
    TokenLogprobs,
    UnloadAdapter,
)

_LOG = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.05  # for a grammar where there is nothing else to do; messages wait as long
_UNKNOWN = 0  # stands for a token that only the device knows; any of the vocabulary, since it is never read

S = TypeVar("S")
T = TypeVar("T")


class Engine:
    """`clock` gives monotonic seconds, on the same clock as `GenerateRequest.arrival_s` and `deadline_s`."""

    def __init__(self, config: EngineConfig, started: Started, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the scheduler that `config` names is not installed, or cannot run this model."""
        longest = started.kv_cache.max_model_len
        config = replace(config, max_model_len=longest, expected_tokens=min(config.expected_tokens, longest))
        self._clock = clock
        self._seed = config.seed
        self.runner = started.runner
        self.embedder = started.embedder
        self._vocab_size = started.vocab_size
        self._eos_token_ids = started.eos_token_ids
        self.pool = BlockPool(started.kv_cache.num_blocks, started.kv_cache.groups)
        self.swap = started.swap
        self._overlaps = started.overlaps if config.overlap is None else config.overlap
        self._in_flight: StepInFlight | None = None  # computed, or about to be, but not read
        self.scheduler = make_scheduler(config, started.max_num_seqs, self.pool, self.swap, started.prefill_tokens)
        self._compiling = GrammarQueue(started.grammars)
        self._adapters = Adapters(started.adapters)
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of finished requests stay until they are due
        self._pending: list[Output] = []  # decided between steps, delivered with the next one
        self._arrivals = itertools.count()
        self.last_plan = Plan()
        self._last_work = StepWork()
        self._timer = StepTimer()
        self._began_s: float | None = None  # the step in flight; None: its time is not known
        self.ready = Ready(
            max_model_len=longest,
            max_num_seqs=started.max_num_seqs,
            block_size=config.block_size,
            num_blocks=self.pool.num_usable,
            block_groups=len(self.pool.groups),
            max_request_tokens=self.pool.groups.longest(self.pool.num_usable, longest),
            embedding_size=self.embedder.size,
            max_embedding_tokens=self.embedder.max_tokens,
            prefix_caching=config.prefix_caching,
            memory_bytes=started.memory_bytes,
            architecture=started.architecture,
            model_code=started.model_code,
            task=started.task,
            fallbacks=started.fallbacks,
            load_s=started.load_s,
            compile_s=started.compile_s,
            kernels_compiled=started.kernels_compiled,
            kernels_loaded=started.kernels_loaded,
            max_loras=0 if started.adapters is None else started.adapters.num_slots,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._pending or self._in_flight or self._adapters)

    def wait_s(self) -> float:
        """Seconds until a step has something to do, unless a message arrives; 0 where there is work."""
        if self._pending or self._compiling or self._in_flight or self._adapters:
            return 0.0
        now = self._clock()
        deadline_s = self._deadlines[0][0] if self._deadlines and self._requests else math.inf
        return max(0.0, min(self.scheduler.wait_s(now), deadline_s - now))

    def add(self, message: GenerateRequest) -> None:
        """Queue a request. One that can never be served is answered with an error by the next step."""
        problem = self._why_refused(message)
        if problem is not None:
            self._refuse(message.request_id, problem)
            return
        if message.adapter is not None and (problem := self._adapters.why_refused(message.adapter)) is not None:
            self._refuse(message.request_id, problem, status=404)
            return
        order = next(self._arrivals)
        request = Request.of(message, order, _seed_of(self._seed, order), self._eos_token_ids)
        self._requests[request.request_id] = request
        if message.sampling.grammar is None:
            self._queue(request)
        else:
            self._compiling.add(request, message.sampling.grammar, message.end_token_ids)
        for deadline_s in (request.deadline_s, request.queue_deadline_s):
            if deadline_s is not None:
                heapq.heappush(self._deadlines, (deadline_s, request.request_id))

    def embed(self, step_s: float | None) -> list[Embedded]:
        """Compute embeddings, beside a step of `step_s` seconds with the prompt tokens that that one has left."""
        self._began_s = None
        self._timer.pause()
        tokens_left = self.scheduler.tokens_left(self.last_plan) if self.wait_s() == 0 else None
        return self.embedder.step(self._clock(), tokens_left, step_s)

    def change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load or unload an adapter; a later step reports the result."""
        self._adapters.change(message)

    def abort(self, request_ids: Sequence[str], finished: bool = False) -> None:
        """End requests now, freeing their blocks; unknown ids (already finished) are ignored.

        `finished`: a stop string matched, so the request ends with "stop", not "abort".
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._pending.append(self._finish(request, "stop" if finished else "abort"))

    def step(self) -> StepOutputs:
        """Compute one step of the scheduled requests; returns its outputs and what was decided since the last one.

        Where steps overlap, the outputs are those of the step before, while this one is computed.
        """
        now = self._clock()
        self._expire(now)
        self._add_compiled(now)
        self._add_adapted(now)
        outputs, self._pending = self._pending, []
        if self._overlaps:
            outputs += self._overlap(now)
        else:
            self.last_plan = self.scheduler.schedule(now)
            self._last_work = step_work(self.last_plan)
            self.runner.swap(self.last_plan)
            outputs += self._compute(self.last_plan, now)
        if self._in_flight is None and self.scheduler.wait_s(now) > 0:
            self._timer.pause()
        stats = self.stats()
        stats.step = self._timer.take()
        return StepOutputs(outputs=outputs, stats=stats, adapters=self._adapters.take_reports())

    def stats(self) -> Stats:
        """Gauges as of now; `batch_size` and `iteration_tokens` are the last step's."""
        return Stats(
            num_running=Counter(request.lane for request in self.scheduler.running),
            num_waiting=dict(self.scheduler.num_waiting),
            blocks_free=self.pool.num_free,
            blocks_held=self.pool.num_held,
            blocks_cached=self.pool.num_cached,
            preemptions=dict(self.scheduler.num_preemptions),
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            batch_size=len(self.last_plan.scheduled),
            iteration_tokens=self._last_work.num_tokens,
            num_admissible=self.scheduler.num_admissible,
        )

    def _compute(self, plan: Plan, began_s: float | None) -> list[Output]:
        """One step, from its launch to its end."""
        if not plan.scheduled:
            self._timer.pause()
            return []
        results, failures = execute_isolated(
            lambda shares: self.runner.execute(Plan(scheduled=shares)), self.runner.recover, plan.scheduled
        )
        failed = {share.request: error for share, error in failures}
        void = self.scheduler.commit(plan, failed)
        outputs = [
            self._finish(request, "error", error)
            for request, error in failed.items()
            if request.request_id in self._requests  # else it had ended, and was computed as padding
        ]
        for result in results:
            outputs += self._take(result, void)
        self._timer.end(self._last_work, None if failures else began_s, self._clock())
        return outputs

    def _overlap(self, now: float) -> list[Output]:
        """Launch the next step behind the one in flight, then return the tokens that that one has sampled."""
        before, self._in_flight = self._in_flight, None
        work, began_s = self._last_work, self._began_s
        with _expecting(self._continuing(before)):
            plan = self.last_plan = self.scheduler.schedule(now)
            self.runner.swap(plan)
            size = len(plan.scheduled)
            launched = attempt(lambda: self.runner.launch(plan, before), size) if size else None
        self._last_work, self._began_s = step_work(plan), now  # while the device computes
        outputs = self._take(before.wait()) if before is not None else []
        if before is not None:
            self._timer.end(work, began_s, self._clock())
        ended = {share.request for share in plan.scheduled if share.request.status is Status.FINISHED}
        if launched is not None:
            self._in_flight = attempt(lambda: _sampled(launched, ended), size)
        if self._in_flight is not None:
            self.scheduler.commit(plan)
        elif size:  # it failed, so it is computed again, alone and with every token known
            self.runner.recover()
            rest = [share for share in plan.scheduled if share.request not in ended]
            outputs += self._compute(Plan(scheduled=rest, registered=plan.registered), began_s=None)
        return outputs

    def _continuing(self, step: StepInFlight | None) -> list[Request]:
        """The requests of a step in flight that need more than the token it samples; the others free their blocks."""
        continuing = []
        for request in step.requests if step is not None else ():
            if request.status is Status.FINISHED:
                continue
            if request.num_output_tokens + 1 < request.sampling.max_tokens:
                continuing.append(request)
            else:
                with _expecting([request]):  # so that it counts with its last token
                    self.scheduler.finish(request)
        return continuing

    def _take(self, result: StepResult, void: Collection[Request] = ()) -> list[Output]:
        """What a step has computed for each request that has not ended meanwhile, but for the `void`."""
        outputs, failed = [], dict(result.failed)
        for request, prompt_logprobs in result.prompt_logprobs.items():
            request.prompt_logprobs += prompt_logprobs
        for request, token_id, logprobs in zip(result.requests, result.token_ids, result.logprobs, strict=True):
            if request in failed or request in void or self._requests.get(request.request_id) is not request:
                continue
            try:
                outputs.append(self._advance(request, token_id, logprobs))
            except Exception as error:
                failed[request] = request_failure(error)
        return outputs + [
            self._finish(request, "error", problem)
            for request, problem in failed.items()
            if self._requests.get(request.request_id) is request
        ]

    def _advance(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> Output:
        if request.grammar is not None and (problem := request.grammar.problem) is not None:
            output = self._finish(request, "error", problem)
            output.error_status = 400
            return output
        if token_id < 0:
            return self._finish(
                request, "error", "the model's logits are not finite: the weights or the dtype overflow"
            )
        first = len(request.token_ids) == request.num_prompt_tokens
        finish_reason = request.append(token_id)
        if finish_reason is None:
            output = Output(request_id=request.request_id, token_ids=[token_id])
        else:
            output = self._finish(request, finish_reason)
            if token_id not in request.stop_token_ids:  # they are not part of the answer
                output.token_ids = [token_id]
        if logprobs is not None and output.token_ids:
            output.logprobs = (logprobs,)
        if first and request.first_scheduled_s is not None:
            output.queue_s = max(0.0, request.first_scheduled_s - request.arrival_s)
            output.prompt_logprobs = tuple(request.prompt_logprobs)
            output.num_cached_tokens = request.num_cached_tokens
        return output

    def _add_compiled(self, now: float) -> None:
        idle = not self._pending and self.scheduler.wait_s(now) > 0
        for request, problem in self._compiling.take_ready(idle=idle):
            if problem is None:
                self._queue(request)
            else:
                del self._requests[request.request_id]
                self._refuse(request.request_id, problem)

    def _queue(self, request: Request) -> None:
        if request.adapter_name is None:
            self.scheduler.add(request)
        else:
            self._adapters.add(request)

    def _add_adapted(self, now: float) -> None:
        """The requests whose adapter is on the device."""
        if not self._adapters:
            return
        idle = not self._pending and self._in_flight is None and self.scheduler.wait_s(now) > 0
        for request, problem in self._adapters.take_ready(idle=idle):
            if problem is None:
                self.scheduler.add(request)
            else:
                del self._requests[request.request_id]
                is_gone = self._adapters.why_refused(request.adapter_name or "") is not None
                self._refuse(request.request_id, problem, status=404 if is_gone else 500)

    def _refuse(self, request_id: str, problem: str, status: int = 400) -> None:
        self._pending.append(Output(request_id=request_id, finish_reason="error", error=problem, error_status=status))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None:
                continue
            waits = request.first_scheduled_s is None
            if request.deadline_s == deadline_s:
                waited = "while it waited" if waits else f"after {request.num_output_tokens} tokens"
                problem = f"the request's deadline passed {waited}"
            elif waits and request.queue_deadline_s == deadline_s:
                problem = f"the request waited {now - request.arrival_s:.1f} s, longer than it may: try again later"
            else:
                continue
            output = self._finish(request, "error", problem)
            output.error_status = 504
            self._pending.append(output)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        if not self._compiling.discard(request) and not self._adapters.discard(request):
            self.scheduler.finish(request)
        del self._requests[request.request_id]
        return Output(request_id=request.request_id, finish_reason=reason, error=error)

    def _why_refused(self, message: GenerateRequest) -> str | None:
        if message.request_id in self._requests:
            return f"a request with the id {message.request_id} is being served, expected a new id"
        return why_refused(message, self._vocab_size, self.ready.max_request_tokens)


def _sampled(step: StepInFlight, ended: Collection[Request]) -> StepInFlight:
    step.sample(ended)
    return step


@contextmanager
def _expecting(requests: Collection[Request]) -> Iterator[None]:
    """Within it each of `requests` has a placeholder for the token that the step in flight samples for it."""
    for request in requests:
        request.token_ids.append(_UNKNOWN)
    try:
        yield
    finally:
        for request in requests:
            request.token_ids.pop()


def _seed_of(seed: int, order: int) -> int:
    """The 64-bit seed of request number `order`, where it sets none."""
    return int.from_bytes(blake2b(f"{seed} {order}".encode(), digest_size=8).digest(), "little")


def execute_isolated(
    execute: Callable[[list[S]], T], recover: Callable[[], None], batch: list[S]
) -> tuple[list[T], list[tuple[S, str]]]:
    """The results of `execute`, in the batch's order, and the items that failed, each with its error message.

    Computing a batch again is harmless: a step writes the same keys and values to the same places. After an exception
    each half is tried alone, down to single items; where memory was short, the halves may all succeed. `recover` is
    called after each exception; it raises where the device itself is lost, and with it the engine.
    """
    try:
        return [execute(batch)], []
    except Exception as error:
        _log(len(batch), error)
        failure = failure_sentence(error)
    recover()
    if len(batch) == 1:
        return [], [(batch[0], failure)]
    middle = len(batch) // 2
    results, failed = execute_isolated(execute, recover, batch[:middle])
    more_results, more_failed = execute_isolated(execute, recover, batch[middle:])
    return results + more_results, failed + more_failed


def attempt(work: Callable[[], T], num_sequences: int) -> T | None:
    """The result of a step's `work`; None after an exception, which is logged."""
    try:
        return work()
    except Exception as error:
        _log(num_sequences, error)
        return None


def _log(num_sequences: int, error: Exception) -> None:
    _LOG.warning("a step of %d sequences failed", num_sequences, exc_info=error)


class GrammarQueue:
    """The requests whose grammar is being compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._futures: dict[Request, Future[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, request: Request, grammar: str, end_token_ids: Sequence[int]) -> None:
        self._futures[request] = self._compiler.compile(grammar, end_token_ids)

    def discard(self, request: Request) -> bool:
        """Remove a request that has ended; False where it was not in this queue."""
        return self._futures.pop(request, None) is not None

    def take_ready(self, *, idle: bool) -> list[tuple[Request, str | None]]:
        """The requests whose compilation has ended, with None or the error; `idle`: wait up to 50 ms for the first."""
        if idle and self._futures:
            wait(self._futures.values(), _IDLE_WAIT_S, FIRST_COMPLETED)
        done = [request for request, future in self._futures.items() if future.done()]
        return [(request, _resolve(request, self._futures.pop(request))) for request in done]


def _resolve(request: Request, future: Future[Any]) -> str | None:
    if (fault := future.exception()) is not None:  # an error inside the library must not reach other requests
        return f"the grammar could not be compiled: {type(fault).__name__} in its compiler; try a simpler one"
    outcome = future.result()
    if isinstance(outcome, GrammarError):
        return str(outcome)
    request.grammar = outcome.start()
    return None
