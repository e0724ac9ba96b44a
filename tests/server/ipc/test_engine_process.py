"""The engine process on its own: its environment, its messages, and how it exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc.engine_process import EngineSettings
from llmservice_server.ipc.environment import for_computing
from llmservice_server.types.messages import (
    Failed,
    FromEngine,
    GenerateRequest,
    Ready,
    SamplingParams,
    Shutdown,
    StepOutputs,
)

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llmservice_server.ipc.engine_process"]


def _settings(model: Path, directory: Path) -> EngineSettings:
    return EngineSettings(
        config=EngineConfig(model=model, kv_cache_memory_bytes=2**20, threads=1, max_model_len=256),
        log_level="warning",
        to_engine=f"ipc://{directory}/to",
        from_engine=f"ipc://{directory}/from",
    )


class Parent:
    """The HTTP process's end of the sockets and of the pipe."""

    def __init__(self, settings: EngineSettings) -> None:
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.connect(settings.to_engine)
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.bind(settings.from_engine)
        self.process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(settings.encode())
        self.process.stdin.flush()

    def send(self, message: GenerateRequest | Shutdown) -> None:
        self._to_engine.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        assert self._from_engine.poll(60_000)
        message: FromEngine = msgspec.msgpack.decode(self._from_engine.recv(), type=FromEngine)
        return message

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self._context.destroy(linger=0)


def test_settings_survive_the_pipe(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "model", tmp_path)
    assert EngineSettings.decode(settings.encode()) == settings
    assert settings.encode().count(b"\n") == 1


def test_a_request_gets_its_tokens_then_the_engine_idles_and_exits_on_shutdown(
    tiny_model: Path, tmp_path: Path
) -> None:
    parent = Parent(_settings(tiny_model, tmp_path))
    try:
        ready = parent.receive()
        assert isinstance(ready, Ready)
        assert ready.max_model_len == 256
        sampling = SamplingParams(max_tokens=5, temperature=0)
        parent.send(GenerateRequest(request_id="a", prompt_token_ids=[5, 6, 7], sampling=sampling, arrival_s=0.0))
        tokens: list[int] = []
        reason = None
        while reason is None:
            message = parent.receive()
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                tokens += output.token_ids
                reason = output.finish_reason
        assert (len(tokens), reason) == (5, "length")
        assert (message.stats.num_running, message.stats.blocks_held) == ({}, 0)
        parent.send(Shutdown())
        assert parent.process.wait(60) == 0
    finally:
        parent.close()


def test_an_engine_that_cannot_start_reports_why_and_exits(tmp_path: Path) -> None:
    parent = Parent(_settings(tmp_path / "nothing", tmp_path))
    try:
        failed = parent.receive()
        assert isinstance(failed, Failed)
        assert "nothing" in failed.error
        assert parent.process.wait(60) == 1
    finally:
        parent.close()


def test_the_end_of_the_pipe_ends_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    parent = Parent(_settings(tiny_model, tmp_path))
    assert isinstance(parent.receive(), Ready)
    parent.close()
    assert parent.process.returncode == 1


VARIABLE = """
import os, sys, llmservice_server
assert "torch" not in sys.modules
llmservice_server.LLM
print(os.environ["THP_MEM_ALLOC_ENABLE"])
"""
PAGES = """
import torch
kept = torch.zeros(16 << 20)
pages = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
print(pages[0].split()[1])
"""


def printed(code: str, **environment: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.split()


def kernel_has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not kernel_has_huge_pages(), reason="this kernel has huge pages disabled")
def test_large_tensors_lie_in_huge_pages() -> None:
    """Of 64 MiB, in KiB, after `LLM` is imported."""
    variable, kib = printed(VARIABLE + PAGES)
    assert variable == "1"
    assert int(kib) > 32 << 10


def test_a_setting_of_the_caller_takes_precedence() -> None:
    assert printed(VARIABLE, THP_MEM_ALLOC_ENABLE="0") == ["0"]


def test_the_allocator_grows_its_segments_and_threads_wait_a_little() -> None:
    environment = for_computing({"PATH": "/bin", "GOMP_SPINCOUNT": "7"})
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert (environment["PATH"], environment["GOMP_SPINCOUNT"]) == ("/bin", "7")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_own_allocator_is_left_alone(name: str) -> None:
    environment = for_computing({name: "max_split_size_mb:64"})
    assert {key: value for key, value in environment.items() if "ALLOC_CONF" in key} == {name: "max_split_size_mb:64"}
