"""The engine process: receive messages, step, send the outputs; exit on `Shutdown` or when the parent process ends.

Started as `python -m llmservice_server.ipc.engine_process`, with an `EngineSettings` as JSON in the first line of
standard input. The pipe stays open as long as the parent lives, so its end means that the parent has ended, even by
SIGKILL.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc import json_log
from llmservice_server.runtime.start_record import StartRecord
from llmservice_server.types.errors import StartError
from llmservice_server.types.messages import (
    Abort,
    Embed,
    Failed,
    FromEngine,
    GenerateRequest,
    LoadAdapter,
    Shutdown,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from llmservice_server.engine.engine import Engine
    from llmservice_server.runtime.encoders import EncoderEngine

_IDLE_POLL_MS = 10_000  # an upper bound: a message ends the wait at once


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process receives at start."""

    config: EngineConfig
    log_level: str
    to_engine: str  # zmq address, bound by the child
    from_engine: str  # zmq address, bound by the parent

    def encode(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> EngineSettings:
        return msgspec.json.decode(line, type=cls, dec_hook=_decode_path)


class EngineLoop:
    """Drives one engine from one socket to the other."""

    def __init__(self, engine: Engine | EncoderEngine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Returns on `Shutdown`."""
        self.send(self._engine.ready)
        step_s: float | None = None
        while self._receive():
            if self._engine.embedder.due_s() is not None:
                for embedded in self._engine.embed(step_s):
                    self.send(embedded)
            if self._engine.wait_s() == 0:
                began_s = time.perf_counter()
                self.send(self._engine.step())
                step_s = time.perf_counter() - began_s
            else:
                self.send(self._idle())
                step_s = None

    def _idle(self) -> StepOutputs:
        """Reports an idle engine after an abort of requests that had just finished: no step follows to report it."""
        stats = self._engine.stats()
        stats.batch_size = stats.iteration_tokens = 0  # the last step is already reported
        return StepOutputs(outputs=[], stats=stats)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def _receive(self) -> bool:
        """Handle every queued message, and wait for one where there is no work; False after `Shutdown`."""
        while (timeout_ms := self._timeout_ms()) > 0:
            if self._inbox.poll(timeout_ms):
                break
        while self._inbox.poll(0):
            match self._decoder.decode(self._inbox.recv()):
                case GenerateRequest() as request:
                    self._engine.add(request)
                case Embed() as embed:
                    if (refused := self._engine.embedder.add(embed, time.monotonic())) is not None:
                        self.send(refused)
                case Abort() as abort:
                    self._engine.embedder.abort(abort.request_ids)
                    self._engine.abort(abort.request_ids, finished=abort.finished)
                case LoadAdapter() | UnloadAdapter() as change:
                    self._engine.change_adapter(change)
                case Shutdown():
                    return False
        return True

    def _timeout_ms(self) -> int:
        """How long there is no work, unless a message arrives."""
        due_s = self._engine.embedder.due_s()
        embedding_s = math.inf if due_s is None else due_s - time.monotonic()
        return math.ceil(min(_IDLE_POLL_MS, embedding_s * 1000, self._engine.wait_s() * 1000))


def main(make_engine: Callable[[EngineConfig], Engine | EncoderEngine] | None = None) -> int:
    """`make_engine` replaces `Engine`: benchmarks use one that computes nothing."""
    # A signal to the whole control group (systemd) is meant for the parent, which drains and then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = EngineSettings.decode(sys.stdin.buffer.readline())
    json_log.configure(settings.log_level)
    threading.Thread(target=_exit_with_parent, args=(settings,), daemon=True).start()
    context = zmq.Context()
    outbox = _socket(context, zmq.PUSH)
    outbox.connect(settings.from_engine)
    inbox = _socket(context, zmq.PULL)
    inbox.bind(settings.to_engine)
    try:
        engine = (make_engine or _load)(settings.config)
        gc.collect()
        gc.freeze()  # the objects of weights and libraries live as long as the process: full collections skip them
        EngineLoop(engine, inbox, outbox).run()
    except StartError as error:
        outbox.send(msgspec.msgpack.encode(Failed(error=str(error))))
        return _close(context, 1)
    finally:
        StartRecord(settings.config.start_record).end()
    return _close(context, 0)


def _load(config: EngineConfig) -> Engine | EncoderEngine:
    gc.disable()  # most objects that imports make stay: searching them again and again delays the start
    from llmservice_server.runtime.encoders import is_encoder, load_encoder  # imports torch, as the next one:
    from llmservice_server.runtime.startup import load_engine  # seconds, in which the parent answers

    gc.freeze()
    gc.enable()
    if is_encoder(config.model):
        return load_encoder(config)
    return load_engine(config)


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)  # neither drop nor block: the HTTP process bounds what is in flight
    socket.setsockopt(zmq.LINGER, 1000)  # ms; enough for a last message, and no hang where the parent has ended
    return socket


def _close(context: zmq.Context[Any], status: int) -> int:
    context.destroy()  # waits until the last message is sent, at most LINGER
    return status


def _exit_with_parent(settings: EngineSettings) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    for address in (settings.to_engine, settings.from_engine):  # a killed parent cannot remove its files
        socket = Path(address.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            socket.unlink()
        with contextlib.suppress(OSError):
            socket.parent.rmdir()
    os._exit(1)


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise TypeError(f"{kind} in the engine's settings cannot be decoded")


if __name__ == "__main__":
    raise SystemExit(main())
