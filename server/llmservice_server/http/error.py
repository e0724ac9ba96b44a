"""Errors in OpenAI's shape: what raises them, and the sentences for bodies that fail their validation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

ENGINE_DEAD, ENGINE_ERROR = BROKE_OFF = ("engine_dead", "engine_error")
"""Codes of requests that had been admitted and then failed; all other errors refuse a request."""
MAX_ECHO = 200  # characters of a client's input in an error


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
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.closes:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake in the body."""
    return ApiError(400, message, param=param, code=code)


_MISSING = ("missing", "missing_field")
_LENGTHS = ("too_long", "too_short", "string_too_long", "string_too_short")


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """One sentence for pydantic's `errors` about `body`: about the first field that is wrong."""
    located = [(_path(error["loc"], body), error) for error in map(_of_the_tag, errors)]
    field = located[0][0][:1]
    deepest = max(len(path) for path, _ in located if path[:1] == field)
    # A union gives an error for each of its types. The type that is meant is the one whose error is deepest.
    meant = [(path, error) for path, error in located if path[:1] == field and len(path) == deepest]
    telling = (each for types in (_MISSING, _LENGTHS) for each in meant if each[1]["type"] in types)
    path, error = next(telling, meant[0])  # a wrong length is of the type that the input has
    if error["type"] in _MISSING:
        missing = error["ctx"]["field"] if error["type"] == "missing_field" else error["loc"][-1]
        parent = path[:-1] if path[-1:] == (missing,) else path  # a null is missing, too
        name = echo(".".join(part for part in (_name(parent), str(missing)) if part))
        return invalid(f"you must provide {name}", str(path[0] if path else missing), code="missing_required_parameter")
    param = echo(path[0]) if path else None
    if not path and error["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return invalid("the body must be a JSON object")
    expected = list(dict.fromkeys(_expected(error) for path_, error in meant if path_ == path))
    if all(expected):
        given = _describe(error["input"])
        return invalid(f"{echo(_name(path))} is {given}, expected {', or '.join(map(str, expected))}", param)
    reason = str(error.get("ctx", {}).get("error") or error["msg"])
    return invalid(f"{echo(_name(path))}: {reason[:1].lower()}{reason[1:]}", param)


def _of_the_tag(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error about which of several types an object is, as one about the field that says so."""
    if error["type"] not in ("union_tag_invalid", "union_tag_not_found"):
        return error
    context = error["ctx"]
    loc = (*error["loc"], context["discriminator"].strip("'"))
    if error["type"] == "union_tag_not_found":
        return {**error, "type": "missing", "loc": loc}
    return {
        "type": "literal_error",
        "loc": loc,
        "input": context["tag"],
        "ctx": {"expected": context["expected_tags"]},
    }


def echo(text: object) -> str:
    """A client's input, in a length that an error may have."""
    return str(text)[:MAX_ECHO]


def _path(loc: Sequence[int | str], body: Any) -> tuple[int | str, ...]:
    """The part of pydantic's `loc` that leads through `body`; the rest names types of unions and missing fields."""
    path: list[int | str] = []
    for part in loc:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, dict) and part in body):
            path.append(part)
            body = body[part]
    return tuple(path)


def _name(path: Sequence[int | str]) -> str:
    """As in JavaScript: messages[0].content."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def _expected(error: Mapping[str, Any]) -> str | None:
    """What pydantic expected, None where its message says something else."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace("'", "")
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "an object"
    expected = str(error["msg"]).removeprefix("Input should be ")
    return None if expected == error["msg"] else expected.replace("a valid integer", "an integer").replace("valid ", "")


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return repr(value[:MAX_ECHO])
    return echo(json.dumps(value) if isinstance(value, bool | None) else value)
