"""Requires an API key, or a gateway's token, for every path but those of probes and Prometheus."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmservice_planner.key_file import KeyFile, KeyFileError
from llmservice_server.engine.config import LANES
from llmservice_server.http.access_log import PROBES
from llmservice_server.http.error import ApiError

TOKEN_HEADER = "x-llmservice-token"  # noqa: S105  # a name, no password
"""The gateway's token: a JWT, signed with Ed25519."""
_CLOCK_SKEW_S = 5.0  # between the gateway's node and this one
_MAX_GATEWAY_KEYS = 2  # the present one and the next
_PEM_KEY = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Client:
    """Who a request comes from."""

    name: str  # of the API key, for the log and for a fair share of the queue
    lane: str | None  # its requests' default and highest; None: the server's


class Authenticator(Protocol):
    @property
    def challenge(self) -> str:
        """What a refused request should have had, for the header WWW-Authenticate."""

    def identify(self, headers: Headers) -> Client:
        """Raises ApiError (401)."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: the digest to compare with, and whose it is."""

    digest: bytes
    client: Client


class ApiKeys:
    """A line holds `KEY`, `KEY:LANE` or `KEY:LANE:NAME`; empty lines and those that begin with # are skipped."""

    challenge = "Bearer"

    def __init__(self, path: Path) -> None:
        self._file = KeyFile(path, "API keys", _api_keys)

    def identify(self, headers: Headers) -> Client:
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise _unauthorized("You didn't provide an API key: send it in the header Authorization: Bearer KEY")
        client = self.find(presented.strip())
        if client is None:
            raise _unauthorized("Incorrect API key provided")
        return client

    def find(self, presented: str) -> Client | None:
        """Whose key was presented. Takes equally long whichever it is, and compares digests, not keys."""
        digest = _digest(presented)
        found = None
        for key in self._file.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.client
        return found


class GatewayKeys:
    """The public keys of the gateway, in PEM; its tokens name the API key that a request came with.

    A token is for one service, `audience`, and for half a minute, so that who sees one can use it nowhere else.
    """

    challenge = TOKEN_HEADER  # by which the gateway knows that it is not the client's key that is refused

    def __init__(self, path: Path, audience: str) -> None:
        self._file = KeyFile(path, "gateway's public keys", _public_keys)
        self._audience = audience

    def identify(self, headers: Headers) -> Client:
        token = headers.get(TOKEN_HEADER)
        if token is None:
            raise _unsigned(f"it has no {TOKEN_HEADER}")
        why = "its token is signed with a key that is not the gateway's"
        for key in self._file.keys:
            try:
                return self._verified(token, key)
            except jwt.InvalidSignatureError:
                continue
            except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError):
                why = "its token has expired, or is not valid yet: the clocks of the nodes must agree within 5 s"
            except jwt.InvalidAudienceError:
                why = f"its token is for another service, expected {self._audience}"
            except jwt.InvalidTokenError:
                why = f"its {TOKEN_HEADER} is no token of the gateway"
            break
        raise _unsigned(why)

    def _verified(self, token: str, key: Ed25519PublicKey) -> Client:
        claims = jwt.decode(
            token,
            key,
            algorithms=["EdDSA"],
            audience=self._audience,
            leeway=_CLOCK_SKEW_S,
            options={"require": ["aud", "exp", "iat", "sub"]},
        )
        lane = claims.get("lane")
        if lane is not None and lane not in LANES:
            raise jwt.InvalidTokenError
        return Client(claims["sub"], lane)


def _api_keys(text: str) -> tuple[ApiKey, ...]:
    keys = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            keys.append(_api_key(line, f"line {number}"))
    if not keys:
        raise KeyFileError("it holds no API key, so that no request could be served: expected one a line")
    if len({key.digest for key in keys}) < len(keys):
        raise KeyFileError("it holds a key twice: its lane is ambiguous")
    return tuple(keys)


def _api_key(line: str, where: str) -> ApiKey:
    key, _, rest = line.partition(":")
    lane, _, name = rest.partition(":")
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise KeyFileError(f"{where}: expected KEY, KEY:LANE or KEY:LANE:NAME, the key in ASCII without spaces")
    if lane and lane not in LANES:
        raise KeyFileError(f"{where}: the lane is none of {', '.join(LANES)}")
    return ApiKey(_digest(key), Client(name or where, lane or None))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _public_keys(text: str) -> tuple[Ed25519PublicKey, ...]:
    expected = "expected one or two Ed25519 public keys in PEM, as `llmservice signing-key` makes them"
    blocks = _PEM_KEY.findall(text)
    if not 1 <= len(blocks) <= _MAX_GATEWAY_KEYS:
        raise KeyFileError(f"it holds {len(blocks)} public keys: {expected}")
    keys = []
    for block in blocks:
        try:
            key = load_pem_public_key(block.encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise KeyFileError(f"it holds something else than Ed25519's keys: {expected}")
        keys.append(key)
    return tuple(keys)


class Authentication:
    """ASGI middleware. Leaves the Client in `scope["client_key"]` and its name in the access log."""

    def __init__(self, app: ASGIApp, keys: Authenticator) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        try:
            client = self._keys.identify(Headers(scope=scope))
        except ApiError as error:
            response = error.response()
            response.headers["WWW-Authenticate"] = self._keys.challenge
            await response(scope, receive, send)
            return
        scope["access_log"]["api_key"] = client.name
        scope["client_key"] = client
        await self._app(scope, receive, send)


def client_name(request: Request) -> str | None:
    """The name of the request's API key; None where keys are not checked."""
    client: Client | None = request.scope.get("client_key")
    return None if client is None else client.name


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _unsigned(why: str) -> ApiError:
    message = f"this server takes requests of the gateway alone, and this is none: {why}. Send it to the gateway"
    return ApiError(401, message, code="invalid_gateway_token")
