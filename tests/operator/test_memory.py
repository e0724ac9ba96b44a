from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.memory import Memory, remembered_promise
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.startup import StartupTimes
from llmservice_operator.sizing.sizer import Sizer
from llmservice_operator.status.note_times import NoteTimes

CHANGED = {"metadata": {"generation": 2}, "status": {"observedGeneration": 1}}
TAKEN_UP = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2}}


@pytest.fixture
def memory() -> Memory:
    async def nobody(*_: Any) -> Any:
        raise AssertionError("no model is read to remember")

    return Memory(Sizer(nobody), StartupTimes(None), NoteTimes(0.0, resumed=False))


def test_kubernetes_has_ten_seconds_to_notice_a_change(memory: Memory) -> None:
    assert memory.settling(CHANGED, 100.0)
    assert memory.settling(CHANGED, 109.0)
    assert not memory.settling(CHANGED, 111.0)


def test_each_change_has_its_own_ten_seconds(memory: Memory) -> None:
    assert memory.settling(CHANGED, 100.0)
    assert not memory.settling(TAKEN_UP, 105.0)
    assert memory.settling(CHANGED, 112.0)


@pytest.mark.parametrize(("generation", "known"), [(1, True), (2, False)])
def test_a_promise_that_was_judged_under_another_spec_is_forgotten(
    generation: int, known: bool, manifest_of: Callable[..., dict[str, Any]]
) -> None:
    manifest = manifest_of()
    manifest["metadata"]["generation"] = generation
    condition = {"type": "SLOFeasible", "status": "False", "reason": "TooSlow", "message": "m"}
    condition |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    service = LLMService.model_validate({**manifest, "status": {"conditions": [condition]}})

    assert remembered_promise(service) == (Feasibility("False", "TooSlow", "m") if known else None)
