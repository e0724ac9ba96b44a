"""How many API requests are under way, so that a shutdown can wait for them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from llmservice_server.api.state import ServerState


class Activity:
    """ASGI middleware: a request counts until the last byte of its answer is handed over."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        self._state.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.leave()
