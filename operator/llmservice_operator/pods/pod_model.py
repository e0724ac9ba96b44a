"""What pods report about their model: its download, how a server sized itself, and the adapters that it has."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from llmservice_operator.children.deployment import PORT
from llmservice_operator.http_body import read_bounded
from llmservice_operator.pods.pod import Pod
from llmservice_operator.sizing import SizingReport, parse_report
from llmservice_planner.addresses import endpoint
from llmservice_planner.sizing.prediction_error import StepGroup, read_steps

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 2**16
_STEP_PERCENT = 5
_STEPS_EVERY_S = 60.0
_KEPT = 4096
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What parsing an answer raises where that is not what was expected: whoever may set a pod's image chooses it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Download:
    """Of one pod."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Fetching:
    """All downloads of a service."""

    pods: int
    percent: int | None = None
    """In steps of 5, so that the status is not rewritten every second; None while no pod reports it."""
    total_bytes: int | None = None


def together(pods: int, downloads: Sequence[Download]) -> Fetching | None:
    """`pods` fetch, of which some report `downloads`; a pod that waits for another pod's download has none."""
    if not pods:
        return None
    total = sum(one.total_bytes for one in downloads)
    if not total:
        return Fetching(pods)
    percent = sum(one.done_bytes for one in downloads) * 100 // total
    return Fetching(pods, percent - percent % _STEP_PERCENT, max(one.total_bytes for one in downloads))


def parse_progress(text: bytes) -> Download | None:
    """Of `llmservice fetch`; None where the pod does not download (yet). Raises one of `_MALFORMED` for other texts."""
    progress = json.loads(text)
    if progress["phase"] != "downloading":
        return None
    download = Download(int(progress["done_bytes"]), int(progress["total_bytes"]))
    if not 0 <= download.done_bytes <= download.total_bytes:
        raise ValueError(f"no progress of a download: {download}")
    return download


@dataclass(frozen=True, slots=True)
class PodAdapter:
    """A LoRA adapter as one pod reports it."""

    name: str
    uri: str | None
    version: str
    error: str | None = None
    """Why it could not be loaded."""


def parse_adapters(text: bytes) -> list[PodAdapter]:
    """Of a server's GET /sizing, as the next two. Each raises one of `_MALFORMED` for anything else."""
    found = json.loads(text)["adapters"]
    return [PodAdapter(str(one["name"]), one["uri"], str(one["version"]), one["error"]) for one in found]


def parse_steps(text: bytes) -> Sequence[StepGroup]:
    return read_steps(json.loads(text))


def parse_compile_s(text: bytes) -> float:
    """0 where the server does not report it."""
    seconds = float(json.loads(text).get("compile_s", 0.0))
    return seconds if 0 <= seconds < math.inf else 0.0


class PodModels:
    """Queries the pods. A server's report is read once."""

    def __init__(self, session: aiohttp.ClientSession, port: int = PORT, timeout_s: float = _TIMEOUT_S) -> None:
        self._session = session
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._reports: dict[tuple[str, int], SizingReport] = {}
        self._steps: dict[str, tuple[float, Sequence[StepGroup]]] = {}

    async def fetching(self, pods: Iterable[Pod]) -> Fetching | None:
        """The progress of the pods' downloads; None without downloads."""
        busy = [pod for pod in pods if pod.fetching and not pod.terminating]
        answers = await asyncio.gather(*(self._read(pod, "progress", parse_progress) for pod in busy))
        return together(len(busy), [one for one in answers if one is not None])

    async def report(self, pods: Iterable[Pod], model: str) -> SizingReport | None:
        """How the newest pod that serves `model` sized itself; None where none reports it."""
        serving = [pod for pod in pods if pod.serves and pod.model == model]
        for pod in sorted(serving, key=lambda pod: (-pod.created_s, pod.name)):
            key = (pod.uid, pod.restarts)
            if key in self._reports:
                return self._reports[key]
            if (report := await self._read(pod, "sizing", parse_report)) is not None:
                self._reports[key] = report
                for surplus in list(self._reports)[:-_KEPT]:
                    del self._reports[surplus]
                return report
        return None

    async def steps(self, pods: Iterable[Pod], model: str, now: float) -> Sequence[StepGroup]:
        """How long the steps of the oldest pod that serves `model` took; `now` is monotonic. Read once a minute."""
        serving = [pod for pod in pods if pod.serves and pod.model == model]
        if not serving:
            return ()
        pod = min(serving, key=lambda pod: (pod.created_s, pod.name))
        known = self._steps.get(pod.uid)
        if known is not None and 0 <= now - known[0] < _STEPS_EVERY_S:
            return known[1]
        steps = await self._read(pod, "sizing", parse_steps) or ()
        self._steps[pod.uid] = now, steps
        for surplus in list(self._steps)[:-_KEPT]:
            del self._steps[surplus]
        return steps

    async def adapters(self, pods: Iterable[Pod]) -> dict[str, list[PodAdapter]]:
        """By pod; a pod that cannot be read has none."""
        serving = [pod for pod in pods if pod.serves]
        answers = await asyncio.gather(*(self._read(pod, "sizing", parse_adapters) for pod in serving))
        return {pod.name: answer or [] for pod, answer in zip(serving, answers, strict=True)}

    async def compile_s(self, pod: Pod) -> float:
        """How long a server compiled kernels when it started; 0 where it does not report that."""
        return await self._read(pod, "sizing", parse_compile_s) or 0.0

    async def _read(self, pod: Pod, path: str, parse: Callable[[bytes], _T]) -> _T | None:
        """What a pod answers; None where it does not answer, or not as its server or its download would."""
        if pod.ip is None:
            return None
        url = f"http://{endpoint(pod.ip, self._port)}/{path}"
        try:
            async with self._session.get(url, timeout=self._timeout) as response:
                response.raise_for_status()
                return parse(await read_bounded(response, _ANSWER_LIMIT_BYTES))
        except (aiohttp.ClientError, TimeoutError, *_MALFORMED) as error:
            logger.debug("pod %s: no %s: %s %s", pod.name, path, type(error).__name__, error)
            return None
