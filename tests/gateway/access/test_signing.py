"""Tokens for pods: what they say, which key signs them, and how keys are made and rotated."""

from __future__ import annotations

import base64
import io
import logging
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from starlette.datastructures import Headers

from llmservice_gateway.access.signing import (
    SIGNING_FIELD,
    TOKEN_HEADER,
    Signer,
    SigningKey,
    parse_signing_keys,
    present_key,
    rotated,
    signing_secret,
)
from llmservice_planner.command import main
from llmservice_planner.key_file import KeyFileError
from llmservice_server.http.authentication import GatewayKeys
from llmservice_server.http.error import ApiError

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)
NOON_S = NOON.timestamp()


def _write(path: Path, *keys: SigningKey) -> Path:
    """As the kubelet does: a new file in the place of the old one."""
    new = path.with_name("new")
    new.write_text(signing_secret("s", keys)["stringData"][SIGNING_FIELD])
    new.replace(path)
    return path


def _public(tmp_path: Path, *keys: SigningKey) -> Path:
    path = tmp_path / "public.pem"
    path.write_text(signing_secret("s", keys)["stringData"]["public-keys.pem"])
    return path


def test_a_server_with_the_public_keys_takes_the_gateways_tokens_for_its_own_service_alone(tmp_path: Path) -> None:
    key, other = SigningKey.new(NOON), SigningKey.new(NOON)
    signer = Signer(_write(tmp_path / "keys", key))
    headers = Headers(dict(signer.headers("team-a/llama", "alice", "batch")))
    client = GatewayKeys(_public(tmp_path, key, other), "team-a/llama").identify(headers)
    assert (client.name, client.lane) == ("alice", "batch")
    assert (
        GatewayKeys(_public(tmp_path, key), "team-a/llama")
        .identify(Headers(dict(signer.headers("team-a/llama", "bob", None))))
        .lane
        is None
    )
    with pytest.raises(ApiError, match="for another service"):
        GatewayKeys(_public(tmp_path, key), "team-b/llama").identify(headers)
    with pytest.raises(ApiError, match="not the gateway's"):
        GatewayKeys(_public(tmp_path, other), "team-a/llama").identify(headers)


def test_a_token_is_valid_for_half_a_minute_and_names_key_and_lane(tmp_path: Path) -> None:
    key = SigningKey.new(NOON)
    signer = Signer(_write(tmp_path / "keys", key), clock=lambda: NOON_S + 0.7)
    token = signer.headers("team-a/llama", "alice", "batch")[TOKEN_HEADER]
    assert jwt.decode(token, options={"verify_signature": False}) == {
        "aud": "team-a/llama",
        "sub": "alice",
        "lane": "batch",
        "iat": int(NOON_S),
        "exp": int(NOON_S) + 30,
    }


@pytest.mark.parametrize(
    ("now_s", "expected"), [(NOON_S - 1, 0), (NOON_S, 0), (NOON_S + 599, 0), (NOON_S + 600, 1), (NOON_S + 9e6, 1)]
)
def test_the_newest_key_whose_time_has_come_signs(now_s: float, expected: int) -> None:
    keys = rotated([SigningKey.new(NOON)], NOON_S, delay_s=600)
    assert present_key(keys, now_s) is keys[expected]


def test_a_rotation_keeps_the_key_that_signs_now_and_gives_up_one_that_was_to_come() -> None:
    first, second = rotated([SigningKey.new(NOON)], NOON_S, delay_s=600)
    again = rotated([first, second], NOON_S + 60, delay_s=600)
    assert again[0] is first
    assert again[1].not_before == datetime(2026, 11, 24, 12, 11, tzinfo=UTC)
    assert rotated([first, second], NOON_S + 3600, delay_s=600)[0] is second


def test_the_keys_are_read_again_when_they_change_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = SigningKey.new(NOON), SigningKey.new(NOON)
    path = _write(tmp_path / "keys", first)
    signer = Signer(path, clock=lambda: NOON_S)

    def signed_by(key: SigningKey) -> bool:
        token = signer.headers("a/b", "alice", None)[TOKEN_HEADER]
        try:
            jwt.decode(token, key.private.public_key(), ["EdDSA"], options={"verify_exp": False, "verify_aud": False})
        except jwt.InvalidSignatureError:
            return False
        return True

    assert signed_by(first)
    _write(path, second)
    assert signed_by(second)
    path.unlink()
    assert signed_by(second)
    path.write_text("[]")
    assert signed_by(second)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert ["stay as they were" in message for message in errors] == [True, True]
    assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "one or two signing keys"),
        ("[]", "one or two signing keys"),
        ("{", "not valid YAML"),
        ("[{}]", "no Ed25519 key with a time"),
        ("[1]", "no Ed25519 key with a time"),
        ("[{notBefore: 2026-11-24T12:00:00Z, privateKey: secret}]", "no Ed25519 key with a time"),
        ("[{}, {}, {}]", "one or two signing keys"),
    ],
)
def test_what_holds_no_signing_keys_is_refused_without_showing_it(content: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words) as refused:
        parse_signing_keys(content)
    assert "secret" not in str(refused.value)


def test_an_absent_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        Signer(tmp_path / "absent")


def test_a_time_without_a_zone_is_utc() -> None:
    fields = SigningKey.new(NOON).to_fields() | {"notBefore": datetime(2026, 11, 24, 12)}
    assert parse_signing_keys(yaml.safe_dump([fields]))[0].not_before == NOON


def test_the_command_makes_a_secret_and_rotates_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["signing-key", "--name", "signing", "-n", "llmservice"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    (first,) = parse_signing_keys(made["stringData"][SIGNING_FIELD])
    data = {name: base64.b64encode(text.encode()).decode() for name, text in made["stringData"].items()}
    for present in (made, {**{name: made[name] for name in ("kind", "metadata")}, "data": data}):
        monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(present)))
        assert main(["signing-key", "--rotate", "--after", "120"]) == 0
        after = yaml.safe_load(capsys.readouterr().out)
        assert after["metadata"] == {"name": "signing", "namespace": "llmservice"}
        keys = parse_signing_keys(after["stringData"][SIGNING_FIELD])
        assert keys[0].public_pem == first.public_pem
        assert (keys[1].not_before - datetime.now(UTC)).total_seconds() == pytest.approx(120, abs=30)
        assert after["stringData"]["public-keys.pem"] == keys[0].public_pem + keys[1].public_pem


@pytest.mark.parametrize(
    ("given", "words"),
    [("", "it has no signing-keys.yaml"), ("{", "not valid YAML"), ("data: {signing-keys.yaml: '!'}", "not base64")],
)
def test_rotating_something_else_than_the_secret_is_refused(
    given: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert main(["signing-key", "--rotate"]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize("flags", [["--after", "60"], ["--rotate", "--after", "-1"], ["--rotate", "--after", "nan"]])
def test_a_time_without_a_meaning_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["signing-key", *flags]) == 2
    assert "--after" in capsys.readouterr().err


def test_a_present_secret_keeps_nothing_of_what_the_api_server_added(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret: dict[str, Any] = signing_secret("signing", [SigningKey.new(NOON)])
    secret["metadata"] |= {"resourceVersion": "7", "uid": "u"}
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(secret)))
    assert main(["signing-key", "--rotate"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"] == {"name": "signing"}
