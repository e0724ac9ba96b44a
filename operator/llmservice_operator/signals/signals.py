"""Where signals come from: a source reads the scrapes of a window, the spec says which source is asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from llmservice_operator.pods.pod import Pod
from llmservice_operator.signals.load import Histories, Load, load_of

logger = logging.getLogger(__name__)

SourceName = Literal["auto", "prometheus", "pods"]


class SignalError(Exception):
    """The source can't be read now; the message says why."""


class SignalSource(Protocol):
    """Reads what ready pods did within the last `window_s` seconds; raises SignalError."""

    async def read(self, namespace: str, pods: Sequence[Pod], window_s: float, now: float) -> Histories: ...


class Signals:
    """Prometheus where there is one, the pods otherwise."""

    def __init__(self, pods: SignalSource, prometheus: SignalSource | None) -> None:
        self._pods = pods
        self._prometheus = prometheus
        self._failing: set[str] = set()

    async def load(
        self, source: SourceName, namespace: str, ready: Sequence[Pod], window_s: float, now: float
    ) -> Load | None:
        """The load of the ready pods; None where no source can tell it."""
        for name, reader in self._readers(source):
            try:
                histories = await reader.read(namespace, ready, window_s, now)
            except SignalError as error:
                self._failed(name, error)
                continue
            self._failing.discard(name)
            if load := load_of(histories, [pod.name for pod in ready], name):
                return load
        return None

    def _failed(self, name: str, error: SignalError) -> None:
        """Say it once, not in every pass over every service."""
        if name not in self._failing:
            logger.warning("signals can't be read from %s: %s", name, error)
        self._failing.add(name)

    def _readers(self, source: SourceName) -> list[tuple[str, SignalSource]]:
        prometheus = [("prometheus", self._prometheus)] if self._prometheus else []
        pods = [("pods", self._pods)]
        return {"prometheus": prometheus, "pods": pods, "auto": [*prometheus, *pods]}[source]
