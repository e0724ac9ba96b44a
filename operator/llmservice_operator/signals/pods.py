"""Signals straight from the pods' `/metrics`, in parallel, each within a timeout."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import aiohttp

from llmservice_operator.http_body import read_bounded
from llmservice_operator.pods.pod import Pod
from llmservice_operator.signals.load import Histories
from llmservice_operator.signals.scrape import Scrape, parse_exposition

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 4 * 2**20
_FORGET_AFTER_S = 600.0
_SWEPT_EVERY_S = 60.0


class PodSignals:
    """Remembers the scrapes of a window for every pod; a restart begins with an empty window."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float = _TIMEOUT_S) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._parsing = asyncio.Lock()
        """One answer is parsed at each turn of the event loop: an edit's events need several turns, each of which would
        otherwise last as long as all the answers that came together."""
        self._scrapes: dict[str, deque[Scrape]] = {}
        self._swept_s = 0.0

    async def read(self, namespace: str, pods: Sequence[Pod], window_s: float, now: float) -> Histories:
        """Scrape every pod now; a pod that does not answer has no history, however much is known of its past."""
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
        """The window's scrapes, and no older one; what stayed the same is kept once, as most of an idle pod does."""
        scrapes = self._scrapes.setdefault(uid, deque())
        if scrapes and scrapes[-1].ttft_buckets == scrape.ttft_buckets:
            scrape = replace(scrape, ttft_buckets=scrapes[-1].ttft_buckets)
        scrapes.append(scrape)
        while not now - window_s <= scrapes[0].time_s <= now:  # later ones were made before the clock was set back
            scrapes.popleft()
        return list(scrapes)

    def _forget(self, now: float) -> None:
        """Drop the pods that are gone, now and then: it is a look at all that there are."""
        if abs(now - self._swept_s) < _SWEPT_EVERY_S:
            return
        self._swept_s = now
        gone = [uid for uid, scrapes in self._scrapes.items() if scrapes[-1].time_s < now - _FORGET_AFTER_S]
        for uid in gone:
            del self._scrapes[uid]
