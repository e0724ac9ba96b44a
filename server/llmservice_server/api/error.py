"""Errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

ENGINE_DEAD, ENGINE_ERROR = BROKE_OFF = ("engine_dead", "engine_error")


class ApiError(Exception):
    """A request that is answered with an error: `status` is HTTP's, the rest is OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        """`closes` the connection."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes = closes

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def broke_off(self) -> bool:
        """The request had been taken and then failed; all other errors refuse it."""
        return self.code in BROKE_OFF

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.closes:
            headers["Connection"] = "close"
        return JsonResponse(self.body, self.status, headers)


class JsonResponse(Response):
    """Anything that msgspec can encode."""

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status, dict(headers or {}), media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake in the body."""
    return ApiError(400, message, param=param, code=code)
