"""A request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import Request

from llmservice_server.api.error import ApiError


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError (413) as soon as more than `limit` bytes have come."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            message = f"the body is larger than {limit} bytes: send less at once, or raise --max-body-size"
            raise ApiError(413, message, code="request_too_large")
    return bytes(body)
