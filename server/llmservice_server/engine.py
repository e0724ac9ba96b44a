"""The engine: requests in, tokens out, one step at a time. It knows no HTTP, no sockets and no text."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence

from llmservice_server.admission import why_refused
from llmservice_server.block_pool import BlockPool
from llmservice_server.config import EngineConfig
from llmservice_server.embedding.embedder import Embedder
from llmservice_server.embedding.model import EmbeddingModel
from llmservice_server.messages import FinishReason, Generate, Output, Ready, Stats, StepOutputs
from llmservice_server.request import Request
from llmservice_server.sampler import stream_seed
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
            self._pending.append(
                Output(request_id=message.request_id, finish_reason="error", error=problem, error_status=400)
            )
            return
        order = next(self._arrivals)
        request = Request.of(message, order, stream_seed(self._seed, order), self._eos_token_ids)
        self._requests[request.request_id] = request
        self.scheduler.add(request)
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
        outputs, self._pending = self._pending, []
        plan = self.scheduler.schedule()
        if plan.scheduled:
            tokens = self._runner.execute(plan)
            outputs += self._update(plan, tokens, now)
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

    def _update(self, plan: Plan, tokens: Sequence[int | None], now: float) -> list[Output]:
        """Give each sampled token to its request. `now`: when the step was scheduled."""
        outputs = []
        sampled = iter(tokens)
        for share in plan.scheduled:
            request = share.request
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
            if share.samples:
                outputs.append(self._advance(request, next(sampled)))
        return outputs

    def _advance(self, request: Request, token_id: int | None) -> Output:
        if token_id is None:
            return self._finish(
                request, "error", "the model's logits are not finite: the weights or the dtype overflow"
            )
        first = request.num_output_tokens == 0
        finish_reason = request.append(token_id)
        output = (
            Output(request_id=request.request_id) if finish_reason is None else self._finish(request, finish_reason)
        )
        if finish_reason != "stop":  # the stop token is not part of the answer
            output.token_ids = [token_id]
        if first and request.first_scheduled_s is not None:
            output.queue_s = max(0.0, request.first_scheduled_s - request.arrival_s)
        return output

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
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        return Output(request_id=request.request_id, finish_reason=reason, error=error)

    def _why_refused(self, message: Generate) -> str | None:
        if message.request_id in self._requests:
            return f"a request with the id {message.request_id} is being served, expected a new id"
        return why_refused(message, self._vocab_size, self.ready.max_request_tokens)
