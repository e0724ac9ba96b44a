"""What the endpoints share: the settings, the engine, the tokenizer, and whether the server takes work right now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmservice_server.api.backlog import Backlog, QueueBound, Refusal
from llmservice_server.api.error import ApiError
from llmservice_server.api.long_input import LongInput, default_max_body_bytes
from llmservice_server.engine.request import LANES
from llmservice_server.engine_client import EngineClient
from llmservice_server.messages import Ready
from llmservice_server.metrics import Metrics
from llmservice_server.text.tokenizer import Tokenizer

_RETRY_LOADING_S = 5
_RETRY_QUEUE_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the HTTP process; the engine has its own."""

    served_model_names: tuple[str, ...]  # the first is the one that answers carry
    queue_bounds: Mapping[str, QueueBound]  # by lane
    request_timeout_s: float | None
    queue_timeout_s: float | None
    default_lane: str = LANES[0]  # of requests without an API key that has one; the highest that they may choose
    max_queued_embeddings: int = 4096
    body_timeout_s: float | None = 60.0  # for a body to be complete
    max_body_bytes: int | None = None  # None: as the model's context asks for
    stuck_after_s: float | None = (
        300.0  # without a finished step, while there is work, the engine is killed; None: never
    )
    api_key_file: Path | None = None  # None: everybody may use the API
    shape: Mapping[str, Any] | None = None  # the model's figures in the planner's camelCase; None: not known to it


@dataclass(slots=True, kw_only=True)
class ServerState:
    config: ServeConfig
    engine: EngineClient
    metrics: Metrics
    backlog: Backlog = field(init=False)
    tokenizer: Tokenizer | None = None
    long_input: LongInput = field(default_factory=LongInput)
    draining: bool = False
    num_active: int = 0  # HTTP requests to the API under way, the sending of their answers included
    body_deadlines: set[asyncio.Timeout] = field(default_factory=set)  # of bodies that are not complete
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while there are none

    @property
    def ill(self) -> str | None:
        """Why the process should be restarted; None while it should not. Load alone is no reason."""
        if self.engine.failure is not None:
            return f"the engine has failed: {self.engine.failure}"
        return None

    @property
    def unready(self) -> str | None:
        """Why the server takes no work now; None when it does."""
        if (illness := self.ill) is not None:
            return illness
        if self.draining:
            return "the server is shutting down"
        if self.engine.ready is None or self.tokenizer is None:
            return "the model is being loaded"
        return None

    def __post_init__(self) -> None:
        self.idle.set()
        self.backlog = Backlog(self.config.queue_bounds, time.monotonic())

    def drain(self) -> None:
        """Take no more work: neither new requests nor those whose bodies are not complete."""
        self.draining = True
        for deadline in self.body_deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    @asynccontextmanager
    async def body_deadline(self) -> AsyncIterator[None]:
        """Around the reading of a body. Raises TimeoutError at the end of its time, or when the server drains."""
        async with asyncio.timeout(self.config.body_timeout_s) as deadline:
            self.body_deadlines.add(deadline)
            try:
                yield
            finally:
                self.body_deadlines.remove(deadline)

    def enter(self) -> None:
        """An API request has begun."""
        self.num_active += 1
        self.idle.clear()

    def leave(self) -> None:
        """An API request is answered."""
        self.num_active -= 1
        if self.num_active == 0:
            self.idle.set()

    def require_ready(self) -> tuple[Ready, Tokenizer]:
        """What serving needs. Raises ApiError (503) where the server takes no work."""
        if (reason := self.unready) is not None:
            raise self.not_ready(reason)
        assert self.engine.ready is not None  # noqa: S101  # `unready` has looked
        assert self.tokenizer is not None  # noqa: S101
        return self.engine.ready, self.tokenizer

    @property
    def max_body_bytes(self) -> int:
        """Of a request. Raises ApiError (503) where the server takes no work."""
        ready, _ = self.require_ready()
        given = self.config.max_body_bytes
        return default_max_body_bytes(ready.max_model_len) if given is None else given

    def not_ready(self, reason: str, *, closes: bool = False) -> ApiError:
        message = f"{reason}: try again"
        return ApiError(503, message, code="not_ready", retry_after_s=_RETRY_LOADING_S, closes=closes)

    def require_room(self, lane: str, num_tokens: list[int]) -> None:
        """Raises ApiError (429) where sequences with prompts of `num_tokens` are too many for the lane's queue."""
        if (refusal := self._why_refused(lane, num_tokens)) is not None:
            raise ApiError(429, refusal.message, code="queue_full", retry_after_s=refusal.retry_after_s)

    def require_some_room(self) -> None:
        """Raises ApiError (429) where no lane takes anything; the lane may be named by the body, not yet read."""
        refusals = [self._why_refused(lane, [0]) for lane in self.config.queue_bounds]
        if None not in refusals:
            self.require_room(next(iter(self.config.queue_bounds)), [0])

    def _why_refused(self, lane: str, num_tokens: list[int]) -> Refusal | None:
        ready, _ = self.require_ready()
        stats = self.engine.stats
        return self.backlog.why_refused(
            lane,
            num_tokens,
            max_num_seqs=ready.max_num_seqs,
            engine_lets_wait=stats is not None and any(stats.num_waiting.values()),
            now=time.monotonic(),
        )

    def require_embedding_room(self, asked: int) -> None:
        """Raises ApiError (429) where `asked` more inputs would be too many."""
        self.require_ready()
        waiting, bound = self.engine.num_embedding_inputs, self.config.max_queued_embeddings
        if waiting + asked > bound:
            raise ApiError(
                429,
                f"the queue is full: {waiting} inputs are waiting for their embeddings, and at most {bound} may wait",
                code="queue_full",
                retry_after_s=_RETRY_QUEUE_S,
            )

    def require_model(self, name: str) -> None:
        """Raises ApiError (404) where the request means another model."""
        names = self.config.served_model_names
        if name not in names:
            message = f"The model `{name}` does not exist: this server has {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
