"""Observations of the demo's service: status, metrics of its pods, and progress of the load."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from llmservice_bench.drive import Progress
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.pods.pod import Pod, pods_of
from llmservice_operator.scaling.load import Scrape
from llmservice_operator.signals.scrape import ScrapeError, parse_exposition

SCRAPE_TIMEOUT_S = 2.0
TTFT_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The state at one time; `time_s` is relative to the start of the traffic."""

    time_s: float
    replicas: int
    ready: int
    desired: int
    waiting: float
    """Requests in the waiting queues of all pods."""
    kv_usage: float
    """Share of KV blocks in use on the fullest pod, 0 to 1."""
    ttft_p99_s: float | None
    """Measured by the clients, over the requests that ended in the last 10 s; None without any."""
    pieces: int
    """Chunks of output received so far; a chunk may have several tokens."""
    in_flight: int
    completed: int
    failed: int


class Observer:
    """Collects observations and scaling decisions of one LLMService."""

    def __init__(
        self, kube: KubeClient, session: aiohttp.ClientSession, namespace: str, name: str, progress: Progress
    ) -> None:
        self._kube = kube
        self._session = session
        self._namespace = namespace
        self._name = name
        self._progress = progress
        self._started = time.perf_counter()
        self.observations: list[Observation] = []
        self.decisions: dict[str, dict[str, Any]] = {}
        """Every decision seen in the status, by its time; the status has only the last of them."""

    def start_clock(self) -> None:
        """Set time zero, the start of the traffic."""
        self._started = time.perf_counter()

    async def observe(self) -> Observation:
        """One observation, also added to `observations`.

        Raises:
            llmservice_operator.cluster.kube_client.KubeError: the API server is unreachable.
        """
        service = await self._kube.get_service(self._namespace, self._name) or {}
        status = service.get("status", {})
        autoscaling = status.get("autoscaling", {})
        for decision in autoscaling.get("decisions", ()):
            self.decisions[decision["time"]] = decision
        scrapes = await self._scrape_pods(status.get("selector", ""))
        progress = self._progress
        now = time.perf_counter() - self._started
        observation = Observation(
            time_s=now,
            replicas=status.get("replicas", 0),
            ready=status.get("readyReplicas", 0),
            desired=autoscaling.get("desiredReplicas", 0),
            waiting=sum(scrape.waiting for scrape in scrapes),
            kv_usage=max((scrape.kv_usage for scrape in scrapes), default=0.0),
            ttft_p99_s=_recent_ttft_p99(progress, now),
            pieces=progress.pieces,
            in_flight=progress.in_flight,
            completed=progress.completed,
            failed=progress.failed,
        )
        self.observations.append(observation)
        return observation

    async def _scrape_pods(self, selector: str) -> list[Scrape]:
        pods = await self._kube.list_pods(self._namespace, selector) if selector else []
        scrapes = await asyncio.gather(*(self._scrape(pod) for pod in pods_of(pods) if pod.ip is not None))
        return [scrape for scrape in scrapes if scrape is not None]

    async def _scrape(self, pod: Pod) -> Scrape | None:
        """None for a pod that is starting or ending."""
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        try:
            async with self._session.get(pod.metrics_url, timeout=timeout) as response:
                return parse_exposition(await response.text(), time.time())
        except (aiohttp.ClientError, TimeoutError, ScrapeError):
            return None


def _recent_ttft_p99(progress: Progress, now: float) -> float | None:
    recent: list[float] = []
    for record in reversed(progress.records):  # sorted by their end
        if record.ended_s < now - TTFT_WINDOW_S:
            break
        if record.error is None:
            recent.append(record.ttft_s)
    return float(np.percentile(recent, 99)) if recent else None
