"""How a request is served: its lane and its time limits, as headers, body and API key determine them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_server.engine.request import LANES
from llmservice_server.http.error import ApiError, invalid
from llmservice_server.http.protocol.generation import GenerationRequest

LANE_HEADER = "x-llmservice-lane"
TIMEOUT_HEADER = "x-llmservice-timeout"
QUEUE_TIMEOUT_HEADER = "x-llmservice-queue-timeout"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    arrival_s: float  # monotonic
    lane: str
    priority: int  # within the lane; the smaller is served first
    timeout_s: float | None
    queue_timeout_s: float | None


def request_options(
    headers: Mapping[str, str],
    priority: str | int,
    *,
    arrival_s: float,
    default_lane: str,
    timeout_s: float | None,
    queue_timeout_s: float | None,
) -> RequestOptions:
    """The body's lane goes before the header's, and that before `default_lane`, the API key's or the service's.

    A client may choose a lower lane than its default and shorten the server's time limits, not the other way round.
    Raises ApiError: 400 for a header's invalid value, 403 for a higher lane.
    """
    named = priority if isinstance(priority, str) else None
    lane = named or headers.get(LANE_HEADER, default_lane)
    if lane not in LANES:
        raise invalid(f"{LANE_HEADER} is {lane!r}, expected one of {', '.join(LANES)}")
    if LANES.index(lane) < LANES.index(default_lane):
        raise _too_high(lane, default_lane, "priority" if named else None)
    return RequestOptions(
        arrival_s,
        lane,
        priority if isinstance(priority, int) else 0,
        _shorter(headers, TIMEOUT_HEADER, timeout_s),
        _shorter(headers, QUEUE_TIMEOUT_HEADER, queue_timeout_s),
    )


def _too_high(lane: str, highest: str, param: str | None) -> ApiError:
    message = (
        f"{param or LANE_HEADER} asks for the lane {lane}, but {highest} is the highest that this client may choose: "
        "leave it out, or ask the service's owner to raise spec.lanes.default (--default-lane) or for an API key of "
        f"the lane {lane}"
    )
    return ApiError(403, message, param=param, code="lane_not_allowed")


def _shorter(headers: Mapping[str, str], name: str, limit_s: float | None) -> float | None:
    text = headers.get(name)
    if text is None:
        return limit_s
    try:
        asked_s = float(text)
    except ValueError:
        asked_s = math.nan
    if not 0 < asked_s < math.inf:
        raise invalid(f"{name} is {text!r}, expected seconds, more than 0")
    return asked_s if limit_s is None else min(asked_s, limit_s)


def apply_defaults(body: GenerationRequest, defaults: Mapping[str, Any]) -> None:
    """Set what the request does not set itself."""
    for name in defaults.keys() - body.model_fields_set:
        setattr(body, name, defaults[name])
