"""`llmservice up` as a user runs it: a process of its own, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession

from llmservice_local.node.shim import descendants
from llmservice_planner.command import main

pytestmark = pytest.mark.slow

POD = """
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: x, command: [sh, -c, "sleep 300 & sleep 300"]}]
"""


def _words(pid: int) -> list[bytes]:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return []


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmservice_planner", "up", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


async def announced(process: asyncio.subprocess.Process) -> str:
    """What it prints up to the line that ends its announcement."""
    assert process.stdout is not None
    said = ""
    async with asyncio.timeout(60):
        while "Ctrl-C ends it" not in said:
            line = await process.stdout.readline()
            assert line, said
            said += line.decode()
    return said


async def until_ended(pids: list[int]) -> None:
    async with asyncio.timeout(15):
        while any(_alive(pid) for pid in pids):
            await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "pod.yaml"
    path.write_text(POD, encoding="utf-8")
    return path


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
async def test_everything_ends_with_the_command_however_it_ends(
    tmp_path: Path, manifest: Path, number: int, status: int
) -> None:
    process = await start("--state-dir", str(tmp_path / "state"), "-f", str(manifest))
    said = await announced(process)
    assert "pod/p applied" in said
    below: list[int] = []
    async with asyncio.timeout(30):
        while len(below) < 7:  # operator, gateway and the pod's two sleeps, and the three shims above them
            below = descendants(process.pid)
            await asyncio.sleep(0.05)
    process.send_signal(number)
    async with asyncio.timeout(20):
        await process.communicate()
    assert process.returncode == status
    await until_ended(below)


async def test_operator_that_is_killed_comes_back_and_the_gateway_answers(tmp_path: Path) -> None:
    process = await start("--state-dir", str(tmp_path / "state"))
    try:
        said = await announced(process)
        gateway = re.search(r"gateway\s+(\S+)", said)
        assert gateway is not None
        async with ClientSession() as session, session.get(f"{gateway[1]}/models") as response:
            assert (await response.json())["data"] == []
        operator = _operator_below(process.pid)
        os.kill(operator, signal.SIGKILL)
        async with asyncio.timeout(30):
            while _operator_below(process.pid) in {0, operator}:
                await asyncio.sleep(0.05)
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


async def test_interrupt_ends_a_cluster_that_is_still_starting(tmp_path: Path) -> None:
    prometheus = tmp_path / "prometheus"
    prometheus.write_text("#!/bin/sh\nexec sleep 300\n", encoding="utf-8")  # it never becomes healthy
    prometheus.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmservice_planner", "up", "--state-dir", str(tmp_path / "state"), "--prometheus",
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    below: list[int] = []
    async with asyncio.timeout(40):
        while not any(b"300" in _words(pid) for pid in below):
            below = descendants(process.pid)
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        said, _ = await process.communicate()
    assert (process.returncode, said.decode()) == (0, "stopping every process of the cluster\n")
    await until_ended(below)


async def test_state_folder_of_a_running_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--state-dir", str(tmp_path), "--no-operator", "--no-gateway")
    process = await start(*flags)
    try:
        await announced(process)
        assert main(["up", *flags]) == 2
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert f"--state-dir {tmp_path} is in use by another llmservice up: end that one" in capsys.readouterr().err


def _operator_below(root: int) -> int:
    """The pid of the operator itself, not of the shim above it; 0 while there is none."""
    for pid in descendants(root):
        if _words(pid)[1:4] == [b"-m", b"llmservice_planner", b"operator"]:
            return pid
    return 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cpu", "many"), "--cpu: 'many' is not a quantity"),
        (("--nodes", "0"), "--nodes is 0, expected 1 to 16"),
        (("--gpu-product", "h9000"), "--gpu-product: GPU 'h9000' is not in the catalogue"),
        (("--models-root", "/no/such/folder"), "--models-root /no/such/folder does not exist"),
        (("-f", "/no/such/file"), "-f /no/such/file does not exist"),
        (("--node-label", "novalue"), "--node-label 'novalue': expected KEY=VALUE"),
        (("--state-dir", "/proc/state"), "--state-dir /proc/state: [Errno 2] No such file or directory"),
        (("--state-dir", sys.executable), f"--state-dir {sys.executable}: [Errno 17] File exists"),
    ],
)
def test_invalid_flag_is_refused_before_anything_starts(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *flags]) == 2
    assert message in capsys.readouterr().err


def refuse(manifest: Path) -> None:
    manifest.write_text(POD.replace("name: p}", "name: P_}"), encoding="utf-8")


async def test_manifest_that_is_refused_ends_it_with_the_reason(tmp_path: Path, manifest: Path) -> None:
    refuse(manifest)
    process = await start("--no-operator", "--no-gateway", "-f", str(manifest))
    output, _ = await process.communicate()
    assert process.returncode == 1
    assert 'Pod "P_" is invalid: metadata.name' in output.decode()


@pytest.mark.parametrize("flags", [("--no-gateway", "--api-port"), ("--gateway-port",)])
async def test_port_that_is_taken_is_named(flags: tuple[str, ...]) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        process = await start("--no-operator", *flags, str(port))
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert str(port) in output.decode()
    assert "address already in use" in output.decode()
