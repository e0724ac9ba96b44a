"""How long a pod takes from its creation until it is ready, learned from the pods themselves."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_operator.pods.pod import Pod
from llmservice_operator.scaling.history import LONGEST_GAP_S

UNKNOWN_S = 600.0
"""Until the first pod was seen to start: generous, for a model of many GiB takes minutes to load."""
SHORTEST_S, LONGEST_S = 10.0, 3600.0
_USUAL_S = 60.0
_KEPT = 32


class StartupTimes:
    """The last start-up times; a restart of the operator begins with the P90 that the status kept."""

    def __init__(self, learned_s: float | None = None) -> None:
        self._learned_s = learned_s
        self._samples: dict[str, float] = {} if learned_s is None else {"status": float(learned_s)}
        self._ages: dict[str, float] = {}
        self._seen_s: float | None = None

    def observe(self, pods: Sequence[Pod], now: float, steady_s: float) -> None:
        """Learn from pods that are ready for the first time since they were created, and watch the others' age.

        `now` is the clock that Kubernetes stamps pods by, `steady_s` is monotonic. A pod's age is the time for which
        it was watched, so that a clock that is set makes no pod overdue. Only those
        that were there before the operator's first look are taken at their word; for those that were ready by then the
        status speaks, which was written with them in mind.
        """
        gap_s = None if self._seen_s is None else steady_s - self._seen_s
        watched_s = gap_s if gap_s is not None and 0 <= gap_s <= LONGEST_GAP_S else 0.0
        first = gap_s is None
        ages = {pod.uid: max(0.0, now - pod.created_s) if first else 0.0 for pod in pods}
        self._ages = {uid: self._ages[uid] + watched_s if uid in self._ages else age for uid, age in ages.items()}
        self._seen_s = steady_s
        for pod in pods:
            if pod.ready and pod.ready_since_s is not None and not pod.restarts and pod.uid not in self._samples:
                took_s = max(0.0, pod.ready_since_s - pod.created_s)
                self._samples[pod.uid] = self._learned_s if first and self._learned_s is not None else took_s
        for surplus in list(self._samples)[:-_KEPT]:
            del self._samples[surplus]

    @property
    def p90_s(self) -> float | None:
        """Nine in ten pods were ready within this time (nearest rank); None before the first."""
        ordered = sorted(self._samples.values())
        return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else None

    def overdue(self, pod: Pod) -> bool:
        """Whether a pod that is not ready takes longer than its like did."""
        return self._ages.get(pod.uid, 0.0) > self.patience_s

    def lead_s(self, coming: Sequence[Pod]) -> float:
        """How long a replica takes until it serves: as long as its like did, or as those take that still start."""
        usual_s = _USUAL_S if self.p90_s is None else self.p90_s
        return max(SHORTEST_S, usual_s, *(self._ages.get(pod.uid, 0.0) for pod in coming))

    @property
    def patience_s(self) -> float:
        """How long a pod that is not ready counts as supply."""
        learned = self.p90_s
        return UNKNOWN_S if learned is None else min(max(learned, SHORTEST_S), LONGEST_S)
