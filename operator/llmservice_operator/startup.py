"""How long a pod takes from its creation until it is ready, learned from the pods themselves."""

from __future__ import annotations

from collections.abc import Iterable

from llmservice_operator.pod import Pod

UNKNOWN_S = 600.0
"""Until the first pod was seen to start: generous, for a model of many GiB takes minutes to load."""
SHORTEST_S, LONGEST_S = 10.0, 3600.0
_KEPT = 32


class StartupTimes:
    """The last start-up times; a restart of the operator begins with the P90 that the status kept."""

    def __init__(self, learned_s: float | None = None) -> None:
        self._samples: dict[str, float] = {} if learned_s is None else {"status": float(learned_s)}

    def observe(self, pods: Iterable[Pod]) -> None:
        """Learn from pods that are ready for the first time since they were created."""
        for pod in pods:
            if pod.ready and pod.ready_since_s is not None and not pod.restarts and pod.uid not in self._samples:
                self._samples[pod.uid] = max(0.0, pod.ready_since_s - pod.created_s)
        for surplus in list(self._samples)[:-_KEPT]:
            del self._samples[surplus]

    @property
    def p90_s(self) -> float | None:
        """Nine in ten pods were ready within this time (nearest rank); None before the first."""
        ordered = sorted(self._samples.values())
        return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else None

    @property
    def patience_s(self) -> float:
        """How long a pod that is not ready counts as supply."""
        learned = self.p90_s
        return UNKNOWN_S if learned is None else min(max(learned, SHORTEST_S), LONGEST_S)
