"""What the endpoints share: the settings, the engine, the tokenizer, and whether the server accepts requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmservice_planner.sizing.request import EXPECTED_TOKENS
from llmservice_server.engine.admission_queue import AdmissionQueue, QueueBound, Refusal, limit_of
from llmservice_server.engine.config import LANES
from llmservice_server.http.arrivals import Arrivals
from llmservice_server.http.error import ApiError, invalid
from llmservice_server.ipc.client import EngineClient
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.text.chat_formats import FormatNames
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import AdapterInfo, Ready, Task

_ACTIVE = ("/v1/", "/v2/", "/rerank", "/tokenize", "/detokenize")


class Activity:
    """ASGI middleware: a request counts until the last byte of its answer is handed over."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_ACTIVE):
            await self._app(scope, receive, send)
            return
        state = self._state
        state.num_active += 1
        state.idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            state.num_active -= 1
            if state.num_active == 0:
                state.idle.set()


_RETRY_LOADING_S = 5
_RETRY_QUEUE_S = 1
_BODY_BYTES = 2**20
_TEXTS_BODY_BYTES = 16 * 2**20  # many short ones
_BODY_BYTES_PER_TOKEN = 64  # several times what text, ids or escaped JSON take


_WHAT_IT_DOES: Mapping[Task, str] = {
    "generate": "this model generates text and scores no pairs: use /v1/chat/completions, /v1/completions or "
    "/v1/embeddings, or a cross-encoder (…ForSequenceClassification) for this endpoint",
    "embed": "this model has no output head, it embeds texts: use /v1/embeddings, or another model for this endpoint",
    "score": "this model is a cross-encoder, it scores pairs of texts: use /v1/rerank or /v1/score, or another model "
    "for this endpoint",
}


class Serving(NamedTuple):
    """What a request needs of the engine and the model; exists only while the server accepts requests."""

    ready: Ready
    tokenizer: Tokenizer


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
    stuck_after_s: float | None = 300.0
    """Without a finished step, while there is work, after which the engine is killed; None: never."""
    api_key_file: Path | None = None  # None: no key is needed
    gateway_keys: Path | None = None  # a file with the public keys of the gateway that all requests come from
    audience: str = ""  # namespace/name of the LLMService, which the gateway's tokens must be for
    expected_tokens: int = EXPECTED_TOKENS  # of a request, prompt and answer, as long as few have ended
    shape: Mapping[str, Any] | None = None
    """The model's figures in the planner's camelCase; None: a family that it does not know."""
    generation_config: Literal["auto", "vllm"] = "auto"  # auto: sampling defaults from the file; vllm: none
    chat_template: Path | None = None  # a file; None: the tokenizer's own
    formats: FormatNames = field(default_factory=FormatNames)  # of tool calls and reasoning
    cors_allow_origins: tuple[str, ...] = ()
    max_loras: int = 0  # adapters in memory at once; their names are models' names, too
    enable_lora_updates: bool = False  # clients may load and unload adapters
    adapters_file: Path | None = None  # a list of adapters that the server follows
    adapters_dir: Path | None = None  # where it fetches them to
    strict_parameters: bool = False  # unknown parameters are refused instead of ignored


