"""Probes: asking a container whether it has started, lives, and is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one question."""

    success: bool
    message: str = ""


@dataclass(slots=True)
class Tally:
    """Turns answers into a verdict: it flips after `failureThreshold` failures or `successThreshold` successes."""

    probe: Object
    verdict: bool | None = None
    _streak: int = field(default=0)
    _last: bool | None = field(default=None)

    def add(self, success: bool) -> bool:
        """Count an answer; returns whether the verdict has changed."""
        self._streak = self._streak + 1 if success == self._last else 1
        self._last = success
        needed = self.probe.get("successThreshold", 1) if success else self.probe.get("failureThreshold", 3)
        if self._streak < needed or self.verdict == success:
            return False
        self.verdict = success
        return True


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Whom to ask: the pod's address, the container's named ports, and how to run a command in its environment."""

    host: str
    ports: Mapping[str, int]
    execute: Callable[[list[str], float], Awaitable[Outcome]]


async def ask(session: ClientSession, probe: Object, target: ProbeTarget) -> Outcome:
    """Ask once, within the probe's `timeoutSeconds`."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        if "httpGet" in probe:
            return await _http(session, probe["httpGet"], target, timeout_s)
        if "tcpSocket" in probe:
            return await _tcp(probe["tcpSocket"], target, timeout_s)
        if "exec" in probe:
            return await target.execute(probe["exec"]["command"], timeout_s)
    except (TimeoutError, OSError, ClientError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        return Outcome(False, why)
    return Outcome(False, "the local node knows httpGet, tcpSocket and exec probes, and this one is none of them")


async def watch(
    probe: Object, question: Callable[[], Awaitable[Outcome]], changed: Callable[[Tally, Outcome], Awaitable[None]]
) -> None:
    """Ask at the probe's pace for ever; `changed` hears of every failure and of every new verdict."""
    tally = Tally(probe)
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while True:
        outcome = await question()
        flipped = tally.add(outcome.success)
        if flipped or not outcome.success:
            await changed(tally, outcome)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def _http(session: ClientSession, request: Object, target: ProbeTarget, timeout_s: float) -> Outcome:
    host = request.get("host") or target.host
    path = "/" + str(request.get("path", "/")).lstrip("/")
    url = f"{request.get('scheme', 'HTTP').lower()}://{host}:{_port(request['port'], target)}{path}"
    headers = {header["name"]: header["value"] for header in request.get("httpHeaders") or []}
    headers.setdefault("User-Agent", "kube-probe/llmservice")
    timeout = ClientTimeout(total=timeout_s)
    async with session.get(url, headers=headers, timeout=timeout, ssl=False, allow_redirects=False) as response:
        if 200 <= response.status < 400:
            return Outcome(True)
        return Outcome(False, f"HTTP probe failed with statuscode: {response.status}")


async def _tcp(request: Object, target: ProbeTarget, timeout_s: float) -> Outcome:
    host = request.get("host") or target.host
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host, _port(request["port"], target))
    writer.close()
    await writer.wait_closed()
    return Outcome(True)


def _port(port: int | str, target: ProbeTarget) -> int:
    if isinstance(port, int) or port.isdigit():
        return int(port)
    if port not in target.ports:
        raise OSError(f"the container has no port named {port!r}")
    return target.ports[port]
