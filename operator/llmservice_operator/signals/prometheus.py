"""Signals from Prometheus: one query brings the raw samples of the window, so that a restart forgets nothing.

The series must carry the labels `namespace` and `pod`, as those of a PodMonitor do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from llmservice_operator.monitoring import promql
from llmservice_operator.pods.pod import Pod
from llmservice_operator.signals.load import Histories
from llmservice_operator.signals.scrape import SERIES, Sample, Scrape, ScrapeError, scrape_of
from llmservice_operator.signals.signals import SignalError

_TIMEOUT_S = 5.0
_STALE_AFTER_S = 90.0
"""Prometheus answers with old samples for minutes after a target is gone; decisions need fresh ones."""


class PrometheusSignals:
    """Reads one Prometheus, or anything that speaks its query API."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/api/v1/query"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read(self, namespace: str, pods: Sequence[Pod], window_s: float, now: float) -> Histories:
        """The scrapes that Prometheus made of the pods within the window; raises SignalError."""
        query = range_query(namespace, [pod.name for pod in pods], max(window_s, _STALE_AFTER_S))
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
    names = "|".join(SERIES)
    matchers = [
        f"__name__=~{promql.string(names)}",
        f"namespace={promql.string(namespace)}",
        f"pod=~{promql.string('|'.join(re.escape(pod) for pod in pods))}",
    ]
    return f"{{{','.join(matchers)}}}[{max(1, round(window_s * 1000))}ms]"


def histories_of(answer: Any, window_s: float, now: float) -> Histories:
    """Scrapes by pod: all series of a target share the time of its scrape. Raises SignalError.

    At least the last two count, so that a window shorter than the scrape interval still has rates.
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
    histories = {pod: _scrapes(moments) for pod, moments in samples.items()}
    return {
        pod: [scrape for scrape in scrapes[:-2] if scrape.time_s >= now - window_s] + scrapes[-2:]
        for pod, scrapes in histories.items()
        if scrapes and scrapes[-1].time_s >= now - _STALE_AFTER_S
    }


def _scrapes(moments: Mapping[float, Sequence[Sample]]) -> list[Scrape]:
    """What is not a whole scrape (a server that was still starting) is left out."""
    scrapes = []
    for time_s, samples in sorted(moments.items()):
        try:
            scrapes.append(scrape_of(samples, time_s))
        except ScrapeError:
            continue
    return scrapes
