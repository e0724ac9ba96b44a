"""The life of a server: it listens at once, drains on SIGTERM, and leaves with the right words and status."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.checkpoints.families import Family, save
from llmservice_server.backend.step_input import StepInput
from llmservice_server.commands import serve as serve_command
from llmservice_server.engine.config import EngineConfig, Implementation
from llmservice_server.runtime.startup import start
from llmservice_server.text.model_folder import served_folder

LONG = {"model": "tiny", "prompt": "Hello", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


class Background:
    """A request in a thread."""

    def __init__(self, send: Callable[[], tuple[int, Any]]) -> None:
        self.status = 0
        self.answer: Any = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run, args=(send,))
        self._thread.start()

    def _run(self, send: Callable[[], tuple[int, Any]]) -> None:
        self.status, self.answer = send()
        self.ended_s = time.monotonic()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_health_answers_while_the_model_is_still_loading(start_server: Callable[..., Any]) -> None:
    server = start_server()
    assert server.get("/health")[0] == 200
    assert b"llmservice_process_start_time_seconds" in server.get("/metrics", server.metrics_url)[1]
    status, body = server.get("/ready")
    assert status == 503
    assert json.loads(body)["reason"] == "the model is being loaded"
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert status == 503
    assert answer["error"]["code"] == "not_ready"
    server.wait_until_ready()
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a"})[0] == 200


def test_sigterm_while_loading_exits_with_success_and_waits_for_no_scrape_that_hangs(
    start_server: Callable[..., Any],
) -> None:
    server = start_server()
    host, port = server.metrics_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as hanging:
        hanging.sendall(b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        server.process.terminate()
        assert server.wait_for_exit() == 0
    assert server.errors == []


def _runs(record: Path) -> bool:
    """Whether the start's record says that the engine still runs: if so, the next start takes a smaller cache."""
    running: bool = json.loads(record.read_text())["running"]
    return running


