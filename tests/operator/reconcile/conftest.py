"""One operator without a process: whole passes over a service, with pods that answer on real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from harness.world.one_service import World
from harness.world.talking_pods import TalkingPods
from llmservice_operator.cluster.applier import Applier
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.grants import Grants
from llmservice_operator.model_reader import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.signals.held import HeldRequests
from llmservice_operator.signals.sources import PodSignals, PrometheusSignals, Signals

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


@pytest.fixture
async def pods() -> AsyncIterator[TalkingPods]:
    app = web.Application()
    state = TalkingPods(0)
    app.router.add_get("/metrics", state.metrics)
    app.router.add_get("/{path:sizing|progress}", state.report)
    app.router.add_get("/internal/held", state.held)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    state.port = runner.addresses[0][1]
    yield state
    await runner.cleanup()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "models"


@pytest.fixture
async def world(kube: KubeClient, pods: TalkingPods, models: Path) -> AsyncIterator[World]:
    async with aiohttp.ClientSession() as session:
        reader = ModelReader(session, models, "http://127.0.0.1:9", None)
        unreachable = PrometheusSignals(session, "http://127.0.0.1:9")
        signals = partial(_signals, session, unreachable)
        cache, pod_models = ObjectCache(), PodModels(session, pods.port)
        applier = Applier(kube, cache)
        metrics, grants = OperatorMetrics(), Grants(kube)
        held = HeldRequests(session, pods.gateways)
        reconciler = Reconciler(
            kube, cache, applier, reader.read, signals(), pod_models, metrics, "img:1", grants, held
        )
        world = World(kube, reconciler, pods, signals)
        kube.answered = world.answered
        held.clock = world.monotonic
        reconciler.clock, reconciler.monotonic = world.clock, world.monotonic
        yield world


def _signals(session: aiohttp.ClientSession, prometheus: PrometheusSignals) -> Signals:
    return Signals(PodSignals(session), prometheus)
