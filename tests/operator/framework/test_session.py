"""kopf's session, against a server with given answers: credentials, reports, pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from llmservice_local.client import Endpoint
from llmservice_operator.cluster.kube_client import KubeClient, load_configuration
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.resync import Resync
from llmservice_operator.framework.session import Login, Watches
from llmservice_operator.monitoring.metrics import OperatorMetrics

PODS = "/api/v1/pods"
MONITORS = "/apis/monitoring.coreos.com/v1/podmonitors"


@dataclass
class Api:
    """Answers one status after the other, the last one for ever."""

    url: str = ""
    statuses: list[int] = field(default_factory=lambda: [200])
    tokens: list[str | None] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.json_response({}, status=status)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api()
    app = web.Application()
    app.router.add_get("/{path:.*}", api.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


@dataclass
class Client:
    """A session as kopf has it."""

    session: aiohttp.ClientSession
    watches: Watches
    resync: Resync
    metrics: OperatorMetrics
    configuration: object

    async def get(self, path: str) -> int:
        async with self.session.get(path) as response:
            return response.status


@pytest.fixture
async def client(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    Endpoint(api.url, "first").write_kubeconfig(tmp_path / "kubeconfig")
    configuration = await load_configuration()
    kube, metrics = KubeClient.of(configuration), OperatorMetrics()
    watches = Watches(metrics.process)
    resync = Resync(kube, ObjectCache(), lambda *_, **__: None, metrics.process, interval_s=300)
    session = Login(configuration, resync, watches, metrics.process).session()
    session._base_url = aiohttp.client.URL(api.url)  # kopf sends whole URLs
    yield Client(session, watches, resync, metrics, configuration)
    await session.close()
    await kube.close()


async def test_each_request_has_the_current_token(api: Api, client: Client) -> None:
    await client.get(PODS)

    async def renew(configuration: object) -> None:
        configuration.api_key["BearerToken"] = "Bearer second"  # type: ignore[attr-defined]

    client.configuration.refresh_api_key_hook = renew  # type: ignore[attr-defined]
    await client.get(PODS)

    assert api.tokens == ["Bearer first", "Bearer second"]


async def test_a_refusal_is_reported_until_a_success(api: Api, client: Client) -> None:
    api.statuses = [403, 200]

    assert await client.get(PODS) == 403
    assert "403" in client.watches.failing["pods"]
    assert b'watch_failing{resource="pods"} 1.0' in client.metrics.exposition()
    assert await client.get(f"{PODS}?watch=true") == 200

    assert client.watches.failing == {}
    assert b'watch_failing{resource="pods"} 0.0' in client.metrics.exposition()
    assert b'api_requests_total{code="403",resource="pods",verb="list"} 1.0' in client.metrics.exposition()
    assert b'api_requests_total{code="200",resource="pods",verb="watch"} 1.0' in client.metrics.exposition()


def test_a_namespace_that_is_refused_is_reported_while_others_are_followed() -> None:
    metrics = OperatorMetrics()
    watches = Watches(metrics.process)
    for namespace in ("team-a", "team-b"):
        watches.failed("pods", f"/api/v1/namespaces/{namespace}/pods", f"{namespace}: 403")

    watches.answered("pods", "/api/v1/namespaces/team-b/pods")
    assert watches.failing == {"pods": "team-a: 403"}
    assert b'watch_failing{resource="pods"} 1.0' in metrics.exposition()

    watches.answered("pods", "/api/v1/namespaces/team-a/pods")
    assert watches.failing == {}
    assert b'watch_failing{resource="pods"} 0.0' in metrics.exposition()


async def test_an_unreachable_server_is_reported(api: Api, client: Client) -> None:
    with pytest.raises(aiohttp.ClientError):
        await client.session.get(f"http://127.0.0.1:9{PODS}")

    assert "can't be reached" in client.watches.failing["pods"]


async def test_a_second_list_makes_the_kind_due_and_a_further_page_does_not(api: Api, client: Client) -> None:
    client.resync._due.clear()
    await client.get(f"{PODS}?limit=100")
    await client.get(f"{PODS}?limit=100&continue=token")
    assert client.resync._due == set()

    await client.get(f"{PODS}?limit=100")

    assert client.resync._due == {"Pod"}


@pytest.mark.slow
async def test_watches_that_end_at_once_are_opened_once_a_second(api: Api, client: Client) -> None:
    started_s = time.monotonic()
    for _ in range(3):
        await client.get(f"{PODS}?watch=true")

    assert time.monotonic() - started_s >= 2


async def test_a_missing_crd_does_not_end_kopf_and_is_searched_for(
    api: Api, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmservice_operator.framework.session._MISSING_PAUSE_S", 0.01)
    client.resync._due.clear()
    api.statuses = [404]
    asked = asyncio.create_task(client.get(f"{MONITORS}?watch=true"))
    while "PodMonitor" not in client.resync._due:
        await asyncio.sleep(0.01)
    assert not asked.done(), "kopf would end for it"

    api.statuses = [200]

    assert await asked == 200
