"""One container of a pod as a local process: its runs, its probes, its restarts, its status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession

from llmservice_local.node import probe
from llmservice_local.node.container_spec import ConfigError, cpu_limit
from llmservice_local.node.logs import PodLogs, termination_message
from llmservice_local.node.process import BackOff, Process
from llmservice_local.objects import Object, timestamp

CONFIG_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line, environment and working directory of a container."""

    command: list[str]
    env: dict[str, str]
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class ContainerHost:
    """The pod and node of a container, as far as the container uses them."""

    pod_ip: str
    pod_name: str
    logs: PodLogs
    session: ClientSession
    prepare: Callable[[Object], Launch]
    """Returns how to start a container of this spec; raises `ConfigError`."""
    changed: Callable[[], None]
    """Called whenever the status has changed."""
    report: Callable[[str, str, str], Awaitable[None]]
    """Posts an Event (type, reason, message) about the pod."""
    grace_s: float = 30.0
    """The pod's grace period, which a container has too that fails a probe."""


class Container:
    """Runs and restarts one container. `run` returns when it was stopped or is not restarted any more."""

    def __init__(self, spec: Object, host: ContainerHost, restart_policy: str, backoff_s: float) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Object = {}
        self.restarts = 0
        self.started = False
        self.ready = False
        self._host = host
        self._policy = restart_policy
        self._backoff = BackOff(backoff_s)
        self._process: Process | None = None
        self._launch: Launch | None = None
        self._starting = asyncio.Lock()
        """Held while a process is being started, which a stop has to end too."""
        self._stopping = asyncio.Event()
        self._killed = False
        self._startup = asyncio.Event()
        self._log: Path | None = None
        self._previous_log: Path | None = None

    @property
    def exit_code(self) -> int | None:
        code: int | None = (self.state.get("terminated") or {}).get("exitCode")
        return code

    def log_path(self, *, previous: bool = False) -> Path | None:
        """The log of the last run, or (`previous`) of the run before it; None if there is no such run."""
        if previous and "waiting" not in self.state:
            return self._previous_log
        return self._log

    def status(self) -> Object:
        """The `containerStatuses` entry."""
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }

    async def run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once()
            if code is None:
                continue  # it could not be started, and `_run_once` has waited
            if self._stopping.is_set() or not self._restarts(code):
                return
            delay_s = self._backoff.next_delay(time.monotonic() - began)
            self.last_state = self.state
            if delay_s:
                message = f"back-off {delay_s:.0f}s restarting failed container={self.name} pod={self._host.pod_name}"
                self._set({"waiting": {"reason": "CrashLoopBackOff", "message": message}})
                await self._host.report("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
                if await self._stopped_within(delay_s):
                    return
            self.restarts += 1

    async def stop(self, grace_s: float) -> None:
        """Run the preStop hook, send SIGTERM, and kill the remaining processes after `grace_s` seconds."""
        self._stopping.set()
        async with self._starting:
            process = self._process
        if process is not None and process.running:
            await self._end(process, grace_s, f"Stopping container {self.name}")

    def kill(self) -> None:
        self._stopping.set()
        self._killed = True
        if self._process is not None:
            self._process.kill()

    async def execute(self, command: list[str], timeout_s: float) -> probe.Outcome:
        """Run a command in the container's environment, as exec probes and hooks do."""
        env = self._launch.env if self._launch is not None else {}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return probe.Outcome(False, f"command {command[0]!r} cannot be run: {error.strerror}")
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            return probe.Outcome(False, f"command timed out after {timeout_s:g} s")
        finally:  # also where the container ends meanwhile
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                await process.wait()
        return probe.Outcome(code == 0, f"command exited with {code}" if code else "")

    # -- one run ----------------------------------------------------------------------------------------------------

    async def _run_once(self) -> int | None:
        """Start the process and wait for its exit code; None if its configuration is not valid yet."""
        try:
            launch = self._host.prepare(self.spec)
        except ConfigError as error:
            if (self.state.get("waiting") or {}).get("message") != str(error):
                self._set({"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
                await self._host.report("Warning", "Failed", f"Error: {error}")
            await self._stopped_within(CONFIG_RETRY_S)
            return None
        self._launch = launch
        started_at = timestamp()
        if shutil.which(launch.command[0], path=launch.env.get("PATH", os.defpath)) is None:
            return await self._not_started(
                started_at, f"exec: {launch.command[0]!r}: executable file not found in $PATH"
            )
        log = self._host.logs.path(self.name, self.restarts)
        self._log, self._previous_log = log, self._log
        try:
            async with self._starting:
                self._process = process = await Process.start(
                    launch.command, env=launch.env, log=log, cwd=launch.cwd, cpu_limit=cpu_limit(self.spec)
                )
        except (OSError, ValueError) as error:  # such as a workingDir that is not there, or a null in an argument
            return await self._not_started(started_at, f"exec: {launch.command[0]!r}: {error}")
        if self._killed:  # while it started
            process.kill()
        self._startup.clear()
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        self._set({"running": {"startedAt": started_at}})
        await self._host.report("Normal", "Started", f"Started container {self.name}")
        watching = asyncio.create_task(self._probe())
        code = await process.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self.started = self.ready = False
        fallback = self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code != 0
        message = termination_message(log) if fallback else ""
        self._terminated(code, started_at, "Completed" if code == 0 else "Error", message)
        return code

    async def _not_started(self, started_at: str, message: str) -> int:
        self._terminated(128, started_at, "StartError", message)
        await self._host.report("Warning", "Failed", f"Error: {message}")
        return 128

    async def _probe(self) -> None:
        target = probe.ProbeTarget(self._host.pod_ip, self._ports(), self.execute)
        if (startup := self.spec.get("startupProbe")) is not None:
            watching = asyncio.create_task(self._watch("Startup", startup, target))
            try:
                await self._startup.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        if "readinessProbe" not in self.spec:
            self.ready = True
            self._host.changed()
        async with asyncio.TaskGroup() as group:
            for kind in ("Readiness", "Liveness"):
                if (declared := self.spec.get(f"{kind.lower()}Probe")) is not None:
                    group.create_task(self._watch(kind, declared, target))

    async def _watch(self, kind: str, declared: Object, target: probe.ProbeTarget) -> None:
        async def question() -> probe.Outcome:
            return await probe.ask(self._host.session, declared, target)

        async def changed(tally: probe.Tally, outcome: probe.Outcome) -> None:
            if not outcome.success:
                await self._host.report("Warning", "Unhealthy", f"{kind} probe failed: {outcome.message}")
            if kind == "Readiness":
                self.ready = bool(tally.verdict)
            elif kind == "Startup" and tally.verdict:
                self.started = True
                self._startup.set()
            elif tally.verdict is False and not self._stopping.is_set():
                await self._restart(kind, declared)
            self._host.changed()

        await probe.watch(declared, question, changed)

    async def _restart(self, kind: str, declared: Object) -> None:
        if self._process is not None:
            grace_s = float(declared.get("terminationGracePeriodSeconds", self._host.grace_s))
            message = f"Container {self.name} failed {kind.lower()} probe, will be restarted"
            await self._end(self._process, grace_s, message)

    async def _end(self, process: Process, grace_s: float, message: str) -> None:
        deadline = time.monotonic() + grace_s
        await self._host.report("Normal", "Killing", message)
        await self._pre_stop(process, grace_s)
        await process.stop(max(0.0, deadline - time.monotonic()))

    async def _pre_stop(self, process: Process, grace_s: float) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop") or {}
        if "sleep" in hook:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(float(hook["sleep"]["seconds"]), grace_s)):
                    await process.wait()
        elif "exec" in hook:
            await self.execute(hook["exec"]["command"], grace_s)
        elif "httpGet" in hook:
            target = probe.ProbeTarget(self._host.pod_ip, self._ports(), self.execute)
            question = {"httpGet": hook["httpGet"], "timeoutSeconds": grace_s}
            await probe.ask(self._host.session, question, target)

    def _ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports") or [] if port.get("name")}

    def _restarts(self, code: int) -> bool:
        return self._policy == "Always" or (self._policy == "OnFailure" and code != 0)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _terminated(self, code: int, started_at: str, reason: str, message: str) -> None:
        terminated: Object = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started_at,
            "finishedAt": timestamp(),
        }
        if message:
            terminated["message"] = message
        self._set({"terminated": terminated})

    def _set(self, state: Object) -> None:
        self.state = state
        self._host.changed()
