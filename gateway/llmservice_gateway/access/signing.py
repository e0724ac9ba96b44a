"""Signs requests for pods, so that these take no others: a token for one service, valid for half a minute.

A signing key has a time from which it is used. A new one is published with a later time, so that all pods have its
public half when the first token comes that is signed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from llmservice_planner.key_file import KeyFile, KeyFileError

TOKEN_HEADER = "x-llmservice-token"  # noqa: S105  # a name, no password
VALID_S = 30
SIGNING_FIELD, PUBLIC_FIELD = "signing-keys.yaml", "public-keys.pem"
MAX_KEYS = 2  # the present one and the next; pods take as many


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 key, which signs from `not_before` on, until a newer one does."""

    not_before: datetime
    private: Ed25519PrivateKey

    @classmethod
    def new(cls, not_before: datetime) -> SigningKey:
        return cls(not_before.astimezone(UTC).replace(microsecond=0), Ed25519PrivateKey.generate())

    @property
    def public_pem(self) -> str:
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def to_fields(self) -> dict[str, Any]:
        pem = self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return {"notBefore": f"{self.not_before:%Y-%m-%dT%H:%M:%SZ}", "privateKey": pem}


def parse_signing_keys(text: str) -> tuple[SigningKey, ...]:
    """The keys of a `signing-keys.yaml`, the oldest first. Raises KeyFileError."""
    expected = f"expected {SIGNING_FIELD} as `llmservice signing-key` makes it"
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError:
        raise KeyFileError(f"the signing keys are not valid YAML: {expected}") from None
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        raise KeyFileError(f"there must be one or two signing keys: {expected}")
    try:
        keys = [_signing_key(entry) for entry in entries]
    except (KeyError, TypeError, ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"a signing key is no Ed25519 key with a time notBefore: {expected}") from None
    return tuple(sorted(keys, key=lambda key: key.not_before))


def _signing_key(entry: Any) -> SigningKey:
    private = load_pem_private_key(entry["privateKey"].encode(), password=None)
    not_before = entry["notBefore"]  # YAML reads a time without quotes as one
    if isinstance(not_before, str):
        not_before = datetime.fromisoformat(not_before)
    if not isinstance(private, Ed25519PrivateKey) or not isinstance(not_before, datetime):
        raise TypeError
    return SigningKey(not_before if not_before.tzinfo else not_before.replace(tzinfo=UTC), private)


def present_key(keys: Sequence[SigningKey], now_s: float) -> SigningKey:
    """The newest of `keys` whose time has come; the oldest where none has. They are in order."""
    begun = [key for key in keys if key.not_before.timestamp() <= now_s]
    return begun[-1] if begun else keys[0]


def rotated(keys: Sequence[SigningKey], now_s: float, delay_s: float) -> tuple[SigningKey, SigningKey]:
    """The present key, and a new one that replaces it after `delay_s`. One that was still to come is given up."""
    return present_key(keys, now_s), SigningKey.new(datetime.fromtimestamp(now_s + delay_s, UTC))


def signing_secret(name: str, keys: Sequence[SigningKey], namespace: str | None = None) -> dict[str, Any]:
    """The Secret: the gateway mounts its private field, the operator the public one alone."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "type": "Opaque",
        "stringData": {
            SIGNING_FIELD: yaml.safe_dump([key.to_fields() for key in keys], sort_keys=False),
            PUBLIC_FIELD: "".join(key.public_pem for key in keys),
        },
    }


class Signer:
    """Signs with the keys of a file, as `KeyFile` reads it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises KeyFileError."""
        self._file = KeyFile(path, "signing keys", parse_signing_keys)
        self._clock = clock

    def headers(self, audience: str, key_name: str, lane: str | None) -> Mapping[str, str]:
        """For a request to a pod of the service `audience`, `namespace/name`, with this API key."""
        now = self._clock()
        claims: dict[str, Any] = {"aud": audience, "sub": key_name, "iat": int(now), "exp": int(now) + VALID_S}
        if lane is not None:
            claims["lane"] = lane
        return {TOKEN_HEADER: jwt.encode(claims, present_key(self._file.keys, now).private, algorithm="EdDSA")}
