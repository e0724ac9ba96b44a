"""The engine: requests in, tokens out, one step at a time. It knows no HTTP, no sockets and no text."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence

from llmservice_server.admission import why_refused
from llmservice_server.block_pool import BlockPool
from llmservice_server.compiling import Compiling
from llmservice_server.config import EngineConfig
from llmservice_server.embedding.embedder import Embedder
from llmservice_server.embedding.model import EmbeddingModel
from llmservice_server.grammar import GrammarCompiler
from llmservice_server.messages import FinishReason, Generate, Output, Ready, Stats, StepOutputs
from llmservice_server.request import Request
from llmservice_server.runner import StepResult
from llmservice_server.sampler import Draw, stream_seed
from llmservice_server.scheduler import ContinuousScheduler, Plan
from llmservice_server.startup import start


class Engine:
    """Raises `StartError` (`ConfigError`, `ModelLoadError`, `OutOfMemoryError`) when it cannot start.

    `clock` gives monotonic seconds, on the same clock as `Generate.arrival_s` and `deadline_s`.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        started_s = time.monotonic()
        started = start(config)
        self._clock = clock
        self._seed = config.seed
        self._runner = started.runner
        self._vocab_size = started.vocab_size
        self._eos_token_ids = started.eos_token_ids
        self.pool = BlockPool(started.kv_cache.num_blocks)
        self.scheduler = ContinuousScheduler(
            self.pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
        )
        self.embedder = Embedder(
            EmbeddingModel(started.runner.model, config.pooling),
            vocab_size=started.vocab_size,
            max_tokens=min(started.kv_cache.max_model_len, config.max_num_batched_tokens),
            max_batch_tokens=config.max_num_batched_tokens,
            window_s=config.embedding_window_s,
        )
        self._compiling = Compiling(GrammarCompiler(config.model, started.vocab_size, started.eos_token_ids))
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of finished requests stay until they are due
        self._pending: list[Output] = []  # decided between steps, delivered with the next one
        self._arrivals = itertools.count()
        self._last_plan = Plan()
        self.ready = Ready(
            max_model_len=started.kv_cache.max_model_len,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            num_blocks=self.pool.num_usable,
            max_request_tokens=min(started.kv_cache.max_model_len, self.pool.num_usable * config.block_size),
            embedding_size=self.embedder.size,
            max_embedding_tokens=self.embedder.max_tokens,
            memory_bytes=started.memory_bytes,
            load_s=time.monotonic() - started_s,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._pending)

    def add(self, message: Generate) -> None:
        """Queue a request. One that can never be served is answered with an error by the next step."""
        problem = self._why_refused(message)
        if problem is not None:
            self._refuse(message.request_id, problem)
            return
        order = next(self._arrivals)
        request = Request.of(message, order, stream_seed(self._seed, order), self._eos_token_ids)
        self._requests[request.request_id] = request
        if message.sampling.grammar is None:
            self.scheduler.add(request)
        else:
            self._compiling.add(request, message.sampling.grammar)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))

    def abort(self, request_ids: Sequence[str], finished: bool = False) -> None:
        """End requests now, freeing their blocks; unknown ids (already finished) are passed over.

        `finished`: a stop string matched, so the request ends with "stop", not "abort".
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._pending.append(self._finish(request, "stop" if finished else "abort"))

    def step(self) -> StepOutputs:
        """Compute one step for whoever is scheduled, and hand out what was decided since the last one."""
        now = self._clock()
        self._expire(now)
        self._add_compiled()
        outputs, self._pending = self._pending, []
        plan = self.scheduler.schedule()
        if plan.scheduled:
            outputs += self._update(plan, self._runner.execute(plan), now)
        self._last_plan = plan
        return StepOutputs(outputs=outputs, stats=self.stats())

    def stats(self) -> Stats:
        """Gauges as of now; `batch_size` and `iteration_tokens` are the last step's."""
        return Stats(
            num_running=len(self.scheduler.running),
            num_waiting=dict(self.scheduler.num_waiting),
            blocks_free=self.pool.num_free,
            blocks_held=self.pool.num_held,
            blocks_cached=0,
            preemptions=self.scheduler.num_preemptions,
            batch_size=len(self._last_plan.scheduled),
            iteration_tokens=self._last_plan.num_tokens,
        )

    def _update(self, plan: Plan, result: StepResult, now: float) -> list[Output]:
        """Give each sampled token to its request. `now`: when the step was scheduled."""
        outputs = []
        for request, logprobs in result.prompt_logprobs.items():
            request.prompt_logprobs += logprobs
        draws = iter(result.draws)
        for share in plan.scheduled:
            request = share.request
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
            if share.samples:
                outputs.append(self._advance(request, next(draws)))
        return outputs

    def _advance(self, request: Request, draw: Draw) -> Output:
        if request.grammar is not None and (problem := request.grammar.problem) is not None:
            return self._finish(request, "error", problem)
        token_id = draw.token_id
        if token_id is None:
            return self._finish(
                request, "error", "the model's logits are not finite: the weights or the dtype overflow"
            )
        first = request.num_output_tokens == 0
        finish_reason = request.append(token_id)
        output = (
            Output(request_id=request.request_id) if finish_reason is None else self._finish(request, finish_reason)
        )
        if token_id not in request.stop_token_ids:  # they are not part of the answer
            output.token_ids = [token_id]
            output.logprobs = [] if draw.logprobs is None else [draw.logprobs]
        if first and request.first_scheduled_s is not None:
            output.queue_s = max(0.0, request.first_scheduled_s - request.arrival_s)
            output.prompt_logprobs = request.prompt_logprobs
        return output

    def _add_compiled(self) -> None:
        idle = not (self._pending or self.scheduler.running or self.scheduler.waiting)
        for request, problem in self._compiling.take_ready(idle=idle):
            if problem is None:
                self.scheduler.add(request)
            else:
                del self._requests[request.request_id]
                self._refuse(request.request_id, str(problem))

    def _refuse(self, request_id: str, problem: str) -> None:
        self._pending.append(Output(request_id=request_id, finish_reason="error", error=problem, error_status=400))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                waited = (
                    "while it waited"
                    if request.first_scheduled_s is None
                    else f"after {request.num_output_tokens} tokens"
                )
                output = self._finish(request, "error", f"the request's deadline passed {waited}")
                output.error_status = 504
                self._pending.append(output)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        if not self._compiling.discard(request):
            self.scheduler.finish(request)
        del self._requests[request.request_id]
        return Output(request_id=request.request_id, finish_reason=reason, error=error)

    def _why_refused(self, message: Generate) -> str | None:
        if message.request_id in self._requests:
            return f"a request with the id {message.request_id} is being served, expected a new id"
        return why_refused(message, self._vocab_size, self.ready.max_request_tokens)
