"""The gateway over real sockets, from the client's side."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_gateway.openai_error import GatewayError
from llmservice_gateway.requests.holding import HoldLimits
from llmservice_gateway.requests.inference import INFERENCE_PATHS, GatewayConfig
from llmservice_gateway.routing.demand import Usage

StartPod = Callable[[str], Awaitable[Any]]

CHAT = "/v1/chat/completions"


def llmservice(name: str, namespace: str = "default", slots: int = 0) -> dict[str, Any]:
    service = {"metadata": {"name": name, "namespace": namespace}, "spec": {"model": {"uri": "file:///m"}}}
    return service | ({"status": {"sizing": {"maxNumSeqs": slots}}} if slots else {})


@pytest.fixture
async def serve(front: Any, cluster: Any, start_pod: StartPod) -> Callable[..., Awaitable[list[Any]]]:
    """Announce a service with ready pods and wait until the gateway knows them."""

    async def announce(model: str, *pods: str, namespace: str = "default", slots: int = 0) -> list[Any]:
        cluster.emit("llmservices", "ADDED", llmservice(model, namespace, slots))
        started = [await start_pod(name) for name in pods]
        for pod in started:
            cluster.emit("pods", "ADDED", pod.manifest(model, namespace))
        await front.until(model, len(pods))
        return started

    return announce


async def test_request_reaches_the_pod_with_its_body_and_headers_as_they_were(front: Any, serve: Any) -> None:
    (pod,) = await serve("llama", "a")
    body = b'{"model":"llama",  "messages":[{"role":"user","content":"h\\u00e9"}]}'
    headers = {
        "Authorization": "Bearer sk-1",
        "X-Request-Id": "r-1",
        "Content-Type": "application/json",
        "X-Extra": "1",
        "x-llmservice-timeout": "9",
    }
    async with front.client.post(CHAT + "?a=b", data=body, headers=headers) as response:
        assert response.status == 200
        assert await response.json() == {"pod": "a"}
        assert response.headers["X-Request-Id"] == "r-1"
    request, received = pod.requests[0]
    assert received == body
    assert request.path_qs == CHAT + "?a=b"
    assert {name: request.headers[name] for name in headers} == headers


async def test_stream_arrives_byte_for_byte_and_piece_by_piece(front: Any, serve: Any) -> None:
    (pod,) = await serve("llama", "a")
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    pod.answer = stream
    async with front.client.post(CHAT, json={"model": "llama", "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readany() == b'data: {"n": 1}\n\n'
        go_on.set()
        assert await response.read() == b"data: [DONE]\n\n"


async def test_compressed_answer_is_passed_on_compressed(front: Any, serve: Any) -> None:
    import gzip

    (pod,) = await serve("llama", "a")
    packed = gzip.compress(b"{}")

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    pod.answer = answer
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["Content-Length"] == str(len(packed))


async def test_client_that_leaves_takes_the_pods_request_with_it(front: Any, serve: Any) -> None:
    (pod,) = await serve("llama", "a")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    pod.answer = stream
    response = await front.client.post(CHAT, json={"model": "llama"})
    await response.content.readany()
    response.close()
    async with asyncio.timeout(5):
        await pod.disconnected.wait()
    assert front.gateway.metrics.registry.get_sample_value(
        "llmservice_gateway_requests_total", {"model": "llama", "code": "499"}
    )


async def test_pod_that_refuses_connections_is_passed_over(front: Any, serve: Any, cluster: Any) -> None:
    pod, other = await serve("llama", "a", "b")
    gone = pod.manifest("llama")
    gone["spec"]["containers"][0]["ports"][0]["containerPort"] = 1  # no server listens there
    cluster.emit("pods", "MODIFIED", gone)
    async with asyncio.timeout(5):
        while not any(backend.url.endswith(":1") for backend in front.routing.table.find("llama").backends):
            await asyncio.sleep(0)
    for _ in range(4):
        async with front.client.post(CHAT, json={"model": "llama"}) as response:
            assert (response.status, await response.json()) == (200, {"pod": "b"})
    assert len(other.requests) == 4


async def test_connections_to_a_node_that_is_lost_end_within_half_a_minute(front: Any, serve: Any) -> None:
    """Nothing closes them: TCP has to notice, while an answer is awaited and while a request is sent."""
    await serve("llama", "a")
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.status == 200
    ((idle,),) = front.gateway._inference._proxy._session.connector._conns.values()
    connection = idle[0].transport.get_extra_info("socket")

    def tcp(option: int) -> int:
        return int(connection.getsockopt(socket.IPPROTO_TCP, option))

    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert tcp(socket.TCP_KEEPIDLE) + tcp(socket.TCP_KEEPCNT) * tcp(socket.TCP_KEEPINTVL) <= 30
    assert 0 < tcp(socket.TCP_USER_TIMEOUT) <= 30_000


async def test_draining_pods_503_is_not_shown_while_another_pod_can_answer(front: Any, serve: Any) -> None:
    draining, other = await serve("llama", "a", "b")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": "draining"}, status=503, headers={"Retry-After": "1"})

    draining.answer = refuse
    for _ in range(4):
        async with front.client.post(CHAT, json={"model": "llama"}) as response:
            assert response.status == 200
    assert len(other.requests) == 4
    assert draining.requests


@pytest.mark.parametrize(
    ("status", "given", "expected"),
    [(503, {}, "2"), (503, {"Retry-After": "7"}, "7"), (429, {"Retry-After": "1"}, "1")],
    ids=["draining without a hint", "draining", "queue full"],
)
async def test_last_pods_response_is_returned_when_every_pod_refuses(
    front: Any, serve: Any, status: int, given: dict[str, str], expected: str
) -> None:
    pods = await serve("llama", "a", "b")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "not now"}}, status=status, headers=given)

    for pod in pods:
        pod.answer = refuse
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.status == status
        assert response.headers["Retry-After"] == expected
        assert await response.json() == {"error": {"message": "not now"}}
    assert [len(pod.requests) for pod in pods] == [1, 1]


async def test_only_the_first_full_pod_counts_the_arrival_of_a_request(front: Any, serve: Any) -> None:
    pods = await serve("llama", "a", "b")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "full"}}, status=429)

    for pod in pods:
        pod.answer = refuse
    async with front.client.post(CHAT, json={"model": "llama"}, headers={"x-llmservice-counted": "1"}) as response:
        assert response.status == 429
    sent = [request.headers.get("x-llmservice-counted") for pod in pods for request, _ in pod.requests]
    assert sorted(sent, key=str) == ["1", None]


async def test_request_that_kills_pods_is_not_given_to_all_of_them(front: Any, serve: Any) -> None:
    pods = await serve("llama", "a", "b", "c", "d")

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    for pod in pods:
        pod.answer = die
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "replicas_unavailable"
    assert sum(len(pod.requests) for pod in pods) == 2


async def test_request_that_only_waited_on_lost_pods_is_tried_on_further_ones(front: Any, serve: Any) -> None:
    pods = await serve("llama", "a", "b", "c", "d", slots=1)
    losing = {pod.name: asyncio.Event() for pod in pods}

    def make_answer(pod: Any, *, begins: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            if begins:
                await response.prepare(request)
                await response.write(b"1")
            await losing[pod.name].wait()
            assert request.transport is not None
            request.transport.abort()
            return response

        return answer

    for pod in pods:
        pod.answer = make_answer(pod, begins=True)
    running = [await front.client.post(CHAT, json={"model": "llama"}) for _ in pods]
    for pod in pods:
        assert len(pod.requests) == 1
        pod.answer = make_answer(pod, begins=False)
    waiting = asyncio.create_task(front.client.post(CHAT, json={"model": "llama"}))
    left = list(pods)
    while len(left) > 1:
        async with asyncio.timeout(5):
            while not (its := [pod for pod in left if len(pod.requests) == 2]):
                await asyncio.sleep(0)
        left = [pod for pod in left if pod is not its[0]]
        if len(left) == 1:
            left[0].answer = None
        losing[its[0].name].set()
    async with asyncio.timeout(5), await waiting as response:
        assert (response.status, await response.json()) == (200, {"pod": left[0].name})
    reason = {"model": "llama", "reason": "lost_waiting"}
    assert front.gateway.metrics.registry.get_sample_value("llmservice_gateway_retries_total", reason) == 3
    for response in running:
        response.close()


async def test_pods_own_errors_are_passed_on_as_they_are(front: Any, serve: Any) -> None:
    (pod,) = await serve("llama", "a")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "temperature"}}, status=400)

    pod.answer = refuse
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert (response.status, await response.json()) == (400, {"error": {"message": "temperature"}})
    assert len(pod.requests) == 1


async def test_answer_that_breaks_off_is_cut_and_not_ended_as_if_whole(front: Any, serve: Any) -> None:
    (pod,) = await serve("llama", "a")

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    pod.answer = break_off
    with pytest.raises(aiohttp.ClientError):
        async with front.client.post(CHAT, json={"model": "llama"}) as response:
            await response.read()
    assert front.gateway.metrics.registry.get_sample_value(
        "llmservice_gateway_requests_total", {"model": "llama", "code": "502"}
    )


async def test_requests_in_flight_spread_over_the_pods(front: Any, serve: Any) -> None:
    pods = await serve("llama", "a", "b")
    release = asyncio.Event()

    async def hold(_request: web.Request) -> web.Response:
        await release.wait()
        return web.json_response({})

    for pod in pods:
        pod.answer = hold
    asking = [asyncio.create_task(front.client.post(CHAT, json={"model": "llama"})) for _ in range(6)]
    async with asyncio.timeout(5):
        while sum(len(pod.requests) for pod in pods) < 6:
            await asyncio.sleep(0)
    assert [len(pod.requests) for pod in pods] == [3, 3]
    release.set()
    for response in await asyncio.gather(*asking):
        response.release()


@pytest.mark.parametrize(("slots", "reported"), [(1, None), (8, "1")], ids=["by its service", "as it reports"])
async def test_new_pod_gets_waiting_requests_of_a_full_one(
    front: Any, serve: Any, cluster: Any, start_pod: StartPod, slots: int, reported: str | None
) -> None:
    (full,) = await serve("llama", "a", slots=slots)
    left: list[str] = []

    async def report(_request: web.Request) -> web.Response:
        return web.json_response({}, headers={"x-admissible-sequences": reported} if reported else {})

    full.answer = report
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.status == 200
    full.requests.clear()

    async def never(request: web.Request) -> web.Response:
        try:
            return await asyncio.Event().wait() and web.json_response({})
        except asyncio.CancelledError:
            left.append(request.headers["X-Request-Id"])
            raise

    full.answer = never
    asking = []
    for number in range(3):
        headers = {"X-Request-Id": str(number)}
        asking.append(
            asyncio.create_task(front.client.post(CHAT, json={"model": "llama", "n": number}, headers=headers))
        )
        async with asyncio.timeout(5):
            while len(full.requests) <= number:
                await asyncio.sleep(0)
    new = await start_pod("b")
    cluster.emit("pods", "ADDED", new.manifest("llama"))
    for number in (1, 2):
        async with asyncio.timeout(5), await asking[number] as response:
            assert (response.status, await response.json()) == (200, {"pod": "b"})
    assert left == ["1", "2"]
    assert [json.loads(body)["n"] for _, body in new.requests] == [1, 2]
    assert not asking[0].done()
    moved = {"model": "llama", "reason": "moved"}
    assert front.gateway.metrics.registry.get_sample_value("llmservice_gateway_retries_total", moved) == 2
    asking[0].cancel()


async def test_request_that_has_its_first_token_is_never_moved(
    front: Any, serve: Any, cluster: Any, start_pod: StartPod
) -> None:
    (full,) = await serve("llama", "a", slots=1)
    finish = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"1")
        await finish.wait()
        await response.write(b"2")
        return response

    full.answer = stream
    answers = [await front.client.post(CHAT, json={"model": "llama"}) for _ in range(3)]
    new = await start_pod("b")
    cluster.emit("pods", "ADDED", new.manifest("llama"))
    await front.until("llama", 2)
    finish.set()
    assert [await answer.read() for answer in answers] == [b"12"] * 3
    assert not new.requests


async def test_client_that_leaves_while_it_waits_ends_its_request_and_asks_no_other_pod(front: Any, serve: Any) -> None:
    full, other = await serve("llama", "a", "b", slots=1)
    never = asyncio.Event()

    async def wait(_request: web.Request) -> web.Response:
        await never.wait()
        return web.json_response({})

    full.answer = other.answer = wait
    asking = [asyncio.create_task(front.client.post(CHAT, json={"model": "llama"})) for _ in range(4)]
    async with asyncio.timeout(5):
        while len(full.requests) + len(other.requests) < 4:
            await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    async with asyncio.timeout(5):
        await full.disconnected.wait()
        await other.disconnected.wait()
        while any(front.routing.balancer.in_flight(each) for each in front.routing.table.find("llama").backends):
            await asyncio.sleep(0)
    assert len(full.requests) + len(other.requests) == 4


async def test_pod_leaves_the_routes_on_its_deletion_timestamp(front: Any, serve: Any, cluster: Any) -> None:
    leaving, staying = await serve("llama", "a", "b")
    manifest = leaving.manifest("llama")
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.emit("pods", "MODIFIED", manifest)
    await front.until("llama", 1)
    for _ in range(3):
        async with front.client.post(CHAT, json={"model": "llama"}) as response:
            assert await response.json() == {"pod": "b"}
    assert (len(leaving.requests), len(staying.requests)) == (0, 3)


async def test_model_without_a_ready_pod_is_answered_with_503_and_a_hint(front: Any, serve: Any) -> None:
    await serve("llama")
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "no_ready_replica"


async def test_unknown_model_gets_openais_error(front: Any) -> None:
    async with front.client.post(CHAT, json={"model": "gpt-5"}) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert "gpt-5" in error["message"]
    assert front.gateway.metrics.registry.get_sample_value(
        "llmservice_gateway_requests_total", {"model": "", "code": "404"}
    ), "a name that a client made up becomes no label"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"[" * 3000, 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"{}", 400, "missing_model"),
        (b'{"model": 7}', 400, "missing_model"),
        (b'{"model": "' + b"x" * 5000 + b'"}', 413, "request_too_large"),
    ],
    ids=["cut off", "not UTF-8", "not UTF-8 inside", "deeply nested", "a list", "no model", "model no string", "large"],
)
async def test_bad_body_is_refused_in_openais_shape(front: Any, body: bytes, status: int, code: str) -> None:
    async with front.client.post(CHAT, data=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_body_of_more_values_than_can_be_read_without_delaying_others_is_refused(gateway_front: Any) -> None:
    body = b'{"model": "", "prompt": [' + b"1," * (2**20 - 1) + b"1]}"
    async with gateway_front(GatewayConfig()) as front:
        for number, expected in ((0, (400, "missing_model")), (1, (413, "request_too_large"))):
            async with front.client.post(CHAT, data=io.BytesIO(b"," * number + body)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == expected


async def test_unknown_path_and_wrong_method_get_openais_errors(front: Any) -> None:
    async with front.client.get("/v1/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with front.client.get(CHAT) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "POST"


async def test_models_are_listed_with_their_readiness(front: Any, serve: Any) -> None:
    await serve("llama", "a", "b")
    await serve("qwen")
    async with front.client.get("/v1/models") as response:
        models = (await response.json())["data"]
    assert [(model["id"], model["ready"], model["ready_replicas"]) for model in models] == [
        ("llama", True, 2),
        ("qwen", False, 0),
    ]
    async with front.client.get("/v1/models/llama") as response:
        assert (await response.json())["id"] == "llama"
    async with front.client.get("/v1/models/gpt-5") as response:
        assert response.status == 404


async def test_namespace_before_the_name_is_not_for_the_pod(front: Any, cluster: Any, start_pod: StartPod) -> None:
    for namespace in ("a", "b"):
        cluster.emit("llmservices", "ADDED", llmservice("llama", namespace))
        pod = await start_pod(f"pod-{namespace}")
        cluster.emit("pods", "ADDED", pod.manifest("llama", namespace))
    await front.until("llama", 2)
    async with front.client.post(CHAT, json={"model": "b/llama", "max_tokens": 1}) as response:
        assert await response.json() == {"pod": "pod-b"}
    assert json.loads(pod.requests[0][1]) == {"model": "llama", "max_tokens": 1}
    async with front.client.post(CHAT, json={"model": "c/llama"}) as response:
        assert response.status == 404


async def test_gateway_is_ready_once_the_cluster_was_read_and_not_while_draining(front: Any) -> None:
    async def status(path: str) -> int:
        async with front.client.get(path) as response:
            await response.read()
            return int(response.status)

    async with asyncio.timeout(5):
        while await status("/ready") != 200:
            await asyncio.sleep(0)
    front.gateway.draining = True
    assert (await status("/ready"), await status("/health")) == (503, 200)


async def test_metrics_are_served_in_prometheus_format(front: Any, serve: Any) -> None:
    await serve("llama", "a")
    async with front.client.post(CHAT, json={"model": "llama"}) as response:
        await response.read()
    async with front.metrics.get("/metrics") as response:
        text = await response.text()
    assert 'llmservice_gateway_requests_total{code="200",model="llama"} 1.0' in text
    assert 'llmservice_gateway_in_flight{model="llama"} 0.0' in text
    assert 'llmservice_gateway_upstream_latency_seconds_count{model="llama"} 1.0' in text
    assert 'llmservice_gateway_added_latency_seconds_count{model="llama"} 1.0' in text


async def test_clients_cannot_read_metrics_and_prometheus_reaches_nothing_else(front: Any) -> None:
    for client, path in ((front.client, "/metrics"), (front.metrics, "/health"), (front.metrics, "/v1/models")):
        async with client.get(path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_credentials_never_reach_the_log(front: Any, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    (pod,) = await serve("llama", "a")

    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=503)

    pod.answer = refuse
    headers = {"Authorization": "Bearer sk-secret"}
    async with front.client.post(CHAT, json={"model": "llama", "prompt": "a private matter"}, headers=headers):
        pass
    assert "pod a" in caplog.text
    assert "sk-secret" not in caplog.text
    assert "private" not in caplog.text


@pytest.mark.parametrize("path", INFERENCE_PATHS)
async def test_every_endpoint_of_a_model_is_routed_by_its_name(front: Any, serve: Any, path: str) -> None:
    (pod,) = await serve("bge", "a")
    async with front.client.post(path, json={"model": "bge", "query": "a", "documents": ["b"]}) as response:
        assert response.status == 200
    assert [request.path for request, _ in pod.requests] == [path]


@pytest.mark.parametrize("how", ["closed", "reset", "reset within a chunk"])
async def test_event_stream_that_breaks_off_ends_with_an_error_event(front: Any, serve: Any, how: str) -> None:
    (pod,) = await serve("llama", "a")
    begun_streaming = asyncio.Event()

    async def breaks_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\ndata: 2 and no mo")
        assert request.transport is not None
        await begun_streaming.wait()
        if how == "closed":
            request.transport.close()
        else:
            if how == "reset within a chunk":
                request.transport.write(b"100\r\nda")
                await asyncio.sleep(0.01)
            linger = struct.pack("ii", 1, 0)
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.transport.abort()
        return response

    pod.answer = breaks_off
    async with front.client.post(CHAT, json={"model": "llama", "stream": True}) as response:
        text = await response.content.readuntil(b"\n\n")
        begun_streaming.set()
        text += await response.read()
    begun, error, done = text.split(b"\n\n", 2)
    assert (begun, done) == (b"data: 1", b"data: [DONE]\n\n")
    event, _, data = error.partition(b"\n")
    assert event == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "upstream_broke_off"
    assert len(pod.requests) == 1
    assert front.gateway.metrics.registry.get_sample_value(
        "llmservice_gateway_requests_total", {"model": "llama", "code": "502"}
    )


class Access:
    """Two keys, one of which has used up its requests."""

    def __init__(self) -> None:
        self.settled: list[Any] = []
        self.demands: list[Any] = []
        self.codes: list[Any] = []

    def identify(self, headers: Any) -> str:
        key = headers.get("Authorization")
        if key not in ("Bearer good", "Bearer spent"):
            raise GatewayError(401, "no such key", "invalid_api_key")
        return str(key)

    def may_use(self, _key: str, route: Any) -> bool:
        return bool(route.served_name != "secret")

    async def admit(self, key: str, _model: str, _route: Any, demand: Any) -> Any:
        if key == "Bearer spent":
            raise GatewayError(429, "too many", "rate_limit_exceeded", headers={"Retry-After": "9"})
        self.demands.append((demand.prompt_tokens, demand.max_output_tokens))
        return self

    headers: Mapping[str, str] = {"x-ratelimit-remaining-requests": "4"}

    def pod_headers(self, backend: Any) -> dict[str, str]:
        return {"x-llmservice-token": f"for {backend.name}"}

    async def settle(self, usage: Any) -> None:
        self.settled.append(usage)

    def answered(self, key: str, model: str, code: str) -> None:
        self.codes.append((key, model, code))

    unready = None


@pytest.fixture
async def keyed(gateway_front: Any) -> AsyncIterator[Any]:
    access = Access()
    async with gateway_front(GatewayConfig(hold=HoldLimits(timeout_s=0)), access=access) as front:
        front.access = access
        yield front


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_access_admits_counts_and_signs_each_request(keyed: Any, cluster: Any, start_pod: StartPod) -> None:
    cluster.emit("llmservices", "ADDED", llmservice("llama"))
    pod = await start_pod("a")
    cluster.emit("pods", "ADDED", pod.manifest("llama"))
    await keyed.until("llama", 1)
    body = {"model": "llama", "prompt": "x" * 40, "max_tokens": 9}

    async def whole(_request: web.Request) -> web.Response:
        return web.json_response({}, headers={"x-llmservice-usage": "7 3 2"})

    async def stream(_request: web.Request) -> web.Response:
        text = b"data: 1\n\n: llmservice-usage 8 0 1\n\ndata: [DONE]\n\n"
        return web.Response(body=text, headers={"Content-Type": "text/event-stream"})

    forged = authorized("good") | {
        "x-llmservice-token": "forged",
        "x-llmservice-usage": "0",
        "x-llmservice-lane": "batch",
    }
    for pod.answer, received in ((whole, b"{}"), (stream, b"data: 1\n\ndata: [DONE]\n\n")):
        async with keyed.client.post("/v1/completions", json=body, headers=forged) as response:
            assert (response.status, await response.read()) == (200, received)
            assert response.headers["x-ratelimit-remaining-requests"] == "4"
            assert not [name for name in response.headers if name.lower().startswith("x-llmservice")]
    assert keyed.access.settled == [Usage(7, 3, 2), Usage(8, 0, 1)]
    assert keyed.access.demands[0] == (10, 9)
    assert keyed.access.codes == [("Bearer good", "llama", "200")] * 2
    request, _ = pod.requests[0]
    assert request.headers.getall("x-llmservice-token") == ["for a"]
    assert request.headers.getall("x-llmservice-usage") == ["1"]
    assert request.headers["x-llmservice-lane"] == "batch"
    assert "Authorization" not in request.headers  # the key is the gateway's business


async def test_access_refuses_before_a_pod_is_asked(keyed: Any, cluster: Any, start_pod: StartPod) -> None:
    for name in ("llama", "secret"):
        cluster.emit("llmservices", "ADDED", llmservice(name))
    pod = await start_pod("a")
    cluster.emit("pods", "ADDED", pod.manifest("llama"))
    await keyed.until("llama", 1)
    for key, status, code in (("wrong", 401, "invalid_api_key"), ("spent", 429, "rate_limit_exceeded")):
        async with keyed.client.post(CHAT, json={"model": "llama"}, headers=authorized(key)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)
    assert response.headers["Retry-After"] == "9"
    assert not pod.requests
    async with keyed.client.get("/v1/models") as response:
        assert response.status == 401
    async with keyed.client.get("/v1/models", headers=authorized("good")) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["llama"]
    async with keyed.client.get("/v1/models/secret", headers=authorized("good")) as response:
        assert response.status == 404
    async with keyed.client.get("/health") as response:
        assert response.status == 200


async def test_requests_without_an_answer_are_settled_too(keyed: Any, cluster: Any) -> None:
    cluster.emit("llmservices", "ADDED", llmservice("llama"))
    await keyed.until("llama", 0)
    async with keyed.client.post(CHAT, json={"model": "llama"}, headers=authorized("good")) as response:
        assert response.status == 503
    assert keyed.access.settled == [Usage(0, 0, 0)]


async def test_a_body_that_does_not_arrive_in_time_is_refused(gateway_front: Any) -> None:
    async with gateway_front(GatewayConfig(client_timeout_s=0.1)) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


@pytest.mark.parametrize(("allowed", "shown"), [((), None), (("https://app.example",), "https://app.example")])
async def test_pages_of_other_origins_may_call_only_where_they_are_named(
    front: Any, serve: Any, serving: Any, allowed: tuple[str, ...], shown: str | None
) -> None:
    await serve("llama", "a")
    app = front.gateway.app(cors_allow_origins=allowed)
    origin = {"Origin": "https://app.example"}
    async with serving(app) as url, aiohttp.ClientSession(url) as client:
        async with client.post(CHAT, json={"model": "llama"}, headers=origin) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == shown
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with client.options(CHAT, headers=origin | preflight) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == shown


async def test_the_api_documents_itself(front: Any) -> None:
    async with front.client.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert {"/v1/models", "/v1/models/{model}", "/health", "/ready"} <= set(paths)


@pytest.mark.parametrize("strategy", ["prefixAffinity", "leastLoad"])
async def test_turns_of_a_conversation_reach_one_pod_where_the_service_asks_for_it(
    front: Any, cluster: Any, start_pod: StartPod, strategy: str
) -> None:
    service = llmservice("llama")
    service["spec"]["routing"] = {"strategy": strategy}
    cluster.emit("llmservices", "ADDED", service)
    for name in "abcd":
        cluster.emit("pods", "ADDED", (await start_pod(name)).manifest("llama"))
    await front.until("llama", 4)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    pods = []
    for turn in range(4):
        async with front.client.post(CHAT, json={"model": "llama", "messages": messages}) as response:
            pods.append((await response.json())["pod"])
        messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": str(turn)}]
    assert len(set(pods)) == (1 if strategy == "prefixAffinity" else 4)
    hits = {"model": "llama", "result": "hit"}
    value = front.gateway.metrics.registry.get_sample_value("llmservice_gateway_affinity_total", hits)
    assert value == (3 if strategy == "prefixAffinity" else None)


@pytest.mark.parametrize("field", ["messages", "cache_salt", "user"])
async def test_nesting_of_any_depth_is_forwarded_or_refused(front: Any, serve: Any, field: str) -> None:
    (pod,) = await serve("llama", "a")
    for depth in range(700, 1050, 7):
        nested = f'{{"role": "user", "content": {"[" * depth}{"]" * depth}}}'
        value = f"[{nested}]" if field == "messages" else nested
        body = f'{{"model": "default/llama", "{field}": {value}}}'
        async with front.client.post(CHAT, data=body) as response:
            assert response.status in (200, 400), await response.text()
    assert pod.requests


async def test_random_bytes_get_an_error_of_the_client_or_a_closed_connection(front: Any, serve: Any) -> None:
    """Each connection sends a valid request with some bytes replaced."""
    await serve("llama", "a")
    host, port = front.url.removeprefix("http://").split(":")
    dice = random.Random(7)  # noqa: S311 - faults, not secrets
    body = b'{"model": "llama", "messages": [{"role": "user", "content": "hello"}], "n": 1, "max_tokens": 5}'
    head = b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: x\r\nX-Request-Id: 7\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    statuses = set()

    async def attempt() -> None:
        raw = bytearray(head + body)
        for _ in range(dice.randint(1, 4)):
            raw[dice.randrange(len(raw))] = dice.choice(b'\x00\x01\r\n :/?#%[{"\\\x7f\x80\xff0A')
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(raw))
        with suppress(TimeoutError):  # where the gateway waits for more
            async with asyncio.timeout(0.3):
                if answer := await reader.readline():
                    statuses.add(int(answer.split(b" ", 2)[1]))
        writer.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(attempt() for _ in range(100)))
    assert {200, 400, 404} <= statuses
    assert not [status for status in statuses if status >= 500], statuses
    async with front.client.get("/health") as response:
        assert response.status == 200
