"""On which terms a request is served: its lane, and how long it may take. Headers, body and API key have a say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmservice_server.api.error import ApiError, invalid
from llmservice_server.engine.request import LANES

LANE_HEADER = "x-llmservice-lane"
TIMEOUT_HEADER = "x-llmservice-timeout"
QUEUE_TIMEOUT_HEADER = "x-llmservice-queue-timeout"


@dataclass(frozen=True, slots=True)
class Terms:
    lane: str
    timeout_s: float | None
    queue_timeout_s: float | None


def terms_of(
    headers: Mapping[str, str],
    priority: str | None,
    *,
    default_lane: str,
    timeout_s: float | None,
    queue_timeout_s: float | None,
) -> Terms:
    """The body's `priority` goes before the header, and that before `default_lane`, the API key's or the service's.

    A client may choose a lower lane than its default and shorten the server's time limits, not the other way round.
    Raises ApiError: 400 where a header means nothing, 403 for a higher lane.
    """
    lane = priority or headers.get(LANE_HEADER, default_lane)
    if lane not in LANES:
        raise invalid(f"{LANE_HEADER} is {lane!r}, expected one of {', '.join(LANES)}")
    if LANES.index(lane) < LANES.index(default_lane):
        raise _too_high(lane, default_lane, "priority" if priority else None)
    return Terms(
        lane, _shorter(headers, TIMEOUT_HEADER, timeout_s), _shorter(headers, QUEUE_TIMEOUT_HEADER, queue_timeout_s)
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
