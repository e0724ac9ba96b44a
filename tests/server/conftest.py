"""A tiny checkpoint and servers that run it: the real command, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

import harness.gpu.triton_interpreter  # noqa: F401 - before a test imports transformers, which imports Triton's functions
from harness.engine_driver import VOCAB
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

LLMSERVICE = Path(sys.executable).with_name("llmservice")
DEADLINE_S = 60.0

T = TypeVar("T")


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class ServerProcess:
    """`llmservice serve` on free ports of the loopback."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [LLMSERVICE, "serve", "--model", model, "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
        command += ["--kv-cache-memory", "32MiB", "--threads", "1", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_log, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    @property
    def listening(self) -> dict[str, Any]:
        """The line of the log that names the ports."""
        return self.wait_for(lambda: next((line for line in self.log if line["message"] == "listening"), None))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening['port']}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.listening['metrics_port']}"

    def wait_for(self, look: Callable[[], T | None]) -> T:
        """Poll until `look` finds something, at ever longer intervals: a poll takes both processes' time."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < DEADLINE_S:
            if (found := look()) is not None and found is not False:
                return found
            time.sleep(max(0.01, min(waited_s / 8, 0.2)))
        raise AssertionError(f"not seen within {DEADLINE_S} s; the log: {self.log[-5:]}, errors: {self.errors}")

    def wait_until_ready(self) -> ServerProcess:
        self.wait_for(lambda: self.get("/ready")[0] == 200)
        return self

    def wait_for_exit(self) -> int:
        status = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return status

    def get(self, path: str, url: str | None = None) -> tuple[int, bytes]:
        return self.request("GET", path, url=url)

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        """Status and decoded JSON."""
        answer = self.send("POST", path, body)
        return answer.status, json.loads(answer.body)

    def request(self, method: str, path: str, body: bytes | None = None, url: str | None = None) -> tuple[int, bytes]:
        """At the API's port, or at `url`."""
        answer = self.send(method, path, body, url=url)
        return answer.status, answer.body

    def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None,
        headers: Mapping[str, str] = MappingProxyType({}),
        url: str | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection((url or self.url).removeprefix("http://"), timeout=DEADLINE_S)
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples of one moment, by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics", self.metrics_url)[1].decode())
        samples = (sample for family in families for sample in family.samples)
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def metric(self, name: str, /, **labels: str) -> float:
        """The sum of /metrics' samples that have these labels."""
        wanted = labels.items()
        return sum(value for (one, has), value in self.metrics().items() if one == name and wanted <= has)

    def wait_until_idle(self) -> None:
        """No block is held, nothing runs and nothing waits, all in one moment."""

        def idle() -> bool | None:
            values = self.metrics()
            blocks = {dict(labels)["state"]: value for (name, labels), value in values.items() if "_blocks" in name}
            busy = [value for (name, _), value in values.items() if name.startswith("llmservice_num_requests_")]
            return (blocks["held"] == 0 and not any(busy)) or None

        self.wait_for(idle)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait_for_exit()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose block takes 2 * 2 * 16 * 2 * 8 * 4 bytes, for engines without a process of their own."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=VOCAB, max_position_embeddings=256)
    write_tiny_model(folder, spec)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(
        directory, TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, max_position_embeddings=512)
    )
    return directory


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    """One for all tests that leave it as they found it."""
    process = ServerProcess(tiny_model, "--served-model-name", "tiny", "alias")
    yield process.wait_until_ready()
    process.close()


@pytest.fixture(scope="module")
def shared_server(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """One for each set of flags of a module, for tests that leave it as they found it: a start takes seconds."""
    processes: dict[tuple[str, ...], ServerProcess] = {}

    def find(*flags: str) -> ServerProcess:
        if flags not in processes:
            processes[flags] = ServerProcess(tiny_model, "--served-model-name", "tiny", *flags)
        return processes[flags].wait_until_ready()

    yield find
    for process in processes.values():
        process.close()


@pytest.fixture
def start_server(tiny_model: Path) -> Iterator[Callable[..., ServerProcess]]:
    """A server of the test's own: `start_server("--flag", ...)`; ended with the test."""
    processes: list[ServerProcess] = []

    def start(*flags: str, model: Path = tiny_model) -> ServerProcess:
        processes.append(ServerProcess(model, "--served-model-name", "tiny", *flags))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def server_process() -> type[ServerProcess]:
    """For servers of other checkpoints; the caller closes them."""
    return ServerProcess
