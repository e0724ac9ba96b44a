from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from llmservice_operator.api.status import AutoscalingStatus
from llmservice_operator.explain.timeline import TimelineError, of_prometheus, of_status

NOW = 1_700_003_600.0  # 2023-11-14T23:13:20Z


def status(*decisions: tuple[str, int, float | None], load: float = 3.5) -> AutoscalingStatus:
    """Decisions as (time, replicas, load), newest first."""
    document: dict[str, Any] = {
        "desiredReplicas": decisions[0][1],
        "decisions": [
            {"time": time, "wanted": replicas, "replicas": replicas, "load": load, "reasons": ["demand: 1/s -> 1"]}
            for time, replicas, load in decisions
        ],
        "demand": {
            "requestsPerSecond": 4,
            "promptTokensPerSecond": 4000,
            "outputTokensPerSecond": 800,
            "load": load,
            "predictedLoad": load,
            "horizonSeconds": 70,
        },
    }
    return AutoscalingStatus.model_validate(document)


def test_decisions_of_the_last_hour_become_steps_until_now() -> None:
    known = status(("2023-11-14T23:03:20Z", 5, 3.9), ("2023-11-14T22:43:20Z", 3, 2.0), ("2023-11-14T20:00:00Z", 1, 0.5))

    timeline = of_status(known, 2.0, NOW)

    assert timeline.minutes == (-60, -30, -30, -10, -10, 0)
    assert timeline.asked == (1, 1, 3, 3, 5, 5)
    assert timeline.load == (None, None, 2.0, None, 3.9, 3.5)


@pytest.fixture
async def prometheus() -> Any:
    """Answers every range query with two samples, those of TTFT with one that is not a number; in many pieces."""

    async def answer(request: web.Request) -> web.Response:
        query = (await request.post())["query"]
        value = "NaN" if "histogram_quantile" in str(query) else "2.5"
        values = [[NOW - 60, "2"], [NOW, value]]
        text = json.dumps({"status": "success", "data": {"result": [{"metric": {}, "values": values}]}})
        return web.Response(text=" " * 2**20 + text)

    app = web.Application()
    app.router.add_post("/api/v1/query_range", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_prometheus_has_the_whole_hour(prometheus: str) -> None:
    timeline = await of_prometheus(prometheus, "team-a", "chat", 2.0, NOW)

    assert timeline.minutes == (-1, 0)
    assert (timeline.load, timeline.ready, timeline.capacity) == ((2.0, 2.5), (2.0, 2.5), (4.0, 6.25))
    assert timeline.ttft_p99_s == (2.0, None)


async def test_a_url_without_a_prometheus_is_named(prometheus: str) -> None:
    with pytest.raises(TimelineError, match="can't be read as a Prometheus"):
        await of_prometheus(f"{prometheus}/nowhere", "team-a", "chat", 2.0, NOW)
