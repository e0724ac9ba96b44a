"""Where scaling signals come from: Prometheus, which keeps the window across restarts, or the pods' own `/metrics`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, Protocol

import aiohttp

from llmservice_operator.http_body import read_bounded
from llmservice_operator.monitoring import promql
from llmservice_operator.pods.pod import Pod
from llmservice_operator.scaling.load import Histories, Load, Scrape, load_of
from llmservice_operator.signals.scrape import SERIES, Sample, ScrapeError, parse_exposition, scrape_of

logger = logging.getLogger(__name__)

_PODS_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 4 * 2**20
_FORGET_AFTER_S = 600.0
_SWEEP_EVERY_S = 60.0
_PROMETHEUS_TIMEOUT_S = 5.0
_STALE_AFTER_S = 90.0
"""Prometheus returns old samples for minutes after a target is gone; decisions need fresh ones."""

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
        """The load of the ready pods; None where no source can be read."""
        for name, reader in self._readers(source):
            try:
                histories = await reader.read(namespace, ready, window_s, now)
            except SignalError as error:
                if name not in self._failing:  # log it once, not in every pass over every service
                    logger.warning("signals can't be read from %s: %s", name, error)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            if load := load_of(histories, [pod.name for pod in ready], name):
                return load
        return None

    def why_none(self, source: SourceName) -> str | None:
        """Why nothing can be read from `source` with this operator's flags; None: something can."""
        if self._readers(source):
            return None
        return (
            "metrics.source is prometheus, but the operator has no Prometheus: set the chart's operator.prometheusUrl"
            " (--prometheus-url), or metrics.source: auto"
        )

    def _readers(self, source: SourceName) -> list[tuple[str, SignalSource]]:
        prometheus = [("prometheus", self._prometheus)] if self._prometheus else []
        pods = [("pods", self._pods)]
        return {"prometheus": prometheus, "pods": pods, "auto": [*prometheus, *pods]}[source]


class PodSignals:
    """Scrapes the pods and keeps the scrapes of a window for each; after a restart the window is empty."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float = _PODS_TIMEOUT_S) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._parsing = asyncio.Lock()
        """One answer is parsed in each iteration of the event loop, so that many answers do not delay other events."""
        self._scrapes: dict[str, list[Scrape]] = {}
        self._swept_s = 0.0

    async def read(self, namespace: str, pods: Sequence[Pod], window_s: float, now: float) -> Histories:
        """Scrape every pod now; a pod that does not answer has no history, whatever was scraped before."""
        answers = await asyncio.gather(*(self._scrape(pod, now) for pod in pods))
        self._forget(now)
        return {
            pod.name: self._remember(pod.uid, scrape, window_s, now)
            for pod, scrape in zip(pods, answers, strict=True)
            if scrape is not None
        }

    async def _scrape(self, pod: Pod, now: float) -> Scrape | None:
        try:
            async with self._session.get(pod.metrics_url, timeout=self._timeout) as response:
                response.raise_for_status()
                body = await read_bounded(response, _ANSWER_LIMIT_BYTES)
            async with self._parsing:
                return parse_exposition(body.decode(errors="replace"), now)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ScrapeError is a ValueError
            logger.debug("pod %s: no metrics: %s", pod.name, error)
            return None

    def _remember(self, uid: str, scrape: Scrape, window_s: float, now: float) -> list[Scrape]:
        """The window's scrapes; what does not change between two, in idle pods all but the time, is kept once."""
        known = self._scrapes.get(uid, [])
        if known:
            values = ((one.name, getattr(known[-1], one.name)) for one in fields(scrape))
            scrape = replace(scrape, **{name: value for name, value in values if value == getattr(scrape, name)})
        within = [one for one in known if now - window_s <= one.time_s <= now]  # later: the clock was set back
        self._scrapes[uid] = [*within, scrape]
        return self._scrapes[uid]

    def _forget(self, now: float) -> None:
        """Drop the pods that are gone, once a minute."""
        if abs(now - self._swept_s) < _SWEEP_EVERY_S:
            return
        self._swept_s = now
        gone = [uid for uid, scrapes in self._scrapes.items() if scrapes[-1].time_s < now - _FORGET_AFTER_S]
        for uid in gone:
            del self._scrapes[uid]


class PrometheusSignals:
    """Reads a Prometheus, or anything else with its query API, in one query.

    The series must carry the labels `namespace` and `pod`, as those of a PodMonitor do.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float = _PROMETHEUS_TIMEOUT_S) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/api/v1/query"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read(self, namespace: str, pods: Sequence[Pod], window_s: float, now: float) -> Histories:
        """The scrapes that Prometheus made of the pods within the window, or the last two; raises SignalError."""
        query = range_query(namespace, [pod.name for pod in pods], max(window_s, 2 * _STALE_AFTER_S))
        try:
            async with self._session.post(
                self._url, data={"query": query, "time": f"{now:.3f}"}, timeout=self._timeout
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SignalError(f"Prometheus can't be read ({type(error).__name__})") from error
        return histories_of(answer, window_s, now)


def range_query(namespace: str, pods: Iterable[str], window_s: float) -> str:
    """PromQL for every series that is used, of these pods, with all samples of the window."""
    names = promql.string("|".join(SERIES))
    pattern = promql.string("|".join(re.escape(pod) for pod in pods))
    inside = f"__name__=~{names},{promql.matchers(namespace=namespace)},pod=~{pattern}"
    return f"{{{inside}}}[{max(1, round(window_s * 1000))}ms]"


def histories_of(answer: Any, window_s: float, now: float) -> Histories:
    """Scrapes by pod: all series of a target share the time of its scrape. Raises SignalError.

    At least the last two are kept, so that a window shorter than the scrape interval still has rates.
    """
    try:
        if answer["status"] != "success":
            raise SignalError(f"Prometheus refused the query: {answer.get('error', 'no reason given')}")
        samples: dict[str, dict[float, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for series in answer["data"]["result"]:
            labels: Mapping[str, str] = series["metric"]
            for time_s, value in series["values"]:
                samples[labels["pod"]][float(time_s)].append((labels["__name__"], labels, float(value)))
    except (KeyError, TypeError, ValueError) as error:
        raise SignalError(f"Prometheus' answer is not a range vector: {error!r}") from error
    histories = {pod: _scrapes(by_time) for pod, by_time in samples.items()}
    return {
        pod: [scrape for scrape in scrapes[:-2] if scrape.time_s >= now - window_s] + scrapes[-2:]
        for pod, scrapes in histories.items()
        if scrapes and scrapes[-1].time_s >= now - _STALE_AFTER_S
    }


def _scrapes(by_time: Mapping[float, Sequence[Sample]]) -> list[Scrape]:
    """Incomplete scrapes, as of a server that was still starting, are left out."""
    scrapes = []
    for time_s, samples in sorted(by_time.items()):
        try:
            scrapes.append(scrape_of(samples, time_s))
        except ScrapeError:
            continue
    return scrapes
