"""What an event means: a loop is woken where it brings something new, and ended where its service is gone."""

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
class Told:
    """An operator that only counts its passes, and gets events as kopf's handlers do."""

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
        """Passes so far, once the burst that woke them is over."""
        await asyncio.sleep(0.12)
        return self.passes


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    told = Told()
    yield told
    await told.loops.stop_all()


async def test_a_new_service_and_a_changed_spec_are_looked_at_and_our_own_status_is_not(told: Told) -> None:
    told.put(KIND, service(1))
    assert await told.settle() == 1
    told.put(KIND, service(2))
    assert await told.settle() == 1
    told.put(KIND, service(3, generation=2))
    assert await told.settle() == 2


async def test_a_spec_that_changed_under_our_own_write_is_looked_at(told: Told) -> None:
    told.put(KIND, service(1))
    await told.settle()
    told.cache.put(KIND, service(9, generation=2))  # what our write to the status was answered

    told.put(KIND, service(8, generation=2))

    assert await told.settle() == 2


async def test_a_child_wakes_its_service_once_for_each_change(told: Told) -> None:
    told.put(KIND, service(1))
    await told.settle()
    told.put("Pod", pod(2))
    assert await told.settle() == 2
    told.put("Pod", pod(2))  # our own write, which its answer told of already
    assert await told.settle() == 2
    told.drop("Pod", pod(3))
    assert await told.settle() == 3


async def test_a_service_that_is_gone_is_forgotten_and_ends_its_loop(told: Told) -> None:
    told.put(KIND, service(1))
    await told.settle()

    told.drop(KIND, service(2))

    assert len(told.loops) == 0
    assert told.gone == [KEY]
    assert told.handlers.seen == {}


async def test_a_deletion_that_comes_late_leaves_a_service_that_was_made_anew(told: Told) -> None:
    told.put(KIND, service(1))
    anew = service(5)
    anew["metadata"]["uid"] = "another"
    told.put(KIND, anew)

    told.drop(KIND, service(4))

    assert len(told.loops) == 1
    assert told.gone == []
