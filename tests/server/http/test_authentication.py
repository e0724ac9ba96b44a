"""Keys from files, and tokens: what they may hold, who is let in, and how a change takes effect."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.datastructures import Headers

from llmservice_planner.command import main
from llmservice_planner.key_file import KeyFileError
from llmservice_server.http.authentication import TOKEN_HEADER, ApiKeys, GatewayKeys
from llmservice_server.http.error import ApiError

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
    client = ApiKeys(_file(tmp_path)).find(presented)
    assert (None if client is None else (client.name, client.lane)) == found


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
    path = _file(tmp_path, content)
    with pytest.raises(KeyFileError, match=words) as refused:
        ApiKeys(path)
    assert str(path) in str(refused.value)
    assert "topsecret" not in str(refused.value)
    with pytest.raises(KeyFileError, match="cannot be read"):
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


AUDIENCE = "prod/llama"
PRESENT, NEXT, FOREIGN = (Ed25519PrivateKey.generate() for _ in range(3))


def _pem(*keys: Any) -> str:
    return "".join(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode() for key in keys
    )


def _token(key: PrivateKeyTypes | str = PRESENT, algorithm: str = "EdDSA", issued_s: float = 0.0, **claims: Any) -> str:
    now = time.time() + issued_s
    usual = {"aud": AUDIENCE, "sub": "alice", "lane": "batch", "iat": now, "exp": now + 30}
    present = {name: value for name, value in (usual | claims).items() if value is not None}
    return jwt.encode(present, key, algorithm)  # type: ignore[arg-type]  # one of the kinds that it takes


def _identify(keys: GatewayKeys, token: str | None) -> tuple[str, str | None] | str:
    """Name and lane, or the refusal."""
    try:
        client = keys.identify(Headers({} if token is None else {TOKEN_HEADER: token}))
    except ApiError as error:
        return f"{error.status} {error.code}: {error.message}"
    return client.name, client.lane


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (_token, ("alice", "batch")),
        (lambda: _token(NEXT), ("alice", "batch")),
        (lambda: _token(lane=None), ("alice", None)),
        (lambda: _token(issued_s=4), ("alice", "batch")),  # the gateway's clock is ahead
        (lambda: None, "it has no x-llmservice-token"),
        (lambda: _token(FOREIGN), "a key that is not the gateway's"),
        (lambda: _token(issued_s=-60), "has expired"),
        (lambda: _token(issued_s=60), "not valid yet"),
        (lambda: _token(aud="prod/qwen"), "for another service, expected prod/llama"),
        (lambda: _token(aud=None), "no token of the gateway"),
        (lambda: _token(exp=None), "no token of the gateway"),
        (lambda: _token(iat=None), "no token of the gateway"),
        (lambda: _token(sub=None), "no token of the gateway"),
        (lambda: _token(lane="express"), "no token of the gateway"),
        (lambda: _token("an attacker's secret of 32 bytes or more", "HS256"), "no token of the gateway"),
        (lambda: _token(generate_private_key(SECP256R1()), "ES256"), "no token of the gateway"),
        (lambda: jwt.encode({"aud": AUDIENCE, "sub": "alice"}, None, algorithm="none"), "no token of the gateway"),
        (lambda: _token()[:-10] + "AAAAAAAAAA", "a key that is not the gateway's"),
        (lambda: "nonsense", "no token of the gateway"),
        (lambda: "a.b.c", "no token of the gateway"),
    ],
)
def test_only_tokens_that_the_gateway_has_just_signed_for_this_service_are_taken(
    tmp_path: Path, make: Callable[[], str | None], outcome: tuple[str, str | None] | str
) -> None:
    found = _identify(GatewayKeys(_file(tmp_path, _pem(PRESENT, NEXT)), AUDIENCE), make())
    if isinstance(outcome, str):
        assert str(found).startswith("401 invalid_gateway_token: ")
        assert outcome in found
    else:
        assert found == outcome


def test_the_public_keys_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = _file(tmp_path, _pem(PRESENT))
    keys = GatewayKeys(path, AUDIENCE)
    assert "not the gateway's" in _identify(keys, _token(NEXT))
    _replace(path, _pem(NEXT))
    assert _identify(keys, _token(NEXT)) == ("alice", "batch")
    assert "not the gateway's" in _identify(keys, _token())
    path.unlink()
    assert _identify(keys, _token(NEXT)) == ("alice", "batch")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds 0 public keys"),
        (_pem(PRESENT, NEXT, FOREIGN), "holds 3 public keys"),
        (_pem(generate_private_key(SECP256R1())), "something else than Ed25519's keys"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "something else than Ed25519's keys"),
    ],
)
def test_a_file_without_one_or_two_ed25519_keys_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words):
        GatewayKeys(_file(tmp_path, content), AUDIENCE)


@pytest.fixture(scope="module")
def signed_server(shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = _file(tmp_path_factory.mktemp("gateway"), _pem(PRESENT))
    return shared_server("--gateway-keys", str(path), "--audience", AUDIENCE)


def test_a_server_with_the_gateways_keys_answers_only_probes_without_a_token(signed_server: Any) -> None:
    for probe in ("/health", "/ready", "/sizing"):
        assert signed_server.get(probe)[0] == 200
    for method, route in (("GET", "/v1/models"), ("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/tokenize")):
        status, body = signed_server.request(method, route, b"{}" if method == "POST" else None)
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_gateway_token")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{signed_server.url}/v1/models")  # noqa: S310
    with refused.value:
        assert refused.value.headers["WWW-Authenticate"] == TOKEN_HEADER


def test_a_tokens_lane_is_the_highest_and_its_name_is_in_the_log(signed_server: Any) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    with openai.OpenAI(base_url=f"{signed_server.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="takes requests of the gateway alone"):
            client.completions.create(**body)
        signed = client.with_options(default_headers={TOKEN_HEADER: _token()})
        assert signed.completions.create(**body).choices
        with pytest.raises(openai.PermissionDeniedError, match="batch is the highest"):
            signed.completions.create(**body, extra_body={"priority": "interactive"})
    signed_server.wait_for(lambda: [line for line in signed_server.log if line.get("api_key") == "alice"] or None)


@pytest.mark.parametrize(
    "flags",
    [
        ["--gateway-keys", "keys.pem"],
        ["--audience", AUDIENCE],
        ["--gateway-keys", "keys.pem", "--audience", AUDIENCE, "--api-key-file", "keys"],
    ],
)
def test_flags_of_keys_that_contradict_each_other_are_refused(tiny_model: Path, flags: list[str]) -> None:
    assert main(["serve", "--model", str(tiny_model), *flags]) == 2


async def test_one_clients_many_requests_delay_no_other_client(shared_server: Any, tmp_path: Path) -> None:
    keys = _file(tmp_path, "sk-greedy:interactive:greedy\nsk-modest:interactive:modest\n")
    server = shared_server("--api-key-file", str(keys), "--max-num-seqs", "2", "--max-queued-requests", "100")
    server.wait_until_ready()
    ended: list[str] = []

    async def ask(client: openai.AsyncOpenAI, max_tokens: int) -> None:
        body = {"ignore_eos": True}
        await client.completions.create(model="tiny", prompt="a", max_tokens=max_tokens, extra_body=body)
        ended.append(client.api_key)

    def client_of(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    async with client_of("sk-greedy") as greedy_client, client_of("sk-modest") as modest_client:
        await ask(modest_client, 1)  # it is connected
        greedy = [asyncio.create_task(ask(greedy_client, 100)) for _ in range(80)]
        while server.metric("llmservice_num_requests_waiting", lane="interactive") < 60:
            await asyncio.sleep(0.01)
        before = len(ended)
        await asyncio.gather(ask(modest_client, 40), ask(modest_client, 40))
        earlier = ended[before:].count("sk-greedy")
        assert earlier <= 20, "it would be 40 or more if requests were served in the order in which they came"
        for task in greedy:
            task.cancel()
        await asyncio.wait(greedy)
    server.wait_until_idle()
