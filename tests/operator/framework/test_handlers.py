"""Watch events wake the loop of their service, and end it where the service is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmservice_operator.api.resource import KIND
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.handlers import Handlers
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.monitoring.metrics import OperatorMetrics

KEY = ("team-a", "tiny")
LABELS = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}


def service(version: int, generation: int = 1) -> dict[str, Any]:
    metadata = {"namespace": KEY[0], "name": KEY[1], "uid": "u", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "generation": generation}}


def pod(version: int) -> dict[str, Any]:
    metadata = {"namespace": KEY[0], "name": "tiny-1", "uid": "p", "resourceVersion": str(version), "labels": LABELS}
    return {"metadata": metadata}


@dataclass
class Recorder:
    """Handlers and loops that count passes instead of reconciling."""

    handlers: Handlers = field(init=False)
    passes: int = 0
    gone: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = ObjectCache()
        metrics = OperatorMetrics()
        self.loops = ServiceLoops(self.run_pass, 1000.0, metrics)
        self.handlers = Handlers(self.cache, self.loops, lambda *key: self.gone.append(key), metrics.process)
        self.loops.open([])

    async def run_pass(self, namespace: str, name: str) -> bool:
        assert (namespace, name) == KEY
        self.passes += 1
        return True

    def put(self, kind: str, obj: dict[str, Any]) -> None:
        self.handlers.take(kind, "MODIFIED", obj)

    def drop(self, kind: str, obj: dict[str, Any]) -> None:
        self.handlers.take(kind, "DELETED", obj)

    async def settle(self) -> int:
        """Passes so far, once pending wakes are processed."""
        await asyncio.sleep(0.12)
        return self.passes


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    yield recorder
    await recorder.loops.stop_all()


async def test_a_new_service_and_a_changed_spec_start_a_pass_and_a_status_write_does_not(recorder: Recorder) -> None:
    recorder.put(KIND, service(1))
    assert await recorder.settle() == 1
    recorder.put(KIND, service(2))
    assert await recorder.settle() == 1
    recorder.put(KIND, service(3, generation=2))
    assert await recorder.settle() == 2


async def test_a_spec_that_changed_during_a_status_write_starts_a_pass(recorder: Recorder) -> None:
    recorder.put(KIND, service(1))
    await recorder.settle()
    recorder.cache.put(KIND, service(9, generation=2))  # the answer to our write of the status

    recorder.put(KIND, service(8, generation=2))

    assert await recorder.settle() == 2


async def test_a_child_wakes_its_service_once_for_each_change(recorder: Recorder) -> None:
    recorder.put(KIND, service(1))
    await recorder.settle()
    recorder.put("Pod", pod(2))
    assert await recorder.settle() == 2
    recorder.put("Pod", pod(2))  # our own write, whose answer is cached already
    assert await recorder.settle() == 2
    recorder.drop("Pod", pod(3))
    assert await recorder.settle() == 3


async def test_a_deleted_service_is_forgotten_and_its_loop_ends(recorder: Recorder) -> None:
    recorder.put(KIND, service(1))
    await recorder.settle()

    recorder.drop(KIND, service(2))

    assert len(recorder.loops) == 0
    assert recorder.gone == [KEY]
    assert recorder.handlers.seen == {}


async def test_a_late_deletion_event_does_not_end_a_new_service(recorder: Recorder) -> None:
    recorder.put(KIND, service(1))
    anew = service(5)
    anew["metadata"]["uid"] = "another"
    recorder.put(KIND, anew)

    recorder.drop(KIND, service(4))

    assert len(recorder.loops) == 1
    assert recorder.gone == []
