"""A request's body, up to a size and within a time."""

from __future__ import annotations

from starlette.requests import Request

from llmservice_server.api.error import ApiError
from llmservice_server.api.state import ServerState


async def read_body(request: Request) -> bytes:
    """Raises ApiError, behind which the connection is closed, as what is left of the body would come first.

    413 as soon as more has come than a body may have, 408 where it is not complete in time, 503 where the server takes
    no work, or is shut down meanwhile.
    """
    state: ServerState = request.app.state.server
    limit, body = state.max_body_bytes, bytearray()
    try:
        async with state.body_deadline():
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    message = (
                        f"the body is larger than {limit} bytes: send less at once, or have --max-body-size raised"
                    )
                    raise ApiError(413, message, code="request_too_large", closes=True)
    except TimeoutError:
        if state.draining:
            raise state.not_ready("the server is shutting down", closes=True) from None
        message = f"the body was not complete within {state.config.body_timeout_s:g} s: send it faster, or have "
        raise ApiError(408, f"{message}--body-timeout raised", code="request_timeout", closes=True) from None
    return bytes(body)
