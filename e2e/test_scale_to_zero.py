"""A service at zero: requests wait in the gateway and start it, it goes back, and no wait is in vain."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from harness.cluster import Cluster, processes, running_cluster
from harness.kube import Kube, tiny_service
from harness.wait import wait_for

NAME = "sleepy"
CLIENTS = 50
DEADLINE_S = 90
AUTOSCALING = {"minReplicas": 0, "maxReplicas": 2, "idleTimeout": "3s", "metrics": {"source": "pods", "window": "20s"}}
VALUES: dict[str, Any] = {"operator": {"replicas": 1, "tickSeconds": 1}}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("zero"), values=VALUES) as running:
        yield running


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    took_s: float


async def ask(session: aiohttp.ClientSession, url: str, model: str, *, stream: bool = False) -> Answer:
    body = {"model": model, "prompt": "once upon a time", "max_tokens": 4, "stream": stream}
    began = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return Answer(response.status, await response.text(), time.monotonic() - began)


async def ask_at_once(url: str, model: str, clients: int) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session, url, model, stream=bool(n % 2)) for n in range(clients)))


def wait_for_zero(kube: Kube, name: str) -> None:
    def is_at_zero() -> bool:
        ready = kube.condition(name, "Ready")
        return (ready.get("status"), ready.get("reason")) == ("False", "ScaledToZero")

    wait_for(is_at_zero, 60, lambda: kube.get(name).get("status"))


def test_fifty_clients_at_once_wake_a_service_once_and_are_all_answered(cluster: Cluster, kube: Kube) -> None:
    kube.create(tiny_service(NAME, cluster.model_uri, autoscaling=AUTOSCALING))
    wait_for_zero(kube, NAME)

    answers = asyncio.run(ask_at_once(cluster.gateway_url, NAME, CLIENTS))

    assert {answer.status for answer in answers} == {200}, [one for one in answers if one.status != 200][:3]
    assert max(answer.took_s for answer in answers) < DEADLINE_S
    for number, answer in enumerate(answers):
        assert ("data: [DONE]" in answer.text) == bool(number % 2)
        assert "error" not in answer.text
    scaling = kube.get(NAME)["status"]["autoscaling"]
    replicas = [one["replicas"] for one in reversed(scaling["decisions"])]
    assert sum(after > before for before, after in pairwise(replicas)) == 1, scaling["decisions"]
    start = scaling["lastColdStart"]
    parts = sum(start[part] for part in ("scheduling", "fetching", "loading", "compiling"))
    assert start["seconds"] == pytest.approx(parts, abs=0.2)
    assert 0 < start["seconds"] <= max(answer.took_s for answer in answers) + 1  # of whole seconds


def test_without_requests_it_goes_back_to_zero(kube: Kube) -> None:
    wait_for_zero(kube, NAME)

    decision = kube.get(NAME)["status"]["autoscaling"]["decisions"][0]
    assert "idle: no request for 3s -> 0" in decision["reasons"]


def waits_for(cluster: Cluster, model: str, pool: ThreadPoolExecutor) -> Future[list[Answer]]:
    return pool.submit(lambda: asyncio.run(ask_at_once(cluster.gateway_url, model, 2)))


def ended(answer: Answer, reason: str, status: int = 503) -> bool:
    """With `status`, or, of a stream that has waited for ten seconds, with an error event."""
    is_event = answer.status == 200 and answer.text.rstrip().endswith("data: [DONE]") and '"error"' in answer.text
    return reason in answer.text and (answer.status == status or is_event)


def create_without_room(cluster: Cluster, kube: Kube, name: str) -> None:
    """A service whose pod no node has room for: requests wait for it for as long as a test needs."""
    resources = {"gpu": {"count": 0}, "requests": {"cpu": "1000", "memory": "1Gi"}}
    kube.create(tiny_service(name, cluster.model_uri, resources=resources))
    wait_for(lambda: kube.condition(name, "Ready").get("reason") == "Unschedulable", 30, lambda: kube.get(name))


def held_requests(cluster: Cluster) -> float:
    """What the gateway reports, on the port that its command names; 0 where that is not known."""
    port = cluster.gateway_url.rpartition(":")[2]
    ports = (re.search(rf"--port {port} --metrics-port (\d+)", command) for _, command in processes())
    found = next((match[1] for match in ports if match), None)
    if found is None:
        return 0
    with urllib.request.urlopen(f"http://127.0.0.1:{found}/internal/held", timeout=5) as response:
        return sum(one["requests"] for one in json.load(response)["held"].values())


def test_a_deleted_service_ends_the_wait(cluster: Cluster, kube: Kube) -> None:
    create_without_room(cluster, kube, "deleted")
    with ThreadPoolExecutor() as pool:
        waiting = waits_for(cluster, "deleted", pool)
        wait_for(lambda: not cluster.is_local or held_requests(cluster) == 2, 30)
        kube.delete("deleted")
        answers = waiting.result(timeout=DEADLINE_S)

    assert all(ended(answer, "model_not_found", 404) for answer in answers), answers


def test_a_service_that_a_user_scales_to_zero_ends_the_wait_with_the_reason(cluster: Cluster, kube: Kube) -> None:
    create_without_room(cluster, kube, "fixed")
    with ThreadPoolExecutor() as pool:
        waiting = waits_for(cluster, "fixed", pool)
        wait_for(lambda: not cluster.is_local or held_requests(cluster) == 2, 30)
        cluster.kubectl("scale", "llm", "fixed", "--replicas=0")
        answers = waiting.result(timeout=DEADLINE_S)

    assert all(ended(answer, "NoReplicas") for answer in answers), answers
    kube.delete("fixed")


def test_a_model_that_fails_to_load_ends_the_wait_with_the_reason(cluster: Cluster, kube: Kube) -> None:
    if not cluster.is_local:
        pytest.skip("pods of this cluster do not see the checkpoints' folder")
    folder = cluster.state_dir / "models"
    shutil.copytree(folder / "tiny-llama", folder / "broken")
    weights = folder / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    kube.create(tiny_service("broken", "file:///broken", autoscaling=AUTOSCALING))
    wait_for_zero(kube, "broken")

    answers = asyncio.run(ask_at_once(cluster.gateway_url, "broken", 2))

    assert all(ended(answer, "ModelLoadFailed") for answer in answers), answers
    kube.delete("broken")
