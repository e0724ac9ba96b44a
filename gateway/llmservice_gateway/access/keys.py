"""API keys, from labelled Secrets of the gateway's own namespace: whose a presented key is, and what it may do.

A Secret holds only the SHA-256 of a key. That is enough: a key has 256 random bits, so there is nothing to guess that a
slow hash for passwords would slow down, and it is computed for each request.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from llmservice_gateway.reflector import KubernetesAPI, Reflector

logger = logging.getLogger(__name__)

KEY_LABEL = "serving.llmservice.io/api-key"
DIGEST_FIELD, POLICY_FIELD = "sha256", "policy.yaml"
PREFIX = "sk-llmservice-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANDOM_BYTES = 32
_MAX_DIGESTS = 2  # the present one and the next, while clients change over

Lane = Literal["interactive", "batch"]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Count = Annotated[int, Field(ge=1, le=10**15)]
Manifest = Mapping[str, Any]


class Policy(BaseModel):
    """What a key may do, as its Secret's `policy.yaml` says; a limit that is not set does not apply."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    models: tuple[Pattern, ...] = ("*",)
    """Served names, or `namespace/served-name`; `*` and `?` as in a shell."""
    namespaces: tuple[Pattern, ...] = ("*",)
    lane: Lane | None = None
    """Its requests' default and highest; None: the service's."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    monthly_tokens: Count | None = None
    """In a calendar month, UTC."""

    def allows(self, namespace: str, served_name: str) -> bool:
        """Whether requests may be sent to this model of this namespace."""
        names = (served_name, f"{namespace}/{served_name}")
        return any(fnmatchcase(namespace, pattern) for pattern in self.namespaces) and any(
            fnmatchcase(name, pattern) for pattern in self.models for name in names
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A key, by the name of its Secret."""

    name: str
    policy: Policy


class BadKeyError(Exception):
    """A Secret that is no key: one sentence for its owner, with nothing of its content."""


class Keyring:
    """The keys of a namespace, kept current by list and watch: a change or a deletion takes effect at once."""

    def __init__(
        self, api: KubernetesAPI, namespace: str, why_unusable: Callable[[Key], str | None] = lambda _: None
    ) -> None:
        """`why_unusable` says what of a key this gateway cannot do; that is logged."""
        self._reflector = Reflector(
            api, f"/api/v1/namespaces/{namespace}/secrets", dict, self._rebuild, selector=f"{KEY_LABEL}=true"
        )
        self._why_unusable = why_unusable
        self._by_digest: dict[str, Key] = {}
        self._reported: dict[str, str] = {}  # by Secret: what is wrong with it, which is logged once

    @property
    def synced(self) -> bool:
        """Whether the Secrets have been listed."""
        return self._reflector.synced.is_set()

    async def run(self) -> None:
        """Follow the Secrets until cancelled."""
        await self._reflector.run()

    def find(self, presented: str) -> Key | None:
        """The key that a client presents, compared by its digest, which a client cannot choose byte by byte."""
        return self._by_digest.get(digest_of(presented))

    def _rebuild(self) -> None:
        self._by_digest, problems = read_keys(self._reflector.objects())
        for key in self._by_digest.values():
            if (why := self._why_unusable(key)) is not None:
                problems[key.name] = why
        for name, problem in problems.items():
            if self._reported.get(name) != problem:
                logger.error("the API key of the Secret %s is refused: %s", name, problem)
        self._reported = problems
        logger.info("API keys: %d", len({key.name for key in self._by_digest.values()}))


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def read_keys(secrets_found: Iterable[Manifest]) -> tuple[dict[str, Key], dict[str, str]]:
    """The keys by digest, and by Secret what is wrong. Of two Secrets with one digest, the first by name has it."""
    keys: dict[str, Key] = {}
    problems: dict[str, str] = {}
    for secret in sorted(secrets_found, key=lambda each: str(each["metadata"]["name"])):
        name = str(secret["metadata"]["name"])
        try:
            digests, key = _read_key(name, secret, keys)
        except BadKeyError as error:
            problems[name] = str(error)
        else:
            keys |= dict.fromkeys(digests, key)
    return keys, problems


def _read_key(name: str, secret: Manifest, others: Mapping[str, Key]) -> tuple[list[str], Key]:
    digests = _field(secret, DIGEST_FIELD).split()
    if not 1 <= len(digests) <= _MAX_DIGESTS or not all(map(_DIGEST.fullmatch, digests)):
        raise BadKeyError(f"{DIGEST_FIELD} must hold one or two SHA-256 digests of 64 hexadecimal digits")
    if (other := next((others[digest] for digest in digests if digest in others), None)) is not None:
        raise BadKeyError(f"the Secret {other.name} has the same {DIGEST_FIELD}: make another key")
    try:
        policy = Policy.model_validate(yaml.safe_load(_field(secret, POLICY_FIELD, "")) or {})
    except yaml.YAMLError:
        raise BadKeyError(f"{POLICY_FIELD} is not valid YAML") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise BadKeyError(f"{POLICY_FIELD}: {where}: {first['msg']}") from None
    return digests, Key(name, policy)


def _field(secret: Manifest, name: str, default: str | None = None) -> str:
    encoded = (secret.get("data") or {}).get(name)
    if encoded is None:
        if default is None:
            raise BadKeyError(f"it has no {name}: make it with `llmservice api-key`")
        return default
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        raise BadKeyError(f"{name} is not UTF-8 in base64") from None


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def key_secret(name: str, key: str, policy: Policy, namespace: str | None = None) -> dict[str, Any]:
    """The manifest of the Secret that lets `key` in, without the key itself."""
    chosen = policy.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), "labels": {KEY_LABEL: "true"}},
        "type": "Opaque",
        "stringData": {DIGEST_FIELD: digest_of(key), POLICY_FIELD: yaml.safe_dump(chosen, sort_keys=False)},
    }
