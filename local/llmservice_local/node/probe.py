"""Startup, liveness and readiness probes of a container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout

from llmservice_local.objects import Object


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one probe."""

    success: bool
    message: str = ""


@dataclass(slots=True)
class Tally:
    """The verdict over a series of results, by `failureThreshold` and `successThreshold`."""

    probe: Object
    verdict: bool | None = None
    _streak: int = 0
    _last: bool | None = None

    def add(self, success: bool) -> bool:
        """Count a result; returns whether the verdict has changed."""
        self._streak = self._streak + 1 if success == self._last else 1
        self._last = success
        needed = self.probe.get("successThreshold", 1) if success else self.probe.get("failureThreshold", 3)
        if self._streak < needed or self.verdict == success:
            return False
        self.verdict = success
        return True


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The target of a probe: the pod's address, the named ports, and how to run a command in the container."""

    host: str
    ports: Mapping[str, int]
    execute: Callable[[list[str], float], Awaitable[Outcome]]


async def ask(session: ClientSession, probe: Object, target: ProbeTarget) -> Outcome:
    """Probe once, within `timeoutSeconds`."""
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
    """Probe every `periodSeconds` until cancelled; `changed` is called after a failure or a change of the verdict."""
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
