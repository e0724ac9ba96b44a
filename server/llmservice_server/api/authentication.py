"""Requires an API key of everybody but the probes and Prometheus."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmservice_server.api.access_log import PROBES
from llmservice_server.api.api_keys import ApiKeys
from llmservice_server.api.error import ApiError


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
