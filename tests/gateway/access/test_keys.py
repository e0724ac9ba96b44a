"""API keys from Secrets: what a Secret may hold, what a key allows, and how a change takes effect."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import pytest
import yaml

from llmservice_gateway.access.keys import KEY_LABEL, Keyring, Policy, digest_of, key_secret, new_key, read_keys
from llmservice_gateway.reflector import KubernetesAPI
from llmservice_planner.command import main


def stored(manifest: dict[str, Any]) -> dict[str, Any]:
    """As the API server stores a Secret that is applied."""
    data = {name: base64.b64encode(text.encode()).decode() for name, text in manifest["stringData"].items()}
    return {**manifest, "metadata": {"namespace": "llmservice", **manifest["metadata"]}, "data": data}


def secret(name: str, digest: str, policy: str = "") -> dict[str, Any]:
    return stored({"metadata": {"name": name}, "stringData": {"sha256": digest, "policy.yaml": policy}})


@pytest.mark.parametrize(
    ("models", "namespaces", "allowed"),
    [
        (["*"], ["*"], True),
        (["llama"], ["*"], True),
        (["llama-*"], ["*"], False),
        (["ll?ma"], ["team-*"], True),
        (["team-a/llama"], ["*"], True),
        (["team-b/llama", "qwen"], ["*"], False),
        (["*"], ["team-b"], False),
        (["team-a/*"], ["team-a", "team-b"], True),
        (["LLAMA"], ["*"], False),
    ],
)
def test_a_key_allows_the_models_and_namespaces_that_its_patterns_match(
    models: list[str], namespaces: list[str], allowed: bool
) -> None:
    policy = Policy.model_validate({"models": models, "namespaces": namespaces})
    assert policy.allows("team-a", "llama") is allowed


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("models: llama", "models: Input should be a valid tuple"),
        ("requestsPerMinutes: 3", "requestsPerMinutes: Extra inputs are not permitted"),
        ("requestsPerMinute: 0", "requestsPerMinute: Input should be greater than or equal to 1"),
        ("tokensPerMinute: many", "tokensPerMinute: Input should be a valid integer"),
        ("lane: express", "lane: Input should be 'interactive' or 'batch'"),
        ("{", "not valid YAML"),
        ("- a", "it: Input should be a valid dictionary"),
    ],
)
def test_a_policy_with_a_mistake_lets_nobody_in(policy: str, words: str) -> None:
    keys, problems = read_keys([secret("alice", digest_of("sk-a"), policy), secret("bob", digest_of("sk-b"))])
    assert [key.name for key in keys.values()] == ["bob"]
    assert words in problems["alice"]


@pytest.mark.parametrize("digest", ["", "abc", "g" * 64, "A" * 64, f"{'0' * 64} {'1' * 64} {'2' * 64}", "sk-secret"])
def test_what_is_no_digest_is_refused_without_showing_it(digest: str) -> None:
    keys, problems = read_keys([secret("alice", digest)])
    assert not keys
    assert "sha256 must hold one or two SHA-256 digests" in problems["alice"]
    assert "secret" not in problems["alice"]


def test_a_secret_without_fields_or_with_foreign_bytes_is_refused() -> None:
    broken = {"metadata": {"name": "b"}, "data": {"sha256": "!!"}}
    binary = {"metadata": {"name": "c"}, "data": {"sha256": base64.b64encode(b"\xff").decode()}}
    _, problems = read_keys([{"metadata": {"name": "a"}}, broken, binary])
    assert "has no sha256: make it with `llmservice api-key`" in problems["a"]
    assert problems["b"] == problems["c"] == "sha256 is not UTF-8 in base64"


def test_a_key_may_have_two_digests_while_its_clients_change_over_and_none_of_another_key() -> None:
    both = f"{digest_of('sk-old')}\n{digest_of('sk-new')}"
    keys, problems = read_keys([secret("alice", both), secret("mallory", digest_of("sk-old"))])
    assert {keys[digest_of("sk-old")].name, keys[digest_of("sk-new")].name} == {"alice"}
    assert "the Secret alice has the same sha256" in problems["mallory"]


async def test_keys_follow_their_secrets(cluster: Any, api: KubernetesAPI, caplog: pytest.LogCaptureFixture) -> None:
    cluster.add_kind("secrets")
    key = new_key()
    manifest = stored(key_secret("alice", key, Policy(requests_per_minute=5)))
    ring = Keyring(api, "llmservice")
    assert not ring.synced
    following = asyncio.create_task(ring.run())

    async def until(expected: int | None, **policy: Any) -> None:
        async with asyncio.timeout(5):
            while True:
                found = ring.find(key)
                if (found and found.policy) == (Policy(**policy) if expected else None) and ring.synced:
                    return
                await asyncio.sleep(0)

    try:
        await until(None)
        cluster.emit("secrets", "ADDED", manifest)
        await until(1, requests_per_minute=5)
        assert ring.find(key + "x") is None
        assert ring.find("schlüssel\udcff") is None
        cluster.emit("secrets", "MODIFIED", stored(key_secret("alice", key, Policy(requests_per_minute=6))))
        await until(1, requests_per_minute=6)
        cluster.emit("secrets", "MODIFIED", secret("alice", digest_of(key), "lane: express"))
        await until(None)
        cluster.emit("secrets", "MODIFIED", manifest)
        await until(1, requests_per_minute=5)
        cluster.emit("secrets", "DELETED", manifest)
        await until(None)
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert cluster.calls[0] == ("list", {"labelSelector": f"{KEY_LABEL}=true"})
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the API key of the Secret alice is refused: policy.yaml: lane" in errors[0]
    assert key not in caplog.text


def test_the_command_prints_a_secret_that_lets_its_key_in(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-n", "llmservice", "--model", "llama-*", "--model", "qwen", "--model-namespace", "team-a"]
    limits = ["--lane", "batch", "--requests-per-minute", "60", "--tokens-per-minute", "9000"]
    more = ["--concurrent-requests", "4", "--monthly-tokens", "1000000"]
    assert main(["api-key", "alice", *flags, *limits, *more]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    manifest = yaml.safe_load(out)
    assert key not in out
    assert (manifest["metadata"]["name"], manifest["metadata"]["namespace"]) == ("alice", "llmservice")
    keys, problems = read_keys([stored(manifest)])
    assert not problems
    assert keys[digest_of(key)].policy == Policy(
        models=("llama-*", "qwen"),
        namespaces=("team-a",),
        lane="batch",
        requests_per_minute=60,
        tokens_per_minute=9000,
        concurrent_requests=4,
        monthly_tokens=1_000_000,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Alice"], "'Alice' cannot name a Secret"),
        (["alice", "--requests-per-minute", "0"], "--requests-per-minute is 0: Input should be greater"),
        (["alice", "--model", ""], "--model is '': String should have at least 1 character"),
    ],
)
def test_the_command_refuses_what_no_key_can_have(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["api-key", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_every_key_is_new_and_has_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(base64.urlsafe_b64decode(key.removeprefix("sk-llmservice-") + "=")) for key in keys} == {32}
