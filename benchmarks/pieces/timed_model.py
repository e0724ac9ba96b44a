"""An engine whose steps take the time that a latency model gives them, and compute nothing: no torch is imported.

Scheduler, paged cache, queues and answers are the server's own; only the forward pass is a wait. So several replicas of
a large GPU's speed run on a small machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import cycle, islice
from typing import Any

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import KVCachePlan, Plan, Started, StepResult
from llmservice_server.engine.step_timer import step_batch
from llmservice_server.types.errors import GrammarError
from llmservice_server.types.messages import Embed, Embedded

HOST_S = 0.02
"""The host's own work between two steps is part of a step's time; a longer gap is an engine that was idle."""


class TimedRunner:
    """Implements `Runner` and its `StepInFlight`: a step ends at its beginning plus the time of the latency model."""

    def __init__(
        self,
        model: LatencyModel,
        token_ids: Sequence[int],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._model = model
        self._tokens = cycle(token_ids)
        self._clock, self._sleep = clock, sleep
        self._ended_s = 0.0

    def swap(self, plan: Plan) -> None:
        """There are no keys and values to copy."""

    def recover(self) -> None:
        """There is no device to lose."""

    def launch(self, plan: Plan, after: Any = None) -> Any:
        raise NotImplementedError("steps are not overlapped: Started.overlaps is False")

    def execute(self, plan: Plan) -> StepResult:
        now_s = self._clock()
        began_s = self._ended_s if now_s - self._ended_s < HOST_S else now_s
        self._ended_s = began_s + self._model.seconds(step_batch(plan))
        if (left_s := self._ended_s - self._clock()) > 0:
            self._sleep(left_s)
        due = [share.request for share in plan.scheduled if share.samples]
        return StepResult(due, list(islice(self._tokens, len(due))), [None] * len(due))


class NoEmbedder:
    """Implements `Embedder` for a model without embeddings."""

    size = 0
    max_tokens = 0

    def add(self, message: Embed, now: float) -> Embedded:
        return Embedded(request_id=message.request_id, error="this model computes nothing", error_status=400)

    def abort(self, request_ids: Sequence[str]) -> None:
        """No request is ever accepted."""

    def due_s(self) -> None:
        return None

    def step(self, now: float, max_tokens: int | None = None, step_s: float | None = None) -> list[Embedded]:
        return []


class NoGrammars:
    """Implements `GrammarCompiler`: every grammar is refused."""

    def compile(self, grammar: str, end_token_ids: Sequence[int]) -> Future[Any]:
        refused: Future[Any] = Future()
        refused.set_result(GrammarError("this model computes nothing: send no grammar"))
        return refused


def timed_engine(
    config: EngineConfig,
    model: LatencyModel,
    num_blocks: int,
    token_ids: Collection[int],
    vocab_size: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """An engine with `num_blocks` blocks, the null block included; answers repeat `token_ids`."""
    most = config.max_model_len or 1 << 20
    groups = BlockGroups(config.block_size, 1)
    return Engine(
        config,
        Started(
            architecture="Timed",
            model_code="own",
            runner=TimedRunner(model, list(token_ids), clock, sleep),
            embedder=NoEmbedder(),
            grammars=NoGrammars(),
            kv_cache=KVCachePlan(num_blocks, groups.longest(num_blocks - 1, most), groups),
            max_num_seqs=config.most_seqs,
            memory_bytes={},
            vocab_size=vocab_size,
            eos_token_ids=frozenset(),
        ),
        clock,
    )
