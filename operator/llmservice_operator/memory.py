"""What a pass leaves for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.overload import OverloadTimer
from llmservice_operator.scaling.startup import StartupTimes
from llmservice_operator.sizing.sizer import Sizer
from llmservice_operator.status.conditions import observed
from llmservice_operator.status.note_times import NoteTimes

_SETTLES_S = 10.0
"""Kubernetes notices a change within milliseconds; after this time it is told that it does not."""


@dataclass(slots=True)
class Memory:
    """Of one service. Whatever matters after a restart is in the status as well."""

    sizer: Sizer
    startup: StartupTimes
    notes: NoteTimes
    overload: OverloadTimer = field(default_factory=OverloadTimer)
    history: History | None = None
    feasibility: Feasibility | None = None
    generation: int | None = None
    """Of the spec that the history was made under."""
    unseen_s: float | None = None
    """Since when Kubernetes has not taken up a change of the Deployment."""

    def settling(self, deployment: Manifest | None, now: float) -> bool:
        """Whether the Deployment was changed just now and Kubernetes has not taken it up yet."""
        if observed(deployment):
            self.unseen_s = None
            return False
        self.unseen_s = now if self.unseen_s is None else self.unseen_s
        return 0 <= now - self.unseen_s < _SETTLES_S


def remembered_promise(service: LLMService) -> Feasibility | None:
    """The verdict that the status kept, where it speaks about the present spec."""
    condition = service.status.condition("SLOFeasible")
    if condition is None or condition.observed_generation != service.metadata.generation:
        return None
    return Feasibility(condition.status, condition.reason, condition.message)
