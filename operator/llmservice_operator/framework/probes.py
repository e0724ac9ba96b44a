"""What the operator's health is made of, and kopf's /healthz that reports it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import kopf

from llmservice_operator.monitoring.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watches:
    """What the last list or watch of each kind was answered, where that was no success."""

    metrics: ProcessMetrics
    failing: dict[str, str] = field(default_factory=dict)
    """By the kind's plural: why it can't be followed."""

    def answered(self, plural: str) -> None:
        if self.failing.pop(plural, None):
            self.metrics.watch_failing(plural, failing=False)
            logger.info("%s are followed again", plural)

    def failed(self, plural: str, why: str) -> None:
        """Logged once for each reason, not at each attempt."""
        if self.failing.get(plural) != why:
            self.failing[plural] = why
            self.metrics.watch_failing(plural, failing=True)
            logger.warning("%s can't be followed, will be repeated: %s", plural, why)


def register_probes(
    registry: kopf.OperatorRegistry, watches: Watches, loops_alive: Callable[[], bool], leads: Callable[[], bool]
) -> None:
    """/healthz answers 200 with one value for each probe, and 500 where only a restart would help.

    What the API server refuses is reported and does not fail the probe: a restart would not be answered otherwise.
    kopf repeats a probe that raises anything but PermanentError until it succeeds, while the kubelet waits.
    """
    permanent = kopf.ErrorsMode.PERMANENT

    @kopf.on.probe(id="loops", registry=registry, errors=permanent)
    async def loops(**_: object) -> str:
        if not loops_alive():
            raise kopf.PermanentError("the loop of a service has died")
        return "ok"

    @kopf.on.probe(id="watches", registry=registry, errors=permanent)
    async def follows(**_: object) -> dict[str, str] | str:
        return dict(watches.failing) or "ok"

    @kopf.on.probe(id="leader", registry=registry, errors=permanent)
    async def leader(**_: object) -> bool:
        return leads()
