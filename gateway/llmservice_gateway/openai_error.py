"""Errors in the shape of OpenAI's API, so that any of its clients raises the right exception with the right text."""

from __future__ import annotations

from aiohttp import web

RETRY_AFTER_S = 2


def error_response(
    status: int, message: str, code: str, param: str | None = None, retry_after_s: int | None = None
) -> web.Response:
    """`{"error": {message, type, param, code}}`; `type` follows from the status as in OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error" if status == 503 else "api_error"
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else None
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status, headers=headers)


def unavailable(message: str, code: str) -> web.Response:
    """503 with Retry-After, which OpenAI's clients honour."""
    return error_response(503, message, code, retry_after_s=RETRY_AFTER_S)
