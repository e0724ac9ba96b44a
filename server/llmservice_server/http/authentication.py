"""Requires an API key for every path but those of probes and Prometheus."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmservice_server.engine.request import LANES
from llmservice_server.http.access_log import PROBES
from llmservice_server.http.error import ApiError

log = logging.getLogger("llmservice.server")


class ApiKeyError(Exception):
    """The file cannot be used: one sentence for the user, without any key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: the digest to compare with, a name for the log, and its requests' lane."""

    digest: bytes
    name: str
    lane: str | None  # its requests' default and highest; None: the server's


class ApiKeys:
    """A line holds `KEY`, `KEY:LANE` or `KEY:LANE:NAME`; empty lines and those that begin with # are skipped.

    Raises ApiKeyError where the file cannot be used at start; later a broken file is logged, and the keys stay as they
    were.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _fingerprint(path)
        self._keys = _read(path)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented. Takes equally long whichever it is, and compares digests, not keys."""
        self._reload()
        digest = _digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _reload(self) -> None:
        fingerprint = _fingerprint(self._path)
        if fingerprint == self._seen:
            return
        self._seen = fingerprint
        try:
            self._keys = _read(self._path)
        except ApiKeyError as error:
            log.error("%s; the keys stay as they were", error)  # noqa: TRY400  # the message is complete
        else:
            log.info("API keys reloaded", extra={"fields": {"keys": len(self._keys)}})


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Changes with the content; a Secret's update swaps a link, hence the inode."""
    try:
        status = os.stat(path)  # noqa: PTH116  # follows links, as Path.stat does, and costs a third; once a request
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyError(f"the API keys in {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            keys.append(_parse(line, f"{path}, line {number}", f"line {number}"))
    if not keys:
        raise ApiKeyError(f"{path} holds no API key, so that no request could be served: expected one a line")
    if len({key.digest for key in keys}) < len(keys):
        raise ApiKeyError(f"{path} holds a key twice: its lane is ambiguous")
    return tuple(keys)


def _parse(line: str, where: str, default_name: str) -> ApiKey:
    key, _, rest = line.partition(":")
    lane, _, name = rest.partition(":")
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise ApiKeyError(f"{where}: expected KEY, KEY:LANE or KEY:LANE:NAME, the key in ASCII without spaces")
    if lane and lane not in LANES:
        raise ApiKeyError(f"{where}: the lane is none of {', '.join(LANES)}")
    return ApiKey(_digest(key), name or default_name, lane or None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Authentication:
    """ASGI middleware. Leaves the key's lane, if it has one, in `scope["key_lane"]` and its name in the access log."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        try:
            key = self._keys.find(_presented(scope))
            if key is None:
                raise _unauthorized("Incorrect API key provided")
        except ApiError as error:
            response = error.response()
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        scope["access_log"]["api_key"] = key.name
        scope["key_lane"] = key.lane
        await self._app(scope, receive, send)


def _presented(scope: Scope) -> str:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise _unauthorized("You didn't provide an API key: send it in the header Authorization: Bearer KEY")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
