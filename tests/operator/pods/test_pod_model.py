"""What pods report about their model, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.pods.pod_model import Download, Fetching, PodAdapter, PodModels, together

GIB = 2**30
MODEL = "pvc://weights/tiny"
REPORT: dict[str, Any] = {
    "max_num_seqs": 7,
    "max_model_len": 256,
    "block_size": 16,
    "num_blocks": 99,
    "adapters": [{"name": "poet", "uri": "hf://o/p", "version": "abc", "state": "loaded", "error": None}],
    "steps": [
        {"kind": "decode", "sequences": 2, "steps": 10, "seconds": 1.0, "num_seqs": 20, "context_tokens": 90,
         "prompt_tokens": 0, "prompt_chunks": 0, "attention_pairs": 0},
    ],
    "memory_bytes": {"weights": 10, "kv_cache": 20, "activations": 5, "total": 100},
    "shape": {
        "layers": 2, "heads": 4, "kvHeads": 2, "headDim": 16, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 9,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("pods", "downloads", "expected"),
    [
        (0, [], None),
        (2, [], Fetching(2)),
        (1, [Download(0, 0)], Fetching(1)),
        (1, [Download(GIB, 4 * GIB)], Fetching(1, 25, 4 * GIB)),
        (1, [Download(GIB - 1, 4 * GIB)], Fetching(1, 20, 4 * GIB)),
        (3, [Download(4 * GIB, 4 * GIB), Download(0, 4 * GIB)], Fetching(3, 50, 4 * GIB)),
    ],
)
def test_downloads_are_summed_up_in_steps(pods: int, downloads: list[Download], expected: Fetching | None) -> None:
    assert together(pods, downloads) == expected


class Server:
    """One pod's port: a fetch at first, a server later."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []
        self.text: str | None = None
        """What it answers instead."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.text is not None:
            return web.Response(text=self.text)
        if request.path == "/progress":
            return web.json_response({"phase": "downloading", "done_bytes": 50, "total_bytes": 100})
        return web.json_response(REPORT)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    app = web.Application()
    app.router.add_get("/{path}", state.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.port = runner.addresses[0][1]
    yield state
    await runner.cleanup()


@pytest.fixture
async def pod_models(server: Server) -> AsyncIterator[PodModels]:
    async with aiohttp.ClientSession() as session:
        yield PodModels(session, server.port, timeout_s=1.0)


async def test_only_fetching_pods_are_queried_for_progress(
    pod_models: PodModels, server: Server, pod_named: Any
) -> None:
    busy = pod_named("a", ip="127.0.0.1", ready=False, fetching=True)
    assert await pod_models.fetching([busy, pod_named("b", ip="127.0.0.1")]) == Fetching(1, 50, 100)
    assert server.asked == ["/progress"]
    assert await pod_models.fetching([pod_named("b", ip="127.0.0.1")]) is None
    assert server.asked == ["/progress"]


async def test_a_pod_that_does_not_answer_fetches_all_the_same(pod_models: PodModels, pod_named: Any) -> None:
    silent = pod_named("a", ip="127.0.0.2", ready=False, fetching=True)
    assert await pod_models.fetching([silent, pod_named("b", ip=None, fetching=True)]) == Fetching(2)


async def test_a_servers_report_is_read_once_in_its_life(pod_models: PodModels, server: Server, pod_named: Any) -> None:
    pod = pod_named("a", ip="127.0.0.1", model=MODEL)
    report = await pod_models.report([pod], MODEL)
    assert report is not None
    assert (report.max_num_seqs, report.shape and report.shape.kv_heads) == (7, 2)
    assert await pod_models.report([pod], MODEL) is report
    assert server.asked == ["/sizing"]
    await pod_models.report([pod_named("a", ip="127.0.0.1", restarts=1, model=MODEL)], MODEL)
    assert server.asked == ["/sizing", "/sizing"]


async def test_only_pods_of_the_model_are_queried_for_a_report(
    pod_models: PodModels, server: Server, pod_named: Any
) -> None:
    starting = pod_named("a", ip="127.0.0.1", ready=False, model=MODEL)
    of_another_model = pod_named("b", ip="127.0.0.1", model="pvc://weights/earlier")
    assert await pod_models.report([starting, of_another_model], MODEL) is None
    assert server.asked == []


async def test_the_times_of_steps_are_read_once_a_minute_from_the_oldest_pod(
    pod_models: PodModels, server: Server, pod_named: Any
) -> None:
    old, new = (pod_named(name, ip="127.0.0.1", model=MODEL, created_s=at) for name, at in (("b", 1.0), ("a", 2.0)))
    first = await pod_models.steps([new, old], MODEL, 10.0)
    assert [(group.kind, group.steps, group.batch.num_seqs) for group in first] == [("decode", 10, 2)]
    assert await pod_models.steps([old], MODEL, 69.0) is first
    assert server.asked == ["/sizing"]
    await pod_models.steps([old], MODEL, 71.0)
    assert server.asked == ["/sizing", "/sizing"]
    assert await pod_models.steps([pod_named("c", ip="127.0.0.2", model=MODEL)], MODEL, 10.0) == ()
    assert await pod_models.steps([], MODEL, 10.0) == ()


async def test_each_serving_pod_reports_its_adapters(pod_models: PodModels, pod_named: Any) -> None:
    pods = [pod_named("a", ip="127.0.0.1"), pod_named("b", ip="127.0.0.2"), pod_named("c", ready=False)]
    assert await pod_models.adapters(pods) == {"a": [PodAdapter("poet", "hf://o/p", "abc")], "b": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 5000,
        '{"phase": "downloading"}',
        '{"phase": "downloading", "done_bytes": 9, "total_bytes": 1}',
        '{"phase": "downloading", "done_bytes": 0, "total_bytes": Infinity}',
        '{"max_num_seqs": Infinity, "memory_bytes": {}, "compile_s": 1' + "0" * 400 + "}",
        '{"steps": [{"steps": Infinity}], "adapters": [{"name": 1}]}',
    ],
)
async def test_an_answer_of_something_else_is_no_answer(
    pod_models: PodModels, server: Server, pod_named: Any, text: str
) -> None:
    server.text = text
    pod = pod_named("a", ip="127.0.0.1", model=MODEL)

    assert await pod_models.fetching([pod_named("b", ip="127.0.0.1", fetching=True)]) == Fetching(1)
    assert await pod_models.report([pod], MODEL) is None
    assert await pod_models.steps([pod], MODEL, 10.0) == ()
    assert await pod_models.adapters([pod]) == {"a": []}
    assert await pod_models.compile_s(pod) == 0.0
