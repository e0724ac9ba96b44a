from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.apply.refusals import Refusals
from llmservice_operator.children.child import Child
from llmservice_operator.children.children import expected_children
from llmservice_operator.pods.pod import Trouble
from llmservice_operator.sizing.sizing import Sized

TROUBLE = Trouble("ApplyFailed", "exceeded quota")
LIVE: dict[str, Any] = {"metadata": {"resourceVersion": "7"}}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def child(service_of: Callable[..., LLMService], sized: Sized) -> Child:
    return expected_children(service_of(), sized, 1, "img:1")[0]


def test_a_refused_child_is_asked_for_ever_more_seldom(child: Child) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    asked = []
    for second in range(1000):
        clock.now_s = float(second)
        if refusals.standing(child, None, 1) is None:
            asked.append(second)
            refusals.add(child, None, 1, TROUBLE)

    assert asked == [0, 5, 15, 35, 75, 155, 315, 615, 915]


@pytest.mark.parametrize(
    ("live", "generation", "wanted"),
    [
        pytest.param(None, 2, True, id="the spec was edited"),
        pytest.param(LIVE, 1, True, id="there is an event of the child"),
        pytest.param(None, 1, False, id="the child is to go now"),
    ],
)
def test_what_changed_is_asked_for_at_once(
    live: dict[str, Any] | None, generation: int, wanted: bool, child: Child
) -> None:
    refusals = Refusals(Clock())
    for _ in range(4):
        refusals.add(child, None, 1, TROUBLE)

    assert refusals.standing(child, None, 1) == TROUBLE
    assert refusals.standing(replace(child, wanted=wanted), live, generation) is None


def test_another_refusal_begins_with_a_short_wait(child: Child) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(6):
        refusals.add(child, None, 1, TROUBLE)
    refusals.add(child, None, 2, TROUBLE)
    clock.now_s += 5

    assert refusals.standing(child, None, 2) is None


def test_nothing_is_remembered_of_what_was_accepted_or_is_gone(child: Child) -> None:
    refusals = Refusals(Clock())
    refusals.add(child, None, 1, TROUBLE)
    refusals.settle(child.key)
    assert len(refusals) == 0

    refusals.add(child, None, 1, TROUBLE)
    refusals.forget("team-a", "another")
    assert len(refusals) == 1
    refusals.forget("team-a", "tiny")
    assert len(refusals) == 0
