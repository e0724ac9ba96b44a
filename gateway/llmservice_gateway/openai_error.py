"""Errors in the shape of OpenAI's API, so that any of its clients raises the right exception with the right text."""

from __future__ import annotations

import json
from collections.abc import Mapping

RETRY_AFTER_S = 2

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class GatewayError(Exception):
    """The gateway's own answer: `status` and `headers` are HTTP's, the rest is OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}`; `type` follows from the status."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> GatewayError:
    """503 with Retry-After, which OpenAI's clients honour."""
    return GatewayError(503, message, code, headers={"Retry-After": str(retry_after_s)})
