"""On which terms a request is served: its lane, and how long it may take. Headers, body and API key have a say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmservice_server.api.error import invalid
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
    """The body's `priority` goes before the header, and that before the API key's lane.

    A client may shorten the server's time limits, but not lengthen them. Raises ApiError where a header means nothing.
    """
    lane = priority or headers.get(LANE_HEADER, default_lane)
    if lane not in LANES:
        raise invalid(f"{LANE_HEADER} is {lane!r}, expected one of {', '.join(LANES)}")
    return Terms(
        lane, _shorter(headers, TIMEOUT_HEADER, timeout_s), _shorter(headers, QUEUE_TIMEOUT_HEADER, queue_timeout_s)
    )


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
