"""The client of the engine: starts its process, sends it requests, routes its outputs to the streams of requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc.engine_process import EngineSettings
from llmservice_server.ipc.environment import for_computing
from llmservice_server.runtime.start_record import StartRecord
from llmservice_server.types.messages import (
    Abort,
    AdapterInfo,
    AdapterReport,
    Embed,
    Embedded,
    Failed,
    FromEngine,
    GenerateRequest,
    LoadAdapter,
    Output,
    Ready,
    Shutdown,
    Stats,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)

# -P: a file named torch.py in the working directory must not be imported.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "llmservice_server.ipc.engine_process")
_DISCONNECT_S = 0.2  # how long ZeroMQ may take to notice that the engine has exited, if it ever connected
_STEPS_PER_ITERATION = (2, 8)
"""Steps received between two iterations of the event loop, in which streams are written and probes answered: with few
streams, and with many. With more than one, a process that lags behind its engine writes several steps at once, since a
write costs more than a token (`micro_http` and `micro_stream_chunks` in docs/benchmarks.md)."""
_MANY_STREAMS = 256
_CHECKS_PER_TIMEOUT = 10  # whether the engine is stuck
_EXIT_S = 5.0  # how long the engine may take to exit after Shutdown


class EngineDeadError(Exception):
    """The engine process has ended. The message is the reason, where it is known."""


class OutputStream:
    """The engine's outputs for the answers to one request; wakes its reader once a step, however many answers moved."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()  # looking it up costs a system call each time
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Output]:
        """The outputs since the last call, at least one. Raises the exception passed to `fail`."""
        if not self._outputs and self._failure is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        outputs, self._outputs = self._outputs, []
        return outputs

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """End the wait of `next` with an exception."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine process. Created and used on the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        log_level: str,
        *,
        on_ready: Callable[[Ready], None],
        on_stats: Callable[[Stats], None],
        on_adapters: Callable[[Mapping[str, AdapterInfo]], None] = lambda _: None,
        command: Sequence[str] = ENGINE_COMMAND,
        stuck_after_s: float | None = None,
    ) -> None:
        """An engine that has work and finishes no step for `stuck_after_s` is killed; None: never."""
        self._command = command
        self._stuck_after_s = stuck_after_s
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.failure: str | None = None
        self._on_ready = on_ready
        self._on_stats = on_stats
        self._on_adapters = on_adapters
        self.adapters: dict[str, AdapterInfo] = {}  # by name
        self._changes: dict[str, asyncio.Future[AdapterReport]] = {}  # of adapters, not answered
        self._streams: dict[str, OutputStream] = {}
        self._embeds: dict[str, asyncio.Future[Embedded]] = {}
        self.embedding_inputs = Counter[str | None]()  # sent and not answered, of each API key
        self._unanswered_s: float | None = None  # since when a message is due; one follows each step
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._process: asyncio.subprocess.Process | None = None
        self._exited = asyncio.Event()
        self._stopping = False
        self._directory = _socket_directory()
        self._settings = EngineSettings(
            config=config,
            log_level=log_level,
            to_engine=f"ipc://{self._directory.name}/to-engine",
            from_engine=f"ipc://{self._directory.name}/from-engine",
        )
        self._context = zmq.asyncio.Context()
        self._to_engine: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._to_engine.set_hwm(0)  # a send never blocks; admission control bounds what is in flight
        self._to_engine.connect(self._settings.to_engine)
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.set_hwm(0)
        self._from_engine.bind(self._settings.from_engine)

    @property
    def silent_s(self) -> float:
        """For how long the engine has had work and finished no step; 0 where it has none."""
        return 0.0 if self._unanswered_s is None else time.monotonic() - self._unanswered_s

    async def run(self) -> None:
        """Start the process and read its messages until it ends. Sets `failure`, unless `stop` ended it."""
        try:
            self._ended(await self._run_process())
        finally:
            self._to_engine.close(linger=0)  # it belongs to a shadow context, so `destroy` would wait for it
            self._context.destroy(linger=0)
            self._directory.cleanup()
            self._exited.set()

    async def _run_process(self) -> int:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env=for_computing(os.environ),
            start_new_session=True,  # Ctrl-C and a SIGTERM to the group reach this process only, which drains first
        )
        if self._stopping:  # `stop` was called while the process was starting
            process.kill()
        reader = asyncio.create_task(self._read())
        disconnected = asyncio.ensure_future(
            recv_monitor_message(self._from_engine.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        )
        watchdog = asyncio.create_task(self._kill_when_stuck(process))
        try:
            assert process.stdin is not None  # noqa: S101  # it is a pipe
            process.stdin.write(self._settings.encode())
            exited = asyncio.create_task(process.wait())
            await asyncio.wait([exited, reader], return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await asyncio.wait([reader, disconnected], timeout=_DISCONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            # What it sent before is all here by now, and gives the reader turns.
            while not reader.done() and await self._from_engine.poll(0):  # noqa: ASYNC110 - no event says "read"
                await asyncio.sleep(0)
            if reader.done():
                reader.result()  # raises: reading ends only by an error
            return await exited
        finally:
            reader.cancel()
            disconnected.cancel()
            watchdog.cancel()
            if process.returncode is None:
                process.kill()
            if self._stopping or self.failure is not None:  # this process ended it, not a lack of memory
                StartRecord(self._settings.config.start_record).end()

    async def _kill_when_stuck(self, process: asyncio.subprocess.Process) -> None:
        """Its streams then end with an error."""
        timeout_s = self._stuck_after_s
        if timeout_s is None:
            return
        period_s = timeout_s / _CHECKS_PER_TIMEOUT
        while self.silent_s <= timeout_s:
            checked_s = time.monotonic()
            await asyncio.sleep(period_s)
            if self._unanswered_s is not None and time.monotonic() - checked_s > 2 * period_s:
                self._unanswered_s = time.monotonic()  # this process was suspended, and so may have been the engine
        self.failure = f"the engine is stuck: it has work and has finished no step for {self.silent_s:.0f} s"
        process.kill()

    def _ended(self, status: int) -> None:
        if not self._stopping:
            self.failure = self.failure or f"the engine process ended unexpectedly, {_describe(status)}"
        self.ready = None
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(self.failure or "the server is shutting down"))
        self._streams.clear()
        unanswered: list[asyncio.Future[Any]] = [*self._embeds.values(), *self._changes.values()]
        for answer in unanswered:
            if not answer.cancelled():
                answer.set_exception(EngineDeadError(self.failure or "the server is shutting down"))
        self._embeds.clear()
        self._changes.clear()

    async def _read(self) -> None:
        """Receiving a queued message does not yield to the event loop, so this does after every few messages."""
        while True:
            for _ in range(self._steps_per_iteration):
                self._take(self._decoder.decode(await self._from_engine.recv()))
            await asyncio.sleep(0)

    @property
    def _steps_per_iteration(self) -> int:
        few, many = _STEPS_PER_ITERATION
        return min(many, few + (many - few) * len(self._streams) // _MANY_STREAMS)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(outputs=outputs, stats=stats, adapters=reports):
                self.stats = stats
                self._on_stats(stats)
                for output in outputs:
                    self._route(output)
                for report in reports:
                    self._take_report(report)
            case Embedded() as embedded:
                answer = self._embeds.pop(embedded.request_id, None)
                if answer is not None and not answer.cancelled():
                    answer.set_result(embedded)
            case Ready() as ready:
                self.ready = ready
                self._on_ready(ready)
            case Failed(error=error):
                self.failure = error
        # after the message is handled: without unfinished requests the engine sends nothing, possibly for hours
        self._unanswered_s = time.monotonic() if self._streams or self._embeds or self._changes else None

    def _take_report(self, report: AdapterReport) -> None:
        self.adapters = {adapter.name: adapter for adapter in report.adapters}
        self._on_adapters(self.adapters)
        answer = self._changes.pop(report.request_id or "", None)
        if answer is not None and not answer.cancelled():
            answer.set_result(report)

    def _route(self, output: Output) -> None:
        if output.finish_reason is None:
            stream = self._streams.get(output.request_id)
        else:
            stream = self._streams.pop(output.request_id, None)
        if stream is not None:  # None: aborted while the step was running
            stream.put(output)

    def require_ready(self) -> Ready:
        """Raises EngineDeadError where the engine does not run."""
        if self.ready is None:
            raise EngineDeadError(self.failure or "the engine is not running")
        return self.ready

    def generate(self, requests: Sequence[GenerateRequest]) -> OutputStream:
        """Send requests to the engine; a caller that leaves the stream early has to `abort` them."""
        self.require_ready()
        messages = [self._encoder.encode(request) for request in requests]  # raises before anything is registered
        stream = OutputStream()
        for request, message in zip(requests, messages, strict=True):
            self._streams[request.request_id] = stream
            self._send_encoded(message)
        return stream

    def abort(self, request_ids: Sequence[str], *, finished: bool = False) -> None:
        """Stop requests and free their blocks; `finished` where a stop string ended them. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if known:
            self._send(Abort(request_ids=known, finished=finished))

    def embed(
        self, inputs: list[list[int]], type_ids: Sequence[list[int]] = (), client: str | None = None
    ) -> asyncio.Future[Embedded]:
        """The vectors of lists of token ids; `type_ids` are those of pairs. Cancelling it cancels the request.

        The inputs are counted at once: others that come at the same time find them in `embedding_inputs`.
        Raises EngineDeadError.
        """
        self.require_ready()
        request_id = uuid.uuid4().hex
        embed = Embed(request_id=request_id, inputs=inputs, type_ids=list(type_ids), client=client)
        message = self._encoder.encode(embed)

        def forget(_: object) -> None:
            self.embedding_inputs[client] -= len(inputs)
            if not self.embedding_inputs[client]:
                del self.embedding_inputs[client]
            if self._embeds.pop(request_id, None) is not None:
                self._send(Abort(request_ids=[request_id]))

        answer: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(forget)
        self._embeds[request_id] = answer
        self.embedding_inputs[client] += len(inputs)
        self._send_encoded(message)
        return answer

    async def load_adapter(self, name: str, folder: str, *, pinned: bool = False) -> AdapterReport:
        """Load a LoRA adapter, or another version of one. Raises EngineDeadError."""
        return await self._change(LoadAdapter(request_id=uuid.uuid4().hex, name=name, folder=folder, pinned=pinned))

    async def unload_adapter(self, name: str) -> AdapterReport:
        """Forget an adapter; requests that use it are computed to their end. Raises EngineDeadError."""
        return await self._change(UnloadAdapter(request_id=uuid.uuid4().hex, name=name))

    async def _change(self, message: LoadAdapter | UnloadAdapter) -> AdapterReport:
        self.require_ready()
        answer: asyncio.Future[AdapterReport] = asyncio.get_running_loop().create_future()
        self._changes[message.request_id] = answer
        self._send(message)
        return await answer

    def _send(self, message: ToEngine) -> None:
        self._send_encoded(self._encoder.encode(message))

    def _send_encoded(self, message: bytes) -> None:
        self._unanswered_s = self._unanswered_s or time.monotonic()
        self._to_engine.send(message)

    async def stop(self) -> None:
        """Ask the engine to exit, and kill it where it does not. `run` returns once it has exited."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        if self.ready is not None:
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _EXIT_S)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it reads no messages while it loads


def _socket_directory() -> tempfile.TemporaryDirectory[str]:
    """Of mode 0700, as prompts pass through it; under /tmp where TMPDIR is too long for the path of a socket."""
    longest = zmq.IPC_PATH_MAX_LEN - len("/llmservice-12345678/from-engine")
    fits = len(os.fsencode(tempfile.gettempdir())) <= longest
    return tempfile.TemporaryDirectory(prefix="llmservice-", dir=None if fits else "/tmp")  # noqa: S108


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}" + (" (out of memory?)" if -status == signal.SIGKILL else "")
    return f"killed by signal {-status}"
