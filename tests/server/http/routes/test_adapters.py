"""LoRA adapters over HTTP: loaded and unloaded while the server serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmservice_server.tiny.adapter import write_tiny_adapter

FLAGS = ("--max-loras", "2", "--max-lora-rank", "8", "--enable-lora-updates")
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_tiny_adapter(folder, tiny_model, std=0.3)
    return folder


def _ask(server: Any, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "One day", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    return status, answer


def _post(server: Any, path: str, **body: Any) -> tuple[int, bytes]:
    status, answer = server.request("POST", path, json.dumps(body).encode())
    return status, answer


def test_an_adapter_is_a_model_from_its_load_to_its_unload(shared_server: Start, adapter: Path) -> None:
    server = shared_server(*FLAGS)
    assert _ask(server, "poet")[0] == 404
    assert _post(server, "/v1/load_lora_adapter", lora_name="poet", lora_path=str(adapter))[0] == 200
    _, models = server.request("GET", "/v1/models")
    assert b'"id":"poet"' in models
    assert b'"parent":"tiny"' in models
    (status, answer), (_, own) = _ask(server, "poet"), _ask(server, "tiny")
    assert (status, answer["model"], own["model"]) == (200, "poet", "tiny")
    assert answer["choices"][0]["text"] != own["choices"][0]["text"]
    assert server.metric("llmservice_lora_adapter", name="poet", state="loaded") == 1
    assert b'"name":"poet"' in server.get("/sizing")[1]
    status, answer = server.post("/v1/embeddings", {"model": "poet", "input": "a"})
    assert (status, "generates text only" in answer["error"]["message"]) == (400, True)
    assert _post(server, "/v1/load_lora_adapter", lora_name="poet", lora_path=str(adapter))[0] == 400
    again = {"lora_name": "poet", "lora_path": str(adapter), "load_inplace": True}
    assert _post(server, "/v1/load_lora_adapter", **again)[0] == 200
    assert _post(server, "/v1/unload_lora_adapter", lora_name="poet")[0] == 200
    assert _ask(server, "poet")[0] == 404
    assert _post(server, "/v1/unload_lora_adapter", lora_name="poet")[0] == 404
    assert server.metric("llmservice_lora_adapter", name="poet") == 0


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("tiny", "/tmp", b"the model's own"),
        ("other", "/nowhere", b"/nowhere is not a folder"),
        ("other", "/" + 4000 * "a", b" cannot be read (File name too long)"),
        ("a name", "/tmp", b"lora_name"),
    ],
)
def test_what_cannot_be_loaded_is_refused(shared_server: Start, name: str, path: str, message: bytes) -> None:
    status, answer = _post(shared_server(*FLAGS), "/v1/load_lora_adapter", lora_name=name, lora_path=path)
    assert status == 400
    assert message in answer


def test_no_request_fails_while_adapters_are_loaded(shared_server: Start, adapter: Path) -> None:
    server = shared_server(*FLAGS)
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(_ask, server, "tiny") for _ in range(40)]
        for number in range(10):
            assert _post(server, "/v1/load_lora_adapter", lora_name=f"a{number}", lora_path=str(adapter))[0] == 200
            assert _ask(server, f"a{number}")[0] == 200
            assert _post(server, "/v1/unload_lora_adapter", lora_name=f"a{number}")[0] == 200
        assert {answer.result()[0] for answer in answers} == {200}
    server.wait_until_idle()


def test_changes_of_one_name_exclude_each_other(shared_server: Start, adapter: Path) -> None:
    server = shared_server(*FLAGS)

    def load(_: int) -> int:
        return _post(server, "/v1/load_lora_adapter", lora_name="one", lora_path=str(adapter))[0]

    with ThreadPoolExecutor(4) as clients:
        assert sorted(clients.map(load, range(4))) == [200, 400, 400, 400]
    assert _post(server, "/v1/unload_lora_adapter", lora_name="one")[0] == 200


def test_adapters_cannot_be_loaded_by_default(server: Any) -> None:
    assert _post(server, "/v1/load_lora_adapter", lora_name="a", lora_path="/tmp")[0] == 404


def _list(file: Path, *adapters: dict[str, Any]) -> None:
    """As the kubelet does it: the file is replaced as a whole."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(adapters))
    unfinished.replace(file)


def test_the_listed_adapters_are_served(start_server: Start, adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    file, copies, broken = tmp_path / "adapters.json", tmp_path / "copies", tmp_path / "broken"
    write_tiny_adapter(broken, tiny_model, rank=16)
    poet = {"name": "poet", "uri": f"file://{adapter}", "pinned": True}
    _list(file, poet, {"name": "broken", "uri": f"file://{broken}"}, {"name": "nowhere", "uri": "file:///nowhere"})
    server = start_server(*FLAGS[:-1], "--adapters-file", str(file), "--adapters-dir", str(copies)).wait_until_ready()
    assert _ask(server, "poet")[0] == 200
    assert server.metric("llmservice_lora_adapter", state="failed") == 2
    reported = {each["name"]: each for each in json.loads(server.get("/sizing")[1])["adapters"]}
    assert (reported["poet"]["state"], reported["poet"]["pinned"]) == ("loaded", True)
    assert "rank is 16, expected at most --max-lora-rank 8" in reported["broken"]["error"]
    assert "/nowhere is no folder" in reported["nowhere"]["error"]
    assert sum("an adapter cannot be loaded" in str(line) for line in server.log) == 2
    _list(file, {"name": "bard", "uri": f"file://{adapter}"})
    server.wait_for(lambda: _ask(server, "bard")[0] == 200)
    assert _ask(server, "poet")[0] == 404
    assert server.metric("llmservice_lora_adapter", state="failed") == 0
    assert len(list(copies.iterdir())) == 1
    entry = {"name": "poet", "uri": f"file://{adapter}"}
    _list(file, entry, entry)
    server.wait_for(lambda: "a name is listed twice" in str(server.log))
    assert _ask(server, "bard")[0] == 200, "what was listed before stays"
