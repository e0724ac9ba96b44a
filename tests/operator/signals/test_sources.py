from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.pods.pod import Pod, pods_of
from llmservice_operator.signals.scrape import FINISHED, RUNNING, WAITING
from llmservice_operator.signals.sources import PodSignals, PrometheusSignals, SignalError, histories_of, range_query


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Pods on 127.0.0.x: .1 counts its scrapes, .2 hangs, .3 answers nonsense, .4 refuses."""
    scrapes = 0

    async def metrics(request: web.Request) -> web.Response:
        nonlocal scrapes
        host = request.url.host
        if host == "127.0.0.2":
            await asyncio.sleep(30)
        if host == "127.0.0.3":
            return web.Response(text="<html>")
        if host == "127.0.0.4":
            return web.Response(status=503)
        scrapes += 1
        return web.Response(text=f"llmservice_num_requests_running {scrapes}\nllmservice_num_requests_waiting 0\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def pod(number: int, port: int, uid: str = "") -> Pod:
    return Pod(
        name=f"pod-{number}",
        uid=uid or f"uid-{number}",
        ip=f"127.0.0.{number}",
        created_s=0.0,
        ready=True,
        terminating=False,
        metrics_port=port,
    )


async def test_an_unresponsive_pod_neither_delays_nor_hides_the_others(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session, timeout_s=0.2)

        histories = await signals.read("team-a", [pod(n, port) for n in (1, 2, 3, 4)], 60.0, 1000.0)

    assert list(histories) == ["pod-1"]


async def test_the_window_has_the_scrapes_within_it(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session)
        for now in (1000.0, 1030.0, 1070.0):
            histories = await signals.read("team-a", [pod(1, port)], 60.0, now)

    assert [(one.time_s, one.running) for one in histories["pod-1"]] == [(1030.0, 2), (1070.0, 3)]


async def test_what_does_not_change_between_scrapes_is_kept_once(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session)
        for now in (1000.0, 1010.0):
            histories = await signals.read("team-a", [pod(1, port)], 60.0, now)

    older, newer = histories["pod-1"]
    assert newer.waiting is older.waiting
    assert (older.running, newer.running) == (1, 2)


async def test_a_new_pod_with_an_old_name_has_no_history(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        signals = PodSignals(session)
        await signals.read("team-a", [pod(1, port)], 60.0, 1000.0)
        reborn = pod(1, port, uid="another-uid")

        histories = await signals.read("team-a", [reborn], 60.0, 1010.0)

    assert len(histories["pod-1"]) == 1


async def test_pods_of_the_previous_version_are_scraped_beside_new_ones(port: int) -> None:
    """An earlier pod has the port `http` alone, and serves /metrics there."""

    def manifest(number: int, **ports: int) -> dict[str, Any]:
        named = [{"name": name, "containerPort": number} for name, number in ports.items()]
        return {
            "metadata": {"name": f"pod-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "containers": [{"name": "proxy", "ports": [{"containerPort": 1}]}, {"name": "server", "ports": named}]
            },
            "status": {"podIP": f"127.0.0.{number}"},
        }

    pods = pods_of([manifest(1, http=1, metrics=port), manifest(5, http=port)])
    async with aiohttp.ClientSession() as session:
        histories = await PodSignals(session).read("team-a", pods, 60.0, 1000.0)

    assert set(histories) == {"pod-1", "pod-5"}


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


def test_old_samples_are_ignored() -> None:
    assert histories_of(answer(series(RUNNING, "a", (800, 1)), series(WAITING, "a", (800, 1))), 30.0, NOW) == {}


def test_two_scrapes_are_kept_where_the_window_is_shorter_than_the_interval() -> None:
    result = [series(name, "a", (940, 1), (955, 1), (970, 1), (985, 1)) for name in (RUNNING, WAITING)]

    histories = histories_of(answer(*result), 10.0, NOW)

    assert [one.time_s for one in histories["a"]] == [970, 985]


@pytest.mark.parametrize(
    "broken",
    [{"status": "error", "error": "parse error"}, {}, [], {"status": "success", "data": {"result": [{"metric": {}}]}}],
)
def test_an_invalid_answer_is_an_error(broken: Any) -> None:
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
    (query,) = queries
    assert query.endswith("[180000ms]")  # two scrapes, where they are up to 90 s apart


async def test_a_prometheus_that_is_down_raises(prometheus: tuple[str, list[str]], pod_named: Any) -> None:
    url, _ = prometheus
    async with aiohttp.ClientSession() as session:
        with pytest.raises(SignalError):
            await PrometheusSignals(session, url).read("broken", [pod_named("a")], 15.0, NOW)
        with pytest.raises(SignalError):
            await PrometheusSignals(session, "http://127.0.0.1:9").read("team-a", [pod_named("a")], 15.0, NOW)
