"""Requests that gateways hold for services without a pod, read from every gateway each second.

Only while a service is at zero or starts from there. The decision to scale up must come within two seconds of the first
request, so each gateway's answer counts at once, and one that does not answer delays no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.deployment import METRICS
from llmservice_operator.http_body import read_bounded
from llmservice_operator.scaling.load import Held
from llmservice_operator.signals.sources import SignalError
from llmservice_planner.addresses import endpoint

logger = logging.getLogger(__name__)

PATH = "/internal/held"
READ_EVERY_S = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=0.8)
_LIST_TIMEOUT_S = 2.0
_LIST_EVERY_S = 2.0
_AT_ONCE = 32
_FRESH_S = 5.0
"""For how long an answer counts where the gateway does not answer again."""
_ANSWER_LIMIT_BYTES = 2**20

ServiceKey = tuple[str, str]


def parse_held(body: bytes) -> dict[ServiceKey, Held]:
    """A gateway's answer; raises ValueError for anything else."""
    try:
        found = {}
        for name, one in json.loads(body)["held"].items():
            namespace, service = name.split("/")
            found[namespace, service] = _checked(Held(int(one["requests"]), int(one["tokens"]), float(one["oldest_s"])))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no answer of a gateway's {PATH}: {type(error).__name__} {error}") from error
    return found


def _checked(held: Held) -> Held:
    if held.requests < 0 or held.tokens < 0 or not 0 <= held.oldest_s < math.inf:
        raise ValueError(f"expected no negative number, not {held}")
    return held


@dataclass(slots=True)
class HeldRequests:
    """The gateways' last answers."""

    session: aiohttp.ClientSession
    list_gateways: Callable[[], Awaitable[Sequence[str]]]
    """The base URLs of all gateways' metrics ports; raises SignalError."""
    wake: Callable[[ServiceKey], None] = lambda key: None
    """Called for each service at zero that requests are held for."""
    counted: Callable[[str], None] = lambda result: None
    """Called for each read, with ok or error."""
    clock: Callable[[], float] = time.monotonic
    at_zero: set[ServiceKey] = field(default_factory=set)
    """Services that the autoscaler has set to zero, as their passes say. Only the leader has passes."""
    starting: set[ServiceKey] = field(default_factory=set)
    """Those that have left zero, until a pod is ready and nothing is held for them: a gateway holds what exceeds it."""
    _answers: dict[str, tuple[float, Mapping[ServiceKey, Held]]] = field(default_factory=dict)
    """By gateway: when it answered, and what."""
    _urls: Sequence[str] = ()
    _listed_s: float = -math.inf
    _asked_s: float | None = None
    """Since when gateways are asked and none has answered."""
    _failure: str | None = None

    def of(self, key: ServiceKey) -> Held | None:
        """What all gateways hold for a service; None where none has answered for seconds, though they were asked."""
        now_s = self.clock()
        known = [self._answers[url] for url in self._urls if url in self._answers]
        fresh = [answer for when_s, answer in known if now_s - when_s <= _FRESH_S]
        if not fresh and self._asked_s is not None and now_s - self._asked_s > _FRESH_S:
            return None
        return sum((answer[key] for answer in fresh if key in answer), start=Held())

    def forget(self, key: ServiceKey) -> None:
        self.at_zero.discard(key)
        self.starting.discard(key)

    async def run(self) -> None:
        """For ever; what fails is repeated."""
        while True:
            began_s = self.clock()
            if self.at_zero or self.starting:
                await self.read()
            else:
                self._answers.clear()
                self._asked_s = None
            await asyncio.sleep(max(0.0, READ_EVERY_S - (self.clock() - began_s)))

    async def read(self) -> None:
        """Read every gateway once, and from time to time which ones there are."""
        now_s = self.clock()
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        is_due = now_s - self._listed_s >= _LIST_EVERY_S
        if is_due and not self._urls:
            await self._list(now_s)
            is_due = False
        places = asyncio.Semaphore(_AT_ONCE)
        reads = [self._read(url, places) for url in self._urls]
        await asyncio.gather(*reads, *([self._list(now_s)] if is_due else []))

    async def _list(self, now_s: float) -> None:
        self._listed_s = now_s
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                self._urls = await self.list_gateways()
            self._failure = None
        except (SignalError, TimeoutError) as error:  # the gateways that were known are still read
            why = str(error) or type(error).__name__
            if why != self._failure:
                logger.warning("the gateways can't be listed, will be repeated: %s", why)
            self._failure = why
        self._answers = {url: one for url, one in self._answers.items() if url in self._urls}

    async def _read(self, url: str, places: asyncio.Semaphore) -> None:
        try:
            async with places, self.session.get(url + PATH, timeout=_TIMEOUT) as response:
                response.raise_for_status()
                answer = parse_held(await read_bounded(response, _ANSWER_LIMIT_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("gateway %s: %s", url, error)
            self.counted("error")
            return
        self.counted("ok")
        self._answers[url] = (self.clock(), answer)
        self._asked_s = None
        for key in self.at_zero & answer.keys():
            if answer[key].requests:
                self.wake(key)


def gateway_urls(pods: Iterable[Manifest]) -> list[str]:
    """The metrics ports of gateways' pods, by the name of the container's port."""
    urls = []
    for pod in pods:
        address = (pod.get("status") or {}).get("podIP")
        containers = (pod.get("spec") or {}).get("containers") or []
        ports = [port for one in containers for port in one.get("ports") or [] if port.get("name") == METRICS]
        if address and ports and not pod["metadata"].get("deletionTimestamp"):
            urls.append(f"http://{endpoint(address, ports[0]['containerPort'])}")
    return urls
