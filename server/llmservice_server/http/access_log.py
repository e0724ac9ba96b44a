"""One structured log line per request: key, path, status, duration and token counts. Never prompts or answers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROBES = ("/health", "/ready", "/metrics", "/sizing")  # of the kubelet, of Prometheus and of the operator
_REQUEST_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII; anything else is replaced, not echoed

log = logging.getLogger("llmservice.access")


class AccessLog:
    """ASGI middleware. Endpoints add figures to `scope["access_log"]`; `x-request-id` is the client's or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {}
        scope["access_log"] = fields
        status = None
        started = time.perf_counter()

        def send_with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own: a stream sends every token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            fields |= {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "duration_s": round(time.perf_counter() - started, 4),
            }
            log.log(level, "request", extra={"fields": fields})
