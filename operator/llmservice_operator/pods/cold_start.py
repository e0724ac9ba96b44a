"""How long the first request to a service at zero waited for a pod, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmservice_operator.api.status import AutoscalingStatus
from llmservice_operator.pods.pod import Pod, epoch


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Parts that add up to the whole, in seconds; Kubernetes' timestamps are whole seconds."""

    ready_s: float
    """When the pod was ready, in seconds since 1970."""
    scheduling: float
    """From the request until the pod's first container ran: the decision, a node with room, the image, volumes."""
    fetching: float
    """The download of the model, where there is one."""
    loading: float
    """From the server's start until it was ready, without compiling."""
    compiling: float
    """Kernels, as the server reports it; 0 where it does not."""

    @property
    def seconds(self) -> float:
        return self.scheduling + self.fetching + self.loading + self.compiling

    def phases(self) -> dict[str, float]:
        return {
            "scheduling": self.scheduling,
            "fetching": self.fetching,
            "loading": self.loading,
            "compiling": self.compiling,
            "total": self.seconds,
        }


def first_ready(pods: Sequence[Pod]) -> Pod | None:
    """The pod that a held request went to."""
    serving = [pod for pod in pods if pod.serves and pod.ready_since_s is not None]
    return min(serving, key=lambda pod: (pod.ready_since_s or 0.0, pod.name), default=None)


def cold_start(pod: Pod, requested_s: float, compile_s: float) -> ColdStart | None:
    """The start of a ready pod for a request that came at `requested_s`; None where Kubernetes reports too little."""
    if pod.ready_since_s is None or pod.server_began_s is None:
        return None
    began_s = pod.server_began_s if pod.fetch_began_s is None else pod.fetch_began_s
    points = [requested_s]
    for point_s in (began_s, pod.server_began_s, pod.ready_since_s):
        points.append(max(points[-1], point_s))
    scheduling, fetching, starting = (after - before for before, after in pairwise(points))
    compiling = min(compile_s, starting)
    return ColdStart(points[-1], scheduling, fetching, starting - compiling, compiling)


def woken_since(status: AutoscalingStatus | None) -> float | None:
    """When the last change of the replicas was decided, where it was from zero: what a restarted operator knows."""
    for newer, older in pairwise(status.decisions if status else ()):
        if newer.replicas != older.replicas:
            return epoch(newer.time) if older.replicas == 0 else None
    return None
