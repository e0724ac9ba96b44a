"""`llmservice serve`: listen at once, load, serve, drain, and exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from llmservice_httpserver.listening import HttpServer, bind
from llmservice_server.engine.config import EngineConfig
from llmservice_server.http.adapter_list import AdapterList
from llmservice_server.http.app import create_app, create_metrics_app
from llmservice_server.http.authentication import ApiKeys, Authenticator, GatewayKeys
from llmservice_server.http.state import ServeConfig, ServerState
from llmservice_server.http.tracing import tracer_provider
from llmservice_server.ipc.client import ENGINE_COMMAND, EngineClient
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.checkpoint_config import GenerationConfig
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import Ready

log = logging.getLogger("llmservice.server")

_LAST_ANSWERS_S = 1.0  # after the drain, or the engine's death: for error messages to reach their clients

LOADING_FAILED, SERVING_FAILED = 1, 3
"""Exit statuses: the server could not start, or its engine failed after it was ready."""


class ServeError(Exception):
    """The server had to stop: one sentence for the user, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where the HTTP process listens and when it ends."""

    host: str
    port: int  # 0: a free one, which the log names
    metrics_port: int  # of /metrics; the same as `port`: /metrics is served there; 0: a free one of its own, likewise
    drain_timeout_s: float
    metrics_prefix: str
    otlp_endpoint: str | None = None  # None: the environment's

    @property
    def shares_port(self) -> bool:
        """Whether the API and /metrics are served on one port."""
        return self.metrics_port == self.port != 0


class HttpProcess:
    """One server from start to end, on the running event loop; `engine_command` starts its engine process.

    Raises KeyFileError and TracingError.
    """

    def __init__(
        self,
        engine: EngineConfig,
        serve: ServeConfig,
        listen: ListenConfig,
        log_level: str,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        metrics = Metrics(listen.metrics_prefix, serve.served_model_names[0])
        self._engine_config = engine
        self._listen = listen
        self._state = ServerState(
            config=serve,
            engine=EngineClient(
                engine,
                log_level,
                on_ready=self._on_ready,
                on_stats=metrics.set_stats,
                on_adapters=lambda _: self._state.report_adapters(),
                command=engine_command,
                stuck_after_s=serve.stuck_after_s,
            ),
            metrics=metrics,
        )
        self._adapters = AdapterList.of(self._state)
        self._following: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._failure: str | None = None
        self._was_ready = False
        self._tracer = tracer_provider(listen.otlp_endpoint)
        app = create_app(self._state, _authenticator(serve), self._tracer, serves_metrics=listen.shares_port)
        self._api = HttpServer(app)
        self._metrics = None if listen.shares_port else HttpServer(create_metrics_app(self._state))

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ListenError, and ServeError where the engine or the tokenizer fails."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = self._start_serving()
        engine = asyncio.create_task(self._run_engine())
        tokenizer = asyncio.create_task(self._load_tokenizer())
        await self._stop.wait()
        if self._failure is None:
            await self._drain()
        self._state.drain()
        tokenizer.cancel()
        if self._following is not None:
            self._following.cancel()
        await self._state.engine.stop()
        await engine
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.idle.wait(), _LAST_ANSWERS_S)
        self._stop_serving()
        await asyncio.gather(*serving)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)  # sends what is left
        if self._failure is not None:
            raise ServeError(self._failure, SERVING_FAILED if self._was_ready else LOADING_FAILED)

    def _start_serving(self) -> list[asyncio.Task[None]]:
        """Listen on the ports and log them. Raises ListenError where one is taken."""
        host, port = self._listen.host, self._listen.port
        listeners = [(self._api, bind(host, port, "--port"))]
        fields = {"host": host, "port": listeners[0][1].getsockname()[1]}
        if self._metrics is not None:
            listeners.append((self._metrics, bind(host, self._listen.metrics_port, "--metrics-port")))
        log.info("listening", extra={"fields": {**fields, "metrics_port": listeners[-1][1].getsockname()[1]}})
        serving = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in listeners]
        for task in serving:
            task.add_done_callback(lambda _: self._stop.set())
        return serving

    def _stop_serving(self) -> None:
        self._api.should_exit = True
        self._api.force_exit = not self._state.idle.is_set()
        if self._metrics is not None:
            # A scrape that hangs does not delay the shutdown.
            self._metrics.should_exit = self._metrics.force_exit = True

    def _on_ready(self, ready: Ready) -> None:
        self._was_ready = True
        self._state.metrics.set_ready(ready)
        if self._adapters is not None:
            self._following = asyncio.create_task(self._adapters.run())
        fields = {name: getattr(ready, name) for name in ("max_model_len", "max_num_seqs", "num_blocks", "block_size")}
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: the collector need not scan it
        log.info("the engine is ready", extra={"fields": {**fields, "load_s": round(ready.load_s, 3)}})

    def _on_signal(self) -> None:
        """The first signal begins the drain, a second one ends it."""
        if self._state.draining:
            self._state.idle.set()
        self._state.drain()
        self._stop.set()

    async def _drain(self) -> None:
        log.info("draining", extra={"fields": {"active": self._state.num_active}})
        try:
            await asyncio.wait_for(self._state.idle.wait(), self._listen.drain_timeout_s)
        except TimeoutError:
            log.warning("drain timed out", extra={"fields": {"active": self._state.num_active}})

    async def _run_engine(self) -> None:
        try:
            await self._state.engine.run()
        finally:
            self._fail(self._state.engine.failure)

    async def _load_tokenizer(self) -> None:
        config, engine = self._state.config, self._engine_config
        try:
            if config.generation_config == "auto":
                self._state.sampling_defaults = GenerationConfig.of(engine.model).sampling_defaults
            tokenizer = await asyncio.to_thread(
                Tokenizer.load,
                engine.model,
                tokenizer_folder=engine.tokenizer,
                chat_template=config.chat_template,
                formats=config.formats,
            )
            names = tokenizer.formats.names
            fields = {"tool_call_format": names.tool_calls, "reasoning_format": names.reasoning}
            log.info("the tokenizer is loaded", extra={"fields": fields})
            self._state.tokenizer = tokenizer
        except (ModelLoadError, OSError) as error:
            self._fail(str(error))
        except Exception as error:  # of a library at odd files: without its end the server would never be ready
            log.exception("the tokenizer cannot be used")
            folder = engine.tokenizer or engine.model
            self._fail(f"the tokenizer in {folder} cannot be used ({error}): delete its files and fetch it again")

    def _fail(self, failure: str | None) -> None:
        self._failure = self._failure or failure
        self._stop.set()


def _authenticator(serve: ServeConfig) -> Authenticator | None:
    if serve.gateway_keys is not None:
        return GatewayKeys(serve.gateway_keys, serve.audience)
    return None if serve.api_key_file is None else ApiKeys(serve.api_key_file)
