from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.signals.prometheus import PrometheusSignals, histories_of, range_query
from llmservice_operator.signals.scrape import FINISHED, RUNNING, WAITING
from llmservice_operator.signals.signals import SignalError

NOW = 1000.0


def series(name: str, pod: str, *values: tuple[float, float], **labels: str) -> dict[str, Any]:
    metric = {"__name__": name, "namespace": "team-a", "pod": pod, **labels}
    return {"metric": metric, "values": [[time_s, str(value)] for time_s, value in values]}


def answer(*result: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(result)}}


def test_label_values_cannot_break_out_of_the_query() -> None:
    query = range_query('team"} or vector(1) #', ["a.b", 'c"\\d'], 15.0)

    assert 'namespace="team\\"} or vector(1) #"' in query
    assert 'pod=~"a\\\\.b|c\\"' in query
    assert query.endswith("}[15000ms]")


def test_series_of_one_scrape_come_together_by_their_time() -> None:
    histories = histories_of(
        answer(
            series(RUNNING, "a", (980, 1), (995, 3)),
            series(WAITING, "a", (980, 0), (995, 4), lane="interactive"),
            series(WAITING, "a", (980, 0), (995, 1), lane="batch"),
            series(FINISHED, "a", (980, 10), (995, 40)),
        ),
        30.0,
        NOW,
    )

    assert [(one.time_s, one.running, one.waiting, one.finished) for one in histories["a"]] == [
        (980, 1, 0, 10),
        (995, 3, 5, 40),
    ]


def test_old_samples_are_no_signal() -> None:
    assert histories_of(answer(series(RUNNING, "a", (800, 1)), series(WAITING, "a", (800, 1))), 30.0, NOW) == {}


def test_two_scrapes_are_kept_where_the_window_is_shorter_than_the_interval() -> None:
    result = [series(name, "a", (940, 1), (955, 1), (970, 1), (985, 1)) for name in (RUNNING, WAITING)]

    histories = histories_of(answer(*result), 10.0, NOW)

    assert [one.time_s for one in histories["a"]] == [970, 985]


@pytest.mark.parametrize(
    "broken",
    [{"status": "error", "error": "parse error"}, {}, [], {"status": "success", "data": {"result": [{"metric": {}}]}}],
)
def test_an_answer_that_is_none_is_an_error_and_no_zero_load(broken: Any) -> None:
    with pytest.raises(SignalError):
        histories_of(broken, 30.0, NOW)


@pytest.fixture
async def prometheus() -> AsyncIterator[tuple[str, list[str]]]:
    """A query endpoint that answers 200 to one namespace and 503 to another; and the queries that it saw."""
    queries: list[str] = []

    async def query(request: web.Request) -> web.Response:
        form = await request.post()
        queries.append(str(form["query"]))
        if "broken" in queries[-1]:
            return web.Response(status=503, text="<html>down</html>")
        return web.json_response(answer(series(RUNNING, "a", (995, 3)), series(WAITING, "a", (995, 4))))

    app = web.Application()
    app.router.add_post("/prefix/api/v1/query", query)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/prefix/", queries
    await runner.cleanup()


async def test_one_query_brings_all_series(prometheus: tuple[str, list[str]], pod_named: Any) -> None:
    url, queries = prometheus
    async with aiohttp.ClientSession() as session:
        histories = await PrometheusSignals(session, url).read("team-a", [pod_named("a")], 15.0, NOW)

    assert histories["a"][0].running == 3
    assert len(queries) == 1


async def test_a_prometheus_that_is_down_raises(prometheus: tuple[str, list[str]], pod_named: Any) -> None:
    url, _ = prometheus
    async with aiohttp.ClientSession() as session:
        with pytest.raises(SignalError):
            await PrometheusSignals(session, url).read("broken", [pod_named("a")], 15.0, NOW)
        with pytest.raises(SignalError):
            await PrometheusSignals(session, "http://127.0.0.1:9").read("team-a", [pod_named("a")], 15.0, NOW)
