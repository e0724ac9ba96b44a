"""The demo's steps against an API server and a gateway on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from llmservice_bench.drive import Progress
from llmservice_bench.record import RequestRecord
from llmservice_local.api.serve import serve_api
from llmservice_local.demo.observation import Observer
from llmservice_local.demo.service import apply, chat, read_manifest, wait_ready
from llmservice_operator.api.crd import crd
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_planner.command import CommandError

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama.yaml"


@pytest.fixture
async def kube() -> AsyncIterator[KubeClient]:
    """A client of an emulated API that knows LLMServices."""
    async with serve_api() as api:
        client = kubernetes_client.ApiClient(kubernetes_client.Configuration(host=api.url))
        kube = KubeClient(client)
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await kube.request("POST", path, body=crd(), content_type="application/json")
        yield kube
        await kube.close()


@pytest.fixture
def no_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


async def applied(kube: KubeClient, **status: Any) -> None:
    await apply(EXAMPLE, read_manifest(EXAMPLE), "unused", kube, lambda text: None)
    if status:
        await kube.patch_status("default", "tiny-llama", status)


def ready(status: str, reason: str, message: str) -> dict[str, Any]:
    transition = "2026-01-01T00:00:00Z"
    condition = {"type": "Ready", "status": status, "reason": reason, "message": message}
    return condition | {"lastTransitionTime": transition, "observedGeneration": 1}


@pytest.mark.usefixtures("no_kubectl")
async def test_manifest_is_applied_through_the_api_where_there_is_no_kubectl(kube: KubeClient) -> None:
    reported: list[str] = []
    for _ in range(2):
        await apply(EXAMPLE, read_manifest(EXAMPLE), "unused", kube, reported.append)
    service = await kube.get_service("default", "tiny-llama")
    assert service is not None
    assert service["spec"]["model"]["servedName"] == "tiny-llama"
    assert "no kubectl" in reported[0]


@pytest.mark.usefixtures("no_kubectl")
async def test_refused_manifest_is_reported_with_the_apis_reason(kube: KubeClient) -> None:
    manifest = read_manifest(EXAMPLE)
    manifest["spec"]["autoscaling"]["maxReplicas"] = 0
    with pytest.raises(CommandError, match="maxReplicas"):
        await apply(EXAMPLE, manifest, "unused", kube, lambda text: None)


@pytest.mark.parametrize(
    ("text", "complaint"), [(None, "cannot read"), ("kind: Pod", "no LLMService"), (":\n-", "cannot")]
)
def test_file_without_an_llmservice_is_refused(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "manifest.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CommandError, match=complaint):
        read_manifest(path)


@pytest.mark.usefixtures("no_kubectl")
async def test_waiting_reports_each_reason_once_and_ends_when_ready(kube: KubeClient) -> None:
    reported: list[str] = []
    await applied(kube, conditions=[ready("False", "Starting", "0 of 1 replicas are ready")])
    waiting = asyncio.create_task(wait_ready(kube, "default", "tiny-llama", 30, reported.append))
    while not reported:
        await asyncio.sleep(0.01)
    await kube.patch_status(
        "default", "tiny-llama", {"conditions": [ready("True", "Serving", "all replicas are ready")]}
    )
    service = await waiting
    assert service["status"]["conditions"][0]["reason"] == "Serving"
    assert reported == ["Starting: 0 of 1 replicas are ready"]


@pytest.mark.usefixtures("no_kubectl")
async def test_waiting_times_out_with_the_last_reason(kube: KubeClient) -> None:
    await applied(kube, conditions=[ready("False", "ModelDoesNotFit", "lower maxModelLen")])
    with pytest.raises(CommandError, match="ModelDoesNotFit: lower maxModelLen"):
        await wait_ready(kube, "default", "tiny-llama", 0.2, lambda text: None)


@pytest.mark.usefixtures("no_kubectl")
async def test_observer_reads_the_status_and_keeps_every_decision(kube: KubeClient) -> None:
    progress = Progress(pieces=7, completed=2)
    async with aiohttp.ClientSession() as session:
        observer = Observer(kube, session, "default", "tiny-llama", progress)
        observer.start_clock()
        progress.records.append(RequestRecord(started_s=0.0, prompt_tokens=1, ttft_s=0.25, e2e_s=0.0))
        for moment, replicas in (("2026-01-01T00:00:01Z", 1), ("2026-01-01T00:00:02Z", 3)):
            decision = {"time": moment, "wanted": replicas, "replicas": replicas, "reasons": ["queue"]}
            scaling = {"desiredReplicas": replicas, "decisions": [decision]}
            await applied(kube, replicas=replicas, readyReplicas=1, autoscaling=scaling)
            seen = await observer.observe()
    assert (seen.replicas, seen.ready, seen.desired, seen.pieces) == (3, 1, 3, 7)
    assert seen.ttft_p99_s == 0.25
    assert [decision["replicas"] for decision in observer.decisions.values()] == [1, 3]
    assert len(observer.observations) == 2


async def _gateway(
    answer: web.StreamResponse | web.Response, pieces: tuple[bytes, ...] = ()
) -> tuple[web.AppRunner, str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        return answer

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_chat_is_written_piece_by_piece() -> None:
    pieces = tuple(b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text for text in (b"", b"to", b"ken"))
    runner, url = await _gateway(web.StreamResponse(), (*pieces, b"data: [DONE]\n\n"))
    written: list[str] = []
    async with aiohttp.ClientSession() as session:
        await chat(session, url, "m", "?", written.append)
    await runner.cleanup()
    assert written == ["to", "ken"]


@pytest.mark.parametrize(
    ("answer", "pieces", "complaint"),
    [
        (web.Response(status=503, text="no replica"), (), "answered 503: no replica"),
        (web.StreamResponse(), (b"data: [DONE]\n\n",), "empty"),
    ],
    ids=["refused", "empty"],
)
async def test_chat_without_an_answer_is_an_error(
    answer: web.StreamResponse, pieces: tuple[bytes, ...], complaint: str
) -> None:
    runner, url = await _gateway(answer, pieces)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(CommandError, match=complaint):
            await chat(session, url, "m", "?", lambda text: None)
    await runner.cleanup()
