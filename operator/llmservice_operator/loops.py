"""One loop per service: a pass, then a wait until an event wakes it or the tick is over."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from llmservice_operator.cluster.kube_client import KubeError
from llmservice_operator.cluster.priority_gate import PriorityGate
from llmservice_operator.monitoring.metrics import OperatorMetrics

logger = logging.getLogger(__name__)

_PASS_TIMEOUT_S = 60.0
_STUCK_S = 3 * _PASS_TIMEOUT_S
"""A pass that its own timeout has not ended by then ignores its cancellation."""
_LONGEST_BACKOFF_S = 60.0
AT_ONCE = 128
"""Passes at once: after a start with a thousand services the first end before the last begin, and none times out.
Each keeps its place until its status is written, which waits behind the Deployments of others: with fewer places, some
of a hundred simultaneous edits would have to wait for status writes."""
_JITTER = 0.1
_GATHER_S = 0.05
"""Changes come in bursts (a rollout touches pods and Deployment at once): one pass answers them together."""

ServiceKey = tuple[str, str]
"""Namespace and name."""


_EDITED_S, _CHILD_CHANGED_S, _TICK_S = 0.0, 2.0, 10.0
"""How long a pass may be overtaken, by why it is due: under load, edits go before routine passes."""


@dataclass(slots=True, eq=False)
class _Loop:
    """Of one service."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    patience_s: float = _TICK_S
    """Of the pass that is due next."""
    task: asyncio.Task[None] | None = None
    began_s: float | None = None
    """When the pass under way began (monotonic); None between passes."""

    @property
    def ended(self) -> bool:
        return self.task is None or self.task.done()


class ServiceLoops:
    """Starts, wakes and ends the loops; a failing service does not affect the others."""

    def __init__(
        self,
        run_pass: Callable[[str, str], Awaitable[bool]],
        tick_s: float,
        metrics: OperatorMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_pass = run_pass
        self._tick_s = tick_s
        self._metrics = metrics
        self._clock = clock
        self._loops: dict[ServiceKey, _Loop] = {}
        self._open = False
        self._gate = PriorityGate(AT_ONCE)

    def __len__(self) -> int:
        return len(self._loops)

    def open(self, keys: Iterable[ServiceKey]) -> None:
        """Start with these services: the cache is filled, and this process leads."""
        self._open = True
        for key in keys:
            self._begin(key, _TICK_S)

    def start(self, key: ServiceKey) -> None:
        """Start a service's loop, or wake it, after a change of the spec. No effect before `open`."""
        if not self._open:
            return
        loop = self._loops.get(key)
        if loop is None or loop.ended:
            self._begin(key, _EDITED_S)
        else:
            self._hurry(loop, _EDITED_S)

    def wake(self, key: ServiceKey) -> None:
        """Make a service's next pass due now; no effect for an unknown service."""
        if loop := self._loops.get(key):
            self._hurry(loop, _CHILD_CHANGED_S)

    def end(self, key: ServiceKey) -> None:
        """The service is gone: end its loop, even during a pass."""
        loop = self._loops.pop(key, None)
        if loop is not None and loop.task is not None:
            loop.task.cancel()

    async def stop_all(self) -> None:
        """End every loop for good; when this returns, no pass is running."""
        self._open = False
        tasks = [loop.task for loop in self._loops.values() if loop.task is not None]
        self._loops.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def healthy(self) -> bool:
        """False once a loop has died or hangs, which only a restart repairs."""
        stuck_s = self._clock() - _STUCK_S
        return not any(
            (loop.task is not None and _died(loop.task)) or (loop.began_s is not None and loop.began_s < stuck_s)
            for loop in self._loops.values()
        )

    def _begin(self, key: ServiceKey, patience_s: float) -> None:
        loop = self._loops[key] = _Loop(patience_s=patience_s)
        loop.task = asyncio.create_task(self._run(key, loop), name=f"service {key[0]}/{key[1]}")

    def _hurry(self, loop: _Loop, patience_s: float) -> None:
        loop.patience_s = min(loop.patience_s, patience_s)
        loop.wake.set()
        self._gate.hurry(loop, patience_s)

    async def _run(self, key: ServiceKey, loop: _Loop) -> None:
        failures = 0
        asked_s = 0.0
        while True:
            try:
                if not await self._timed_pass(key, loop):
                    self._forget(key, loop)
                    return
                failures = 0
            except Exception as error:
                failures += 1
                asked_s = error.retry_after_s if isinstance(error, KubeError) else 0.0
                self._metrics.failed(*key, failure_reason(error))
                _log_failure(key, error)
            if failures:  # a wake must not shorten the pause, which the API server may need
                await asyncio.sleep(max(asked_s, min(self._tick_s * 2 ** min(failures, 10), _LONGEST_BACKOFF_S)))
            else:
                await self._wait(loop.wake)

    def _forget(self, key: ServiceKey, loop: _Loop) -> None:
        """The service is gone; the loop of a new one with its name stays."""
        if self._loops.get(key) is loop:
            del self._loops[key]

    async def _timed_pass(self, key: ServiceKey, loop: _Loop) -> bool:
        async with self._gate.place(loop.patience_s, loop):
            loop.patience_s = _TICK_S
            loop.wake.clear()  # this pass sees every change so far
            started = loop.began_s = self._clock()
            try:
                async with asyncio.timeout(_PASS_TIMEOUT_S):
                    alive = await self._run_pass(*key)
            finally:
                loop.began_s = None
        self._metrics.passed(self._clock() - started)
        return alive

    async def _wait(self, wake: asyncio.Event) -> None:
        try:
            # Jitter: a thousand services that were started together must not stay synchronised.
            async with asyncio.timeout(self._tick_s * random.uniform(1 - _JITTER, 1 + _JITTER)):  # noqa: S311 - no secret
                await wake.wait()
                await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            return


def failure_reason(error: Exception) -> str:
    """A label value for metrics."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if not isinstance(error, KubeError):
        return "internal"
    known = {0: "unreachable", 401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict"}
    known |= {410: "gone", 422: "invalid", 429: "throttled"}
    return known.get(error.status, "server_error" if error.status >= 500 else "refused")


def _died(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _log_failure(key: ServiceKey, error: Exception) -> None:
    """Errors of the API server are logged as a sentence, all others with their traceback."""
    expected = isinstance(error, KubeError | TimeoutError)
    why = str(error) or type(error).__name__
    logger.warning("%s/%s: pass failed, will be repeated: %s", *key, why, exc_info=not expected)
