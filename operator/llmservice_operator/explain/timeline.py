"""The last hour of a service: load, replicas and p99 TTFT over time, from Prometheus or from the status' decisions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from llmservice_operator.api.status import AutoscalingStatus
from llmservice_operator.http_body import read_bounded
from llmservice_operator.monitoring import promql
from llmservice_operator.pods.pod import epoch

HOUR_S = 3600.0
_STEP_S = 30.0
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_TTFT_WINDOW_S = 60.0
_ANSWER_LIMIT_BYTES = 8 * 2**20

Series = tuple[float | None, ...]


class TimelineError(Exception):
    """The hour can't be read; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Equally long series; None where a figure is not known."""

    source: str
    minutes: tuple[float, ...]
    """Before now, so negative."""
    load: Series
    """The demand in replicas that would be busy all the time."""
    asked: Series
    """Replicas that the operator asked for."""
    ready: Series = ()
    demand: Series = ()
    """Prompt and output tokens per second that arrive."""
    capacity: Series = ()
    """Tokens per second that the ready replicas serve."""
    ttft_p99_s: Series = ()
    ttft_target_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return not any(value is not None for series in (self.load, self.asked, self.ttft_p99_s) for value in series)


def of_status(status: AutoscalingStatus, ttft_target_s: float | None, now: float) -> Timeline:
    """What the last decisions say: the replicas that were set, and the load that they were set for."""
    steps = [(epoch(one.time), one) for one in reversed(status.decisions)]
    within = [(when, one) for when, one in steps if when >= now - HOUR_S]
    before = [one for when, one in steps if when < now - HOUR_S]
    points: list[tuple[float, float | None, float | None]] = []
    asked: float | None = before[-1].replicas if before else None
    if asked is not None:
        points.append((now - HOUR_S, None, asked))
    for when, one in within:
        points += [(when, None, asked), (when, one.load, float(one.replicas))]
        asked = float(one.replicas)
    load = status.demand.load if status.demand else None
    points.append((now, load, float(status.desired_replicas)))
    return Timeline(
        source="the decisions in the status (give --prometheus URL for the whole hour)",
        minutes=tuple((when - now) / 60 for when, _, _ in points),
        load=tuple(load for _, load, _ in points),
        asked=tuple(asked for _, _, asked in points),
        ttft_target_s=ttft_target_s,
    )


async def of_prometheus(url: str, namespace: str, name: str, ttft_target_s: float | None, now: float) -> Timeline:
    """The hour as Prometheus has it; raises TimelineError."""
    own = promql.matchers(namespace=namespace, name=name)
    gauges = {
        key: f"max({promql.selector(f'llmservice_operator_{metric}', own)})"
        for key, metric in (
            ("load", "load_replicas"),
            ("asked", "desired_replicas"),
            ("ready", "ready_replicas"),
            ("demand", "demand_tokens_per_second"),
            ("each", "replica_tokens_per_second"),
        )
    }
    gauges["ttft"] = promql.service_queries(namespace, name, _TTFT_WINDOW_S)["ttftP99"]
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            answers = await asyncio.gather(*(_range(session, url, query, now) for query in gauges.values()))
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise TimelineError(
            f"{url} can't be read as a Prometheus ({type(error).__name__}: {error}): give its base URL, such as"
            " http://localhost:9090"
        ) from error
    found = dict(zip(gauges, answers, strict=True))
    times = sorted({when for series in found.values() for when in series})
    each = {key: tuple(series.get(when) for when in times) for key, series in found.items()}
    capacity = tuple(
        None if ready is None or tokens is None else ready * tokens
        for ready, tokens in zip(each["ready"], each["each"], strict=True)
    )
    return Timeline(
        source=f"Prometheus at {url}",
        minutes=tuple((when - now) / 60 for when in times),
        load=each["load"],
        asked=each["asked"],
        ready=each["ready"],
        demand=each["demand"],
        capacity=capacity,
        ttft_p99_s=each["ttft"],
        ttft_target_s=ttft_target_s,
    )


async def _range(session: aiohttp.ClientSession, url: str, query: str, now: float) -> Mapping[float, float]:
    """Values by time, without those that are not finite; of several series the first."""
    data = {"query": query, "start": f"{now - HOUR_S:.3f}", "end": f"{now:.3f}", "step": f"{_STEP_S:g}"}
    async with session.post(url.rstrip("/") + "/api/v1/query_range", data=data) as response:
        answer: dict[str, Any] = json.loads(await read_bounded(response, _ANSWER_LIMIT_BYTES))
    if answer["status"] != "success":
        raise ValueError(answer.get("error", "no reason given"))
    result: Sequence[dict[str, Any]] = answer["data"]["result"]
    values = result[0]["values"] if result else []
    return {float(when): float(value) for when, value in values if math.isfinite(float(value))}