def test_sigterm_finishes_what_runs_and_refuses_the_new_and_the_half_sent(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    record = tmp_path / "start.json"
    server = start_server("--drain-timeout", "30", "--start-record", str(record)).wait_until_ready()
    assert _runs(record)
    with _half_sent_body(server) as connection:
        requests = [Background(lambda: server.post("/v1/completions", LONG)) for _ in range(4)]
        server.wait_for(lambda: server.metric("llmservice_num_requests_running") == 4 or None)
        server.process.terminate()
        server.wait_for(lambda: any(line["message"] == "draining" for line in server.log) or None)
        half_sent, answer = _answer_until_closed(connection)
        assert (half_sent, answer["error"]["message"]) == (
            b"HTTP/1.1 503 Service Unavailable",
            "the server is shutting down: try again",
        )
        assert server.get("/ready")[0] == 503
        assert server.metric("llmservice_num_requests_running") == 4
        status, answer = server.post("/v1/completions", LONG)
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down: try again")
    for request in requests:
        request.join()
        assert request.status == 200
        assert request.answer["usage"]["completion_tokens"] == 480
    assert server.wait_for_exit() == 0
    assert server.errors == []
    assert not _runs(record)


def _half_sent_body(server: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model"')
    return connection


def _answer_until_closed(connection: socket.socket) -> tuple[bytes, Any]:
    """The status line and the JSON of an answer behind which the server closes the connection."""
    answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)


IMPATIENT = ("--body-timeout", "300ms", "--request-timeout", "500ms", "--stuck-timeout", "0")


def test_a_body_that_is_not_complete_in_time_is_refused_and_its_connection_closed(
    shared_server: Callable[..., Any],
) -> None:
    server = shared_server(*IMPATIENT)
    with _half_sent_body(server) as connection:
        status, answer = _answer_until_closed(connection)
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert answer["error"]["code"] == "request_timeout"
    assert answer["error"]["message"] == (
        "the body was not complete within 0.3 s: send it faster, or have --body-timeout raised"
    )


def test_a_drain_that_times_out_ends_with_an_error_for_the_client_and_success_for_the_process(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--drain-timeout", "0", "--max-num-seqs", "1").wait_until_ready()
    requests = [Background(lambda: server.post("/v1/completions", LONG)) for _ in range(8)]
    server.wait_for(lambda: server.metric("llmservice_num_requests_waiting", lane="interactive") >= 4 or None)
    server.process.terminate()
    for request in requests:
        request.join()
    assert server.wait_for_exit() == 0
    reported = [request.answer["error"]["message"] for request in requests if request.status == 503]
    assert "the server is shutting down" in reported
    # those who came after the signal were never admitted, and may come again
    assert set(reported) <= {"the server is shutting down", "the server is shutting down: try again"}


def _child(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])


def test_a_dead_engine_fails_the_waiting_clients_at_once_and_ends_the_server(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    record = tmp_path / "start.json"
    server = start_server("--max-num-seqs", "1", "--start-record", str(record)).wait_until_ready()
    requests = [Background(lambda: server.post("/v1/completions", LONG)) for _ in range(8)]
    server.wait_for(lambda: server.metric("llmservice_num_requests_waiting", lane="interactive") >= 4 or None)
    killed_s = time.monotonic()
    os.kill(_child(server.process.pid), signal.SIGKILL)
    for request in requests:
        request.join()
    failed = [request for request in requests if request.status != 200]
    assert failed
    for request in failed:
        assert request.status == 503
        assert "killed by SIGKILL" in request.answer["error"]["message"]
        assert request.ended_s - killed_s < 1
    assert server.wait_for_exit() == 3, "the code by which the operator recognises a start that failed"
    assert server.errors == [
        "llmservice serve: the engine process ended unexpectedly, killed by SIGKILL (out of memory?)\n"
    ]
    assert _runs(record)


def test_the_engine_ends_with_a_parent_that_was_killed_and_leaves_no_sockets_behind(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start_server().wait_until_ready()
    assert [path.name.startswith("llmservice-") for path in tmp_path.iterdir()] == [True]
    engine = _child(server.process.pid)
    server.process.kill()
    server.wait_for_exit()
    server.wait_for(lambda: _gone(engine) or None)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_is_stuck_that_has_neither_answered_nor_refused_and_is_killed_and_its_clients_get_an_error(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    record = tmp_path / "start.json"
    server = start_server("--stuck-timeout", "1s", "--start-record", str(record)).wait_until_ready()
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
    assert server.post("/v1/completions", body)[0] == 200
    for refused in ({"top_k": 10**30}, {"min_tokens": 2**70}):
        assert server.post("/v1/completions", body | refused)[0] == 400
    time.sleep(1.5)  # longer than one that has work may be silent
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    assert server.post("/v1/completions", body)[0] == 200
    engine = _child(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    assert server.get("/health")[0] == 200  # it has no work
    requests = [Background(lambda: server.post("/v1/completions", LONG)) for _ in range(2)]
    for request in requests:
        request.join()
        assert request.status == 503
        assert "the engine is stuck: it has work and has finished no step for" in request.answer["error"]["message"]
    assert server.wait_for_exit() == 3
    assert _gone(engine)
    assert "the engine is stuck" in server.errors[0]
    assert not _runs(record), "the server's own kill is no sign of too little memory"


def test_a_deadline_is_kept_while_the_engine_stands_still(shared_server: Callable[..., Any]) -> None:
    server = shared_server(*IMPATIENT)
    engine = _child(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    status, answer = server.post("/v1/completions", LONG)
    assert (status, answer["error"]["code"]) == (504, "engine_error")
    assert answer["error"]["message"] == "the request's deadline passed while it waited"
    assert server.metric("llmservice_request_success_total", finished_reason="error") == 1
    os.kill(engine, signal.SIGCONT)
    server.wait_until_idle()
    assert server.post("/v1/completions", LONG | {"max_tokens": 2})[0] == 200


def _gone(process_id: int) -> bool:
    """Ended, whether or not its parent has collected it yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _not_finite(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, model / "model.safetensors")


def _without_decoder(model: Path) -> None:
    """At which our code raises what it does not expect."""
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "Sequence", "decoders": []}}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_not_finite, "the model's logits are not finite"),
        (
            lambda model: (model / "config.json").unlink(),
            "holds no config.json: expected a checkpoint in Hugging Face's format",
        ),
        (_without_decoder, "broken cannot be used"),
    ],
)
def test_a_broken_checkpoint_ends_the_server_with_one_sentence(
    start_server: Callable[..., Any], tiny_model: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    """Whether the command, the server or the engine finds out; the tests of what reads a file have the others."""
    model = shutil.copytree(tiny_model, tmp_path / "broken")
    damage(model)
    server = start_server(model=model)
    assert server.wait_for_exit() == 1
    assert len(server.errors) == 1
    assert server.errors[0].startswith("llmservice serve: ")
    assert words in server.errors[0]


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_ends_the_server_with_one_sentence(
    server: Any, start_server: Callable[..., Any], flag: str
) -> None:
    port = server.url.rpartition(":")[2]
    second = start_server(flag, port)
    assert second.wait_for_exit() == 1
    sentence = f"cannot listen on port {port} of 127.0.0.1: Address already in use: choose another {flag} or --host"
    assert second.errors == [f"llmservice serve: {sentence}\n"]


def test_each_port_has_its_paths_and_no_other(server: Any) -> None:
    assert server.metrics_url != server.url
    for url, path in ((server.url, "/metrics"), (server.metrics_url, "/health"), (server.metrics_url, "/v1/models")):
        status, body = server.get(path, url)
        assert (status, json.loads(body)["error"]["type"]) == (404, "invalid_request_error")
    assert "/metrics" not in json.loads(server.get("/openapi.json")[1])["paths"]


def test_equal_ports_serve_everything_on_one(start_server: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = start_server("--port", port, "--metrics-port", port)
    assert server.metrics_url == server.url
    assert b"llmservice_process_start_time_seconds" in server.get("/metrics")[1]
    assert server.get("/health")[0] == 200
    assert "/metrics" in json.loads(server.get("/openapi.json")[1])["paths"]


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve_command.add_arguments(parser)
    return parser.parse_args(["--model", "/models/llama", *arguments])


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1048576", 2**20), ("512MiB", 2**29), ("512Mi", 2**29), ("0.5Gi", 2**29), ("2GB", 2 * 10**9), ("1 TiB", 2**40)],
)
def test_memory_is_given_in_bytes_or_with_a_unit(text: str, num_bytes: int) -> None:
    assert _parse("--kv-cache-memory", text).kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("2m", 120), ("250ms", 0.25), ("1h", 3600)])
def test_durations_are_given_in_seconds_or_with_a_unit(text: str, seconds: float) -> None:
    assert _parse("--drain-timeout", text).drain_timeout == seconds


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-cache-memory", "lots"),
        ("--kv-cache-memory", "0"),
        ("--drain-timeout", "-1"),
        ("--port", "65536"),
        ("--metrics-port", "-1"),
        ("--max-num-seqs", "0"),
        ("--max-queued-requests", "-1"),
        ("--metrics-prefix", "1x"),
        ("--dtype", "int4"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=arguments[0]):
        _parse(*arguments)


def test_overrides_make_a_folder_with_another_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_scaling": None, "hidden_size": 64}))
    (tmp_path / "1_Pooling").mkdir()
    yarn = {"rope_type": "yarn", "factor": 4.0}
    folder = served_folder(tmp_path, {"rope_scaling": yarn})
    assert json.loads((folder / "config.json").read_text()) == {"rope_scaling": yarn, "hidden_size": 64}
    assert (folder / "1_Pooling").is_dir()
    with pytest.raises(argparse.ArgumentError, match="is no JSON object"):
        _parse("--config-overrides", "[]")


@pytest.mark.parametrize("code", ["own", "transformers"])
def test_yarn_by_overrides_is_that_of_config_json(tmp_path: Path, code: Implementation) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    short = {"head_dim": 16, "max_position_embeddings": 64}
    model = save(Family("qwen3", short | {"rope_parameters": {**yarn, "rope_theta": 10000.0}}), tmp_path / "stretched")
    save(Family("qwen3", short), tmp_path / "published")
    folder = served_folder(tmp_path / "published", {"rope_parameters": yarn})
    started = start(EngineConfig(model=folder, implementation=code, dtype="float32", threads=1))
    assert started.kv_cache.max_model_len == 256
    tokens = [number * 7 % 193 for number in range(200)]
    with torch.inference_mode():
        hidden = started.runner.forward(StepInput.of([(0, 200, list(range(1, 14)))], tokens))
        ours, expected = started.runner.model.logits(hidden), model(torch.tensor([tokens])).logits[0]
    assert float(((ours - expected).abs().amax(-1) / expected.abs().amax(-1)).max()) < 1e-4


def test_the_environment_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVICE_HOST", "127.0.7.1")
    assert _parse().host == "127.0.7.1"
    assert _parse("--host", "127.0.0.1").host == "127.0.0.1"
