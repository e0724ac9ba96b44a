"""What a watch's event means: the cache is brought up to date, and a loop is woken where there is news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.handlers import Watches, kopf_settings
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
    """An operator that only counts its passes."""

    watches: Watches = field(init=False)
    passes: int = 0
    gone: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loops = ServiceLoops(self.run_pass, 1000.0, OperatorMetrics())
        self.watches = Watches(
            ObjectCache(), self.loops, lambda *key: self.gone.append(key), lambda: None, OperatorMetrics().process
        )
        self.loops.open([])

    async def run_pass(self, namespace: str, name: str) -> bool:
        assert (namespace, name) == KEY
        self.passes += 1
        return True

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
    told.watches.service_changed("ADDED", service(1))
    assert await told.settle() == 1
    told.watches.service_changed("MODIFIED", service(2))
    assert await told.settle() == 1
    told.watches.service_changed("MODIFIED", service(3, generation=2))
    assert await told.settle() == 2


async def test_a_spec_that_changed_under_our_own_write_is_looked_at(told: Told) -> None:
    told.watches.service_changed("ADDED", service(1))
    await told.settle()
    told.watches.cache.put("LLMService", service(9, generation=2))  # what our write to the status was answered

    told.watches.service_changed("MODIFIED", service(8, generation=2))

    assert await told.settle() == 2


async def test_a_child_wakes_its_service_once_for_each_change(told: Told) -> None:
    told.watches.service_changed("ADDED", service(1))
    await told.settle()
    told.watches.child_changed("ADDED", "Pod", pod(2))
    assert await told.settle() == 2
    told.watches.child_changed("MODIFIED", "Pod", pod(2))  # our own write, which its answer told of already
    assert await told.settle() == 2
    told.watches.child_changed("DELETED", "Pod", pod(3))
    assert await told.settle() == 3


async def test_a_service_that_is_gone_is_forgotten_and_ends_its_loop(told: Told) -> None:
    told.watches.service_changed("ADDED", service(1))
    await told.settle()

    told.watches.service_changed("DELETED", service(2))

    assert len(told.loops) == 0
    assert told.gone == [KEY]
    assert told.watches.seen == {}
    assert told.watches.cache.services() == []


async def test_a_deletion_that_no_watch_told_of_ends_the_loop_as_well(told: Told) -> None:
    told.watches.service_changed("ADDED", service(1))
    for one in told.watches.cache.replace("LLMService", None, [], "5"):
        told.watches.resynced(FOLLOWED[0], one)

    assert len(told.loops) == 0
    assert told.gone == [KEY]


def test_a_watch_that_falls_silent_is_begun_anew_within_a_bounded_time() -> None:
    watching = kopf_settings(FOLLOWED, 70.0).watching

    assert watching.inactivity_timeout == 70.0
    assert watching.server_timeout is not None
    assert watching.client_timeout is not None
    assert watching.server_timeout < watching.client_timeout
    assert watching.chunk_size == 100
