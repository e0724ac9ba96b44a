"""Requests held for a service without a ready pod, over real sockets."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from llmservice_gateway.requests.holding import HoldLimits
from llmservice_gateway.requests.inference import GatewayConfig
from llmservice_gateway.routing.routes import WAITING_CURES, RoutedService, build_table
from llmservice_operator.status import conditions

StartPod = Callable[[str], Awaitable[Any]]
CHAT = "/v1/chat/completions"
LIMITS = HoldLimits(requests=50, body_bytes=4096, timeout_s=20, comment_s=0.05)


def service(reason: str | None = "ScaledToZero", status: str = "False", slots: int = 2, **spec: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": status, "reason": reason, "message": "why it is so"}
    return {
        "metadata": {"name": "llama", "namespace": "default"},
        "spec": {"model": {"uri": "file:///m"}, "autoscaling": {"minReplicas": 0, "maxReplicas": 2}, **spec},
        "status": {"sizing": {"maxNumSeqs": slots}, "conditions": [condition] if reason else []},
    }


@pytest.fixture
async def holding(gateway_front: Any) -> AsyncIterator[Any]:
    async with gateway_front(GatewayConfig(hold=LIMITS)) as front:
        yield front


async def held(front: Any) -> dict[str, Any]:
    async with front.metrics.get("/internal/held") as response:
        return dict((await response.json())["held"])


async def until_held(front: Any, count: int) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (found := await held(front)).get("default/llama", {}).get("requests", 0) != count:
            await asyncio.sleep(0)
    return found


async def ask(front: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with front.client.post(CHAT, json={"model": "llama"} | fields) as response:
        return response.status, await response.json()


async def test_requests_wait_for_the_first_pod_and_are_reported_meanwhile(
    holding: Any, cluster: Any, start_pod: StartPod
) -> None:
    cluster.emit("llmservices", "ADDED", service())
    await holding.until("llama", 0)
    assert await held(holding) == {}
    message = {"role": "user", "content": "x" * 400}
    asking = [asyncio.create_task(ask(holding, messages=[message], max_tokens=10)) for _ in range(4)]
    report = (await until_held(holding, 4))["default/llama"]
    while (await held(holding))["default/llama"]["oldest_s"] < 0.05:  # much longer than what the gateway adds
        await asyncio.sleep(0)
    assert report["tokens"] >= 4 * 110
    assert 0 <= report["oldest_s"] < 5
    pod = await start_pod("a")
    cluster.emit("pods", "ADDED", pod.manifest("llama"))
    assert await asyncio.gather(*asking) == [(200, {"pod": "a"})] * 4
    assert await held(holding) == {}
    value = holding.gateway.metrics.registry.get_sample_value
    assert value("llmservice_gateway_wake_ups_total", {"model": "llama"}) == 1
    assert value("llmservice_gateway_held_requests", {"model": "llama"}) == 0
    assert value("llmservice_gateway_held_seconds_count", {"model": "llama", "outcome": "forwarded"}) == 4
    held_s = value("llmservice_gateway_held_seconds_sum", {"model": "llama", "outcome": "forwarded"})
    assert value("llmservice_gateway_added_latency_seconds_count", {"model": "llama"}) == 4
    assert value("llmservice_gateway_added_latency_seconds_sum", {"model": "llama"}) < held_s / 2


async def test_held_requests_spread_over_the_pods_as_these_have_room(
    holding: Any, cluster: Any, start_pod: StartPod
) -> None:
    cluster.emit("llmservices", "ADDED", service(slots=2))
    await holding.until("llama", 0)
    asking = [asyncio.create_task(ask(holding, n=number)) for number in range(12)]
    await until_held(holding, 12)
    release = asyncio.Event()

    async def busy(_request: web.Request) -> web.Response:
        await release.wait()
        return web.json_response({})

    first, second = [await start_pod(name) for name in "ab"]
    first.answer = second.answer = busy
    cluster.emit("pods", "ADDED", first.manifest("llama"))
    await until_held(holding, 8)
    async with asyncio.timeout(5):
        while len(first.requests) < 4:
            await asyncio.sleep(0)
    cluster.emit("pods", "ADDED", second.manifest("llama"))
    await until_held(holding, 4)
    release.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 12
    assert min(len(first.requests), len(second.requests)) >= 4


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (service("ModelLoadFailed"), "no_ready_replica", "ModelLoadFailed: why it is so"),
        (service(replicas=0, autoscaling=None), "no_ready_replica", "NoReplicas"),
        (None, "model_not_found", "does not exist"),
    ],
    ids=["the model does not load", "scaled to zero by its user", "deleted"],
)
async def test_a_wait_without_hope_ends_with_the_reason(
    holding: Any, cluster: Any, change: dict[str, Any] | None, code: str, said: str
) -> None:
    cluster.emit("llmservices", "ADDED", service())
    await holding.until("llama", 0)
    asking = asyncio.create_task(ask(holding))
    await until_held(holding, 1)
    cluster.emit("llmservices", "MODIFIED" if change else "DELETED", change or service())
    async with asyncio.timeout(5):
        status, body = await asking
    assert (status, body["error"]["code"]) == (503 if change else 404, code)
    assert said in body["error"]["message"]
    assert await held(holding) == {}


async def test_streams_receive_comments_and_then_the_answer(holding: Any, cluster: Any, start_pod: StartPod) -> None:
    cluster.emit("llmservices", "ADDED", service())
    await holding.until("llama", 0)

    async def stream(_request: web.Request) -> web.Response:
        return web.Response(body=b"data: 1\n\ndata: [DONE]\n\n", headers={"Content-Type": "text/event-stream"})

    pod = await start_pod("a")
    pod.answer = stream
    async with holding.client.post(CHAT, json={"model": "llama", "stream": True}) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        assert await response.content.readuntil(b"\n\n") == b": waiting for a replica to become ready\n\n"
        cluster.emit("pods", "ADDED", pod.manifest("llama"))
        rest = await response.read()
    assert rest.replace(b": waiting for a replica to become ready\n\n", b"") == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("by_pod", [True, False], ids=["refused by the pod", "no pod is to be expected"])
async def test_a_failure_after_comments_is_an_error_event(
    holding: Any, cluster: Any, start_pod: StartPod, by_pod: bool
) -> None:
    cluster.emit("llmservices", "ADDED", service())
    await holding.until("llama", 0)

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response(
            {"error": {"message": "temperature"}}, status=400, dumps=lambda v: json.dumps(v, indent=1)
        )

    pod = await start_pod("a")
    pod.answer = refuse
    async with holding.client.post(CHAT, json={"model": "llama", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        if by_pod:
            cluster.emit("pods", "ADDED", pod.manifest("llama"))
        else:
            cluster.emit("llmservices", "MODIFIED", service("ModelLoadFailed"))
        *_, error, done, end = (await response.read()).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    event, data = error.split(b"\n")
    assert event == b"event: error"
    expected = "temperature" if by_pod else "ModelLoadFailed"
    assert expected in json.loads(data.removeprefix(b"data: "))["error"]["message"]


async def test_a_request_takes_memory_only_for_its_body_and_none_once_it_is_answered(
    gateway_front: Any, cluster: Any, start_pod: StartPod, never_ending: Any
) -> None:
    async with gateway_front(GatewayConfig()) as front:
        cluster.emit("llmservices", "ADDED", service())
        await front.until("llama", 0)
        pod = await start_pod("a")
        pod.answer = never_ending
        body = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "word " * 200_000}]}).encode()
        tracemalloc.start()
        try:
            asking = asyncio.create_task(front.client.post(CHAT, data=body))
            await until_held(front, 1)
            assert len(body) <= tracemalloc.get_traced_memory()[0] < 1.5 * len(body)
            cluster.emit("pods", "ADDED", pod.manifest("llama"))
            async with await asking as response:
                assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
                assert tracemalloc.get_traced_memory()[0] < 1.5 * len(body), "that of the pod, which is in this process"
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("limits", [HoldLimits(requests=1), HoldLimits(body_bytes=600)], ids=["number", "bytes"])
async def test_beyond_the_bounds_requests_are_refused_with_a_hint(
    gateway_front: Any, cluster: Any, limits: HoldLimits
) -> None:
    async with gateway_front(GatewayConfig(hold=limits)) as front:
        cluster.emit("llmservices", "ADDED", service())
        await front.until("llama", 0)
        waiting = asyncio.create_task(ask(front, user="x" * 400))
        await until_held(front, 1)
        async with front.client.post(CHAT, json={"model": "llama", "user": "x" * 400}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["code"] == "too_many_held_requests"
        refused = {"model": "llama", "outcome": "refused"}
        assert front.gateway.metrics.registry.get_sample_value("llmservice_gateway_held_seconds_count", refused) == 1
        waiting.cancel()
        await until_held(front, 0)


async def test_a_request_is_not_held_for_ever(gateway_front: Any, cluster: Any) -> None:
    async with gateway_front(GatewayConfig(hold=HoldLimits(timeout_s=0.05))) as front:
        cluster.emit("llmservices", "ADDED", service())
        await front.until("llama", 0)
        status, body = await ask(front)
    assert (status, body["error"]["code"]) == (503, "no_ready_replica")


async def test_a_request_whose_only_pod_dies_waits_for_the_next_one(
    holding: Any, cluster: Any, start_pod: StartPod
) -> None:
    cluster.emit("llmservices", "ADDED", service("Serving", "True"))
    dead = await start_pod("a")

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    dead.answer = die
    cluster.emit("pods", "ADDED", dead.manifest("llama"))
    await holding.until("llama", 1)
    asking = asyncio.create_task(ask(holding))
    await until_held(holding, 1)
    cluster.emit("pods", "DELETED", dead.manifest("llama"))
    new = await start_pod("b")
    cluster.emit("pods", "ADDED", new.manifest("llama"))
    async with asyncio.timeout(5):
        assert await asking == (200, {"pod": "b"})


async def test_a_request_that_the_last_pod_refuses_as_it_ends_waits_for_the_next_one(
    holding: Any, cluster: Any, start_pod: StartPod
) -> None:
    cluster.emit("llmservices", "ADDED", service("Serving", "True"))
    ending, new = await start_pod("a"), await start_pod("b")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "draining"}}, status=503)

    ending.answer = refuse
    cluster.emit("pods", "ADDED", ending.manifest("llama"))
    await holding.until("llama", 1)
    asking = asyncio.create_task(ask(holding))
    await until_held(holding, 1)
    cluster.emit("pods", "ADDED", new.manifest("llama"))
    async with asyncio.timeout(5):
        assert await asking == (200, {"pod": "b"})
    assert len(ending.requests) == 1


async def test_a_client_s_time_limit_includes_the_wait(holding: Any, cluster: Any) -> None:
    cluster.emit("llmservices", "ADDED", service())
    await holding.until("llama", 0)
    headers = {"x-llmservice-timeout": "0.05"}
    async with asyncio.timeout(5), holding.client.post(CHAT, json={"model": "llama"}, headers=headers) as response:
        assert response.status == 503
        assert "0.05 s" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("given", "awaited"),
    [
        (service(), True),
        (service(None), True),
        (service("Serving", "True"), True),
        (service("NoReplicas", "True", replicas=0, autoscaling=None), False),
        (service("NoReplicas", "True", autoscaling=None), True),
        (service("Killed"), True),
        (service("ModelLoadFailed"), False),
        (service("QuotaExceeded"), False),
        ({**service(), "metadata": {"name": "llama", "deletionTimestamp": "2026-01-01T00:00:00Z"}}, False),
    ],
    ids=[
        "zero",
        "new",
        "restarting",
        "zero by its user",
        "scaled up since",
        "killed",
        "bad model",
        "quota",
        "deleting",
    ],
)
def test_a_service_is_awaited_while_a_pod_can_be_expected(given: dict[str, Any], awaited: bool) -> None:
    (state,) = build_table([RoutedService.parse(given)], []).find("llama").services
    assert state.is_awaited is awaited


def test_the_reasons_are_those_of_the_operator() -> None:
    assert conditions.SCALED_TO_ZERO in WAITING_CURES
    assert conditions.UPDATING in WAITING_CURES
    assert conditions.NO_REPLICAS not in WAITING_CURES
    assert conditions.LIMITED_BY_COST not in WAITING_CURES
    starting = conditions.ready_verdict(None, 1, [], _sized(), None)
    assert starting.reason in WAITING_CURES
    denied = conditions.ready_verdict(None, 1, [], _sized(), conditions.Trouble("QuotaExceeded", "no"))
    assert denied.reason not in WAITING_CURES


def _sized() -> Any:
    from llmservice_operator.sizing import Sized

    return Sized.__new__(Sized)  # ready_verdict asks only whether the sizing is a problem
