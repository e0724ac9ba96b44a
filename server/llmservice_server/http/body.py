"""Bodies: read within bounds, parsed once, validated, and reported where parts of them are ignored."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

import jiter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from llmservice_server.http.error import ApiError, echo, invalid
from llmservice_server.http.protocol.base import Body, unknown_fields
from llmservice_server.http.response import USAGE_HEADER, usage_report
from llmservice_server.http.state import ServerState, Serving, server_state, serving
from llmservice_server.text.tokenizer import LONG_TEXT_BYTES

IGNORED_HEADER = "x-ignored-parameters"
SLOTS_HEADER = "x-admissible-sequences"
"""How many requests like those before run at once; the gateway reads it."""
_DISCARDED_BYTES = 64 * 2**20
_MAX_IGNORED_NAMES = 8
_MAX_NAME_LENGTH = 64
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # a comma separates the names
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # the engine needs the other cores

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound=Body)

_threads = ThreadPoolExecutor(_NUM_THREADS, "long-input")


async def run(num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work`, in one of a few threads where its input is long, so that other requests' tokens do not wait for it."""
    if num_bytes <= LONG_TEXT_BYTES:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))


class BodyRoute(APIRoute):
    """A route with a JSON body. FastAPI documents the body and hands it to the endpoint; it is read and checked here.

    FastAPI reads a body without a bound, accepts duplicate keys, and validates on the event loop.
    """

    many_texts = False
    """Whether a body holds more than one prompt may have."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None  # noqa: S101  # every such route has one
        kind = cast("type[Body]", self.body_field.field_info.annotation)

        async def read_and_handle(request: Request) -> Response:
            request.scope["arrival_s"] = time.monotonic()
            state, needed = server_state(request), serving(request)
            self.admit(request, state, needed)
            body = await read_body(request, state, state.max_body_bytes(needed, many_texts=self.many_texts))
            request.scope["num_body_bytes"] = len(body)
            parsed = await run(len(body), parse, body, kind)
            unknown = list(dict.fromkeys(unknown_fields(parsed)))
            if unknown and state.config.strict_parameters:
                raise invalid(f"Unrecognized request argument supplied: {echo(unknown[0])}", echo(unknown[0]))
            response = await handle(_ParsedRequest(request, parsed))
            if (stats := state.engine.stats) is not None:
                response.headers[SLOTS_HEADER] = str(stats.num_admissible)
            if (report := usage_report(request.scope)) is not None:
                response.headers[USAGE_HEADER] = report
            if unknown:
                state.metrics.ignored_parameters.inc(len(unknown))
                response.headers[IGNORED_HEADER] = _header(unknown)
            return response

        return read_and_handle

    def admit(self, request: Request, state: ServerState, serving: Serving) -> None:
        """Refuse the request before its body is read. Raises ApiError."""


class _ParsedRequest(Request):
    """A request with a validated body, which FastAPI passes on as it is. Its content type does not matter."""

    def __init__(self, request: Request, parsed: Body) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        return b"{}"  # not empty, so that `json` is asked

    async def json(self) -> Body:
        return self._parsed


async def read_body(request: Request, state: ServerState, max_bytes: int) -> bytes:
    """Raises ApiError and closes the connection, since the rest of the body would be read as the next request.

    413 where it has more than `max_bytes`, 408 where it is not complete in time, 503 where the server is shut down
    meanwhile. Of a body that is too large some more is read: clients that are still sending when the connection is
    closed do not see the answer.
    """
    body, num_bytes = bytearray(), 0
    try:
        async with state.body_deadline():
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= max_bytes:
                    body += chunk
                elif num_bytes > max_bytes + _DISCARDED_BYTES:
                    break
    except TimeoutError:
        if state.draining:
            raise state.not_ready("the server is shutting down", closes=True) from None
        message = f"the body was not complete within {state.config.body_timeout_s:g} s: send it faster, or have "
        raise ApiError(408, f"{message}--body-timeout raised", code="request_timeout", closes=True) from None
    if num_bytes > max_bytes:
        message = f"the body is larger than {max_bytes} bytes: send less at once, or have --max-body-size raised"
        raise ApiError(413, message, code="request_too_large", closes=True)
    return bytes(body)


def parse(body: bytes, kind: type[B]) -> B:
    """Raises ApiError (400) or RequestValidationError."""
    try:
        content = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise invalid(echo(f"the body is not valid JSON: {error}")) from None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False), body=content) from None


def num_body_bytes(request: Request) -> int:
    """Of the request's body, which has been read."""
    num_bytes: int = request.scope["num_body_bytes"]
    return num_bytes


def _header(names: Sequence[str]) -> str:
    return ", ".join(_UNPRINTABLE.sub("?", name)[:_MAX_NAME_LENGTH] for name in names[:_MAX_IGNORED_NAMES])
