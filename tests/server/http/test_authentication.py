"""Keys from a file: what it may hold, who is let in, and how a change takes effect."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from llmservice_server.http.authentication import ApiKeyError, ApiKeys

KEYS = """
# rotated weekly
sk-alice:interactive:alice
sk-nightly:batch
sk-plain
"""


@pytest.fixture(scope="module")
def batch_server(shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With the keys, and the batch lane for those that name none."""
    path = _file(tmp_path_factory.mktemp("keys"))
    return shared_server("--api-key-file", str(path), "--default-lane", "batch", "--max-num-seqs", "1")


def _file(directory: Path, content: str = KEYS) -> Path:
    path = directory / "keys"
    path.write_text(content)
    return path


def _replace(path: Path, content: str) -> None:
    """As the kubelet does with a Secret: a new file in the place of the old one."""
    new = path.with_name("new")
    new.write_text(content)
    new.replace(path)


@pytest.mark.parametrize(
    ("presented", "found"),
    [
        ("sk-alice", ("alice", "interactive")),
        ("sk-nightly", ("line 4", "batch")),
        ("sk-plain", ("line 5", None)),
        ("sk-alice:interactive:alice", None),
        ("sk-alic", None),
        ("# rotated weekly", None),
        ("", None),
        ("schlüssel", None),
    ],
)
def test_a_key_has_a_name_and_a_lane(tmp_path: Path, presented: str, found: tuple[str, str | None] | None) -> None:
    key = ApiKeys(_file(tmp_path)).find(presented)
    assert (None if key is None else (key.name, key.lane)) == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no API key"),
        ("# nobody\n", "holds no API key"),
        ("sk-topsecret:express", "line 1: the lane is none of interactive, batch"),
        ("sk-topsecret two", "line 1: expected KEY"),
        (":batch", "line 1: expected KEY"),
        ("sk-topsecret\nsk-topsecret:batch", "holds a key twice"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_showing_a_key(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ApiKeyError, match=words) as refused:
        ApiKeys(_file(tmp_path, content))
    assert "topsecret" not in str(refused.value)
    with pytest.raises(ApiKeyError, match="cannot be read"):
        ApiKeys(tmp_path / "absent")


def test_a_changed_file_takes_effect_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path)
    keys = ApiKeys(path)
    _replace(path, "sk-new\n")
    assert keys.find("sk-new") is not None
    assert keys.find("sk-alice") is None
    with caplog.at_level(logging.ERROR):
        _replace(path, "sk-new:express\n")
        assert keys.find("sk-new") is not None
        path.unlink()
        assert keys.find("sk-new") is not None
    assert ["stay as they were" in record.message for record in caplog.records] == [True, True]
    assert "sk-new" not in caplog.text


def test_the_server_wants_a_key_of_everybody_but_the_probes(start_server: Any, tmp_path: Path) -> None:
    path = _file(tmp_path)
    server = start_server("--api-key-file", str(path)).wait_until_ready()
    for probe in ("/health", "/ready"):
        assert server.get(probe)[0] == 200
    assert server.get("/metrics", server.metrics_url)[0] == 200
    for method, route in (("GET", "/v1/models"), ("GET", "/version"), ("GET", "/nowhere"), ("POST", "/tokenize")):
        status, body = server.request(method, route, b"{}" if method == "POST" else None)
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
    ask: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            client.completions.create(**ask)
        assert client.with_options(api_key="sk-nightly").completions.create(**ask).choices
        _replace(path, "sk-wrong:interactive:bob\n")
        assert client.completions.create(**ask).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-nightly").completions.create(**ask)
    server.wait_for(lambda: [line for line in server.log if line.get("api_key") == "bob"] or None)
    assert not any(key in json.dumps(server.log) for key in ("sk-", "Bearer"))


def test_a_keys_lane_or_else_the_servers_is_the_highest_that_a_client_may_choose(batch_server: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    asking: list[dict[str, Any]] = [
        {"extra_body": {"priority": "interactive"}},
        {"extra_headers": {"x-llmservice-lane": "interactive"}},
    ]
    with openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="sk-plain", max_retries=0) as client:
        for way in asking:
            for key in ("sk-plain", "sk-nightly"):
                limited = client.with_options(api_key=key)
                with pytest.raises(openai.PermissionDeniedError, match="batch is the highest"):
                    limited.completions.create(**body, **way)
                with pytest.raises(openai.PermissionDeniedError, match="batch is the highest"):
                    limited.chat.completions.create(**chat, **way)
            assert client.with_options(api_key="sk-alice").completions.create(**body, **way).choices
        assert client.completions.create(**body).choices
    assert batch_server.metric("llmservice_request_rejected_total", reason="lane_not_allowed") == 8


def test_a_key_brings_its_lane(batch_server: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 500, "n": 4, "stream": True}
    with openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="sk-nightly", max_retries=0) as client:
        stream = client.completions.create(**body, extra_body={"ignore_eos": True})
        next(iter(stream))
        batch_server.wait_for(lambda: batch_server.metric("llmservice_num_requests_waiting", lane="batch") > 0 or None)
        assert batch_server.metric("llmservice_num_requests_waiting", lane="interactive") == 0
        stream.close()
    batch_server.wait_until_idle()


def test_an_unusable_key_file_ends_the_server_with_one_sentence(start_server: Any, tmp_path: Path) -> None:
    server = start_server("--api-key-file", str(tmp_path / "absent"))
    assert server.wait_for_exit() == 1
    assert len(server.errors) == 1
    assert "cannot be read: No such file or directory" in server.errors[0]