@dataclass(slots=True, kw_only=True)
class ServerState:
    config: ServeConfig
    engine: EngineClient
    metrics: Metrics
    admission_queue: AdmissionQueue = field(init=False)
    arrivals: Arrivals = field(init=False)
    tokenizer: Tokenizer | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # of requests that do not set them
    adapter_failures: dict[tuple[str, str], str] = field(default_factory=dict)  # by name and URI, of those listed
    adapter_locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)  # by name
    adapter_uris: dict[str, str] = field(default_factory=dict)  # by name, of those that a file lists
    adapters_pending: bool = False  # those that are listed at the start are not loaded yet
    draining: bool = False
    num_active: int = 0  # HTTP requests to the API under way, the sending of their answers included
    body_deadlines: set[asyncio.Timeout] = field(default_factory=set)  # of bodies that are not complete
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while there are none

    @property
    def why_unhealthy(self) -> str | None:
        """Why the process should be restarted; None while it should not. Load is no reason."""
        return None if self.engine.failure is None else f"the engine has failed: {self.engine.failure}"

    @property
    def why_unready(self) -> str | None:
        """Why the server accepts no requests now; None when it does."""
        if (reason := self.why_unhealthy) is not None:
            return reason
        if self.draining:
            return "the server is shutting down"
        if self.engine.ready is None or self.tokenizer is None:
            return "the model is being loaded"
        if self.adapters_pending:
            return "the adapters are being loaded"
        return None

    def __post_init__(self) -> None:
        self.idle.set()
        self.admission_queue = AdmissionQueue(self.config.queue_bounds, time.monotonic())
        self.arrivals = Arrivals(self.metrics, self.config.expected_tokens)

    def drain(self) -> None:
        """Accept no more requests: neither new ones nor those whose bodies are not complete."""
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

    def require_ready(self) -> Serving:
        """Raises ApiError (503) where the server accepts no requests."""
        if (reason := self.why_unready) is not None:
            raise self.not_ready(reason)
        assert self.engine.ready is not None  # noqa: S101  # `why_unready` has checked
        assert self.tokenizer is not None  # noqa: S101
        return Serving(self.engine.ready, self.tokenizer)

    def max_body_bytes(self, serving: Serving, *, many_texts: bool) -> int:
        """By default room for a prompt that fills the context, however it is written, and for the other fields."""
        if self.config.max_body_bytes is not None:
            return self.config.max_body_bytes
        of_prompt = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * serving.ready.max_model_len
        return max(of_prompt, _TEXTS_BODY_BYTES) if many_texts else of_prompt

    def not_ready(self, reason: str, *, closes: bool = False) -> ApiError:
        message = f"{reason}: try again"
        return ApiError(503, message, code="not_ready", retry_after_s=_RETRY_LOADING_S, closes=closes)

    def require_room(
        self, serving: Serving, lane: str, num_tokens: list[int], predicted_tokens: float, client: str | None
    ) -> None:
        """Raises ApiError (429) where sequences with prompts of `num_tokens` are too many for the lane's queue.

        `predicted_tokens`: of all their answers.
        """
        if (refusal := self._why_refused(serving, lane, num_tokens, predicted_tokens, client)) is not None:
            raise _queue_full(refusal)

    def require_some_room(self, serving: Serving, lane: str, client: str | None) -> None:
        """Raises ApiError (429) where no lane has room, since the body, which may name another one than `lane`, is not
        read yet.
        """
        refusals = {
            each: self._why_refused(serving, each, [0], 0.0, client) for each in {lane, *self.config.queue_bounds}
        }
        refusal = refusals[lane]
        if refusal is not None and None not in refusals.values():
            raise _queue_full(refusal)

    def _why_refused(
        self, serving: Serving, lane: str, num_tokens: list[int], predicted_tokens: float, client: str | None
    ) -> Refusal | None:
        stats = self.engine.stats
        return self.admission_queue.why_refused(
            lane,
            num_tokens,
            predicted_tokens=predicted_tokens,
            client=client,
            max_num_seqs=serving.ready.max_num_seqs,
            engine_lets_wait=stats is not None and any(stats.num_waiting.values()),
            now=time.monotonic(),
        )

    def require_embedding_room(self, asked: int, client: str | None) -> None:
        """Raises ApiError (429) where `asked` more inputs would be too many; the last fifth is for keys with few."""
        inputs, bound = self.engine.embedding_inputs, self.config.max_queued_embeddings
        waiting, clients = inputs.total(), inputs.keys() | {client}
        limit = bound if client is None else limit_of(bound, inputs[client] + asked, len(clients))
        if waiting + asked > limit:
            raise ApiError(
                429,
                f"the queue is full: {waiting} inputs are waiting for their embeddings, and at most {limit} may wait",
                code="queue_full",
                retry_after_s=_RETRY_QUEUE_S,
            )

    def require_task(self, serving: Serving, task: Task) -> None:
        """Raises ApiError (400) where the model does something else. A decoder gives embeddings as well."""
        does = serving.ready.task
        if does != task and (does, task) != ("generate", "embed"):
            raise invalid(_WHAT_IT_DOES[does], param="model", code="unsupported_task")

    def report_adapters(self) -> None:
        """Set the metric, after a change of the engine's adapters or of `adapter_failures`."""
        loaded = [(each.name, each.version, each.state) for each in self.engine.adapters.values()]
        self.metrics.set_adapters([*loaded, *((name, "", "failed") for name, _ in self.adapter_failures)])

    def why_not_an_adapter(self, name: str) -> str | None:
        """Why an adapter cannot have this name."""
        if name in self.config.served_model_names:
            return f"the adapter's name is {name}, which is the model's own: choose another"
        return None

    def require_base_model(self, name: str) -> None:
        """Raises ApiError: 404 where the request means another model, 400 for an adapter."""
        if self.require_model(name) is not None:
            message = f"{name} is a LoRA adapter, which generates text only: use {self.config.served_model_names[0]}"
            raise invalid(message, param="model", code="unsupported_task")

    def require_model(self, name: str) -> AdapterInfo | None:
        """The adapter that a request means, None for the model itself. Raises ApiError (404) for other names."""
        names = self.config.served_model_names
        if name in names:
            return None
        if (adapter := self.engine.adapters.get(name)) is None:
            names = (*names, *self.engine.adapters)
            message = f"The model `{name}` does not exist: this server has {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return adapter


def _queue_full(refusal: Refusal) -> ApiError:
    return ApiError(429, refusal.message, code="queue_full", retry_after_s=refusal.retry_after_s)


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def serving(request: Request) -> Serving:
    """Found once per request. Raises ApiError (503) where the server accepts no requests."""
    found: Serving | None = request.scope.get("serving")
    if found is None:
        found = request.scope["serving"] = server_state(request).require_ready()
    return found


async def _server_state(request: Request) -> ServerState:  # FastAPI runs dependencies that are not async in a thread
    return server_state(request)


async def _serving(request: Request) -> Serving:
    return serving(request)


StateDep = Annotated[ServerState, Depends(_server_state)]
ServingDep = Annotated[Serving, Depends(_serving)]
