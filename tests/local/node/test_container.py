"""Containers that are stopped while a process is being started, as after a crash, or a probe runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession

from llmservice_local.node.container import Container, ContainerHost, Launch
from llmservice_local.node.logs import PodLogs

POD = {"metadata": {"namespace": "default", "name": "pod", "uid": "1"}}


async def report(kind: str, reason: str, message: str) -> None:
    pass


def make_container(
    tmp_path: Path,
    session: ClientSession,
    prepared: Callable[[], None],
    launch: Launch | None = None,
    grace_s: float = 30.0,
) -> Container:
    def prepare(_: object) -> Launch:
        prepared()
        return launch or Launch(["sleep", "60"], dict(os.environ))

    logs = PodLogs(tmp_path, POD)
    host = ContainerHost("127.0.0.1", "pod", logs, session, prepare, lambda: None, report, grace_s)
    return Container({"name": "main"}, host, "Always" if launch is None else "Never", 0.0)


def command_line(pid: int) -> bytes:
    """Empty where the process has ended, also as a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_process_that_is_being_started_ends_too(tmp_path: Path, end: str) -> None:
    starting = asyncio.Event()
    async with ClientSession() as session:
        container = make_container(tmp_path, session, starting.set)
        running = asyncio.create_task(container.run())
        await starting.wait()
        assert container.exit_code is None
        assert "waiting" in container.state
        async with asyncio.timeout(20):
            if end == "stop":
                await container.stop(grace_s=10)
            else:
                container.kill()
            await running
    assert container.exit_code == (143 if end == "stop" else 137)


async def test_the_command_of_a_probe_and_what_it_started_end_with_its_container(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with ClientSession() as session, asyncio.timeout(20):
        container = make_container(tmp_path, session, lambda: None)
        container.spec["livenessProbe"] = {
            "exec": {"command": ["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"]},
            "timeoutSeconds": 600,
        }
        running = asyncio.create_task(container.run())
        while not (pid.exists() and pid.read_text()):
            await asyncio.sleep(0.01)
        container.kill()
        await running
        while command_line(int(pid.read_text())):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        (Launch(["sleep", "1"], dict(os.environ), Path("/no/such/folder")), "No such file or directory"),
        (Launch(["sleep", "1\0"], dict(os.environ)), "embedded null byte"),
    ],
)
async def test_a_process_that_cannot_be_started_is_an_error_of_its_start(
    tmp_path: Path, launch: Launch, why: str
) -> None:
    async with ClientSession() as session, asyncio.timeout(20):
        container = make_container(tmp_path, session, lambda: None, launch)
        await container.run()
    ended = container.state["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert why in ended["message"]


async def test_a_container_that_fails_its_liveness_probe_ends_as_its_pod_would(tmp_path: Path) -> None:
    """The hook runs first, and the pod's grace period bounds both."""
    hook, started = tmp_path / "hook", tmp_path / "started"
    script = f"trap '' TERM; touch {started}; while ! test -e {hook}; do sleep 0.02; done; sleep 60"
    async with ClientSession() as session, asyncio.timeout(20):
        container = make_container(
            tmp_path, session, lambda: None, Launch(["sh", "-c", script], dict(os.environ)), grace_s=1.0
        )
        container.spec["lifecycle"] = {"preStop": {"exec": {"command": ["touch", str(hook)]}}}
        probe = {"exec": {"command": ["test", "!", "-e", str(started)]}, "periodSeconds": 0.02, "failureThreshold": 1}
        container.spec["livenessProbe"] = probe
        await container.run()
    assert hook.exists()
    assert container.exit_code == 137
