"""Real processes under the real shim."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llmservice_local.node.process import BackOff, Process

PYTHON = sys.executable
ESCAPE = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
)


async def start(log: Path, *command: str, cpu_limit: float = 0.0) -> Process:
    return await Process.start(command, env=os.environ, log=log, cpu_limit=cpu_limit)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def until_logged(log: Path, lines: int = 1) -> list[str]:
    async with asyncio.timeout(20):
        while len(found := lines_of(log)) < lines:
            await asyncio.sleep(0.02)
    return found


def lines_of(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (("sh", "-c", "echo out; echo err >&2; exit 3"), 3, "out\nerr\n"),
        (("sh", "-c", "kill -KILL $$"), 137, ""),
        (("no-such-command",), 127, "exec no-such-command: No such file or directory\n"),
    ],
)
async def test_exit_status_and_output_are_the_commands(
    tmp_path: Path, command: tuple[str, ...], status: int, said: str
) -> None:
    log = tmp_path / "log"
    process = await start(log, *command)
    assert await process.wait() == status
    assert log.read_text(encoding="utf-8") == said


async def test_stop_sends_a_sigterm_that_the_command_can_handle(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await start(log, "sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    await until_logged(log)
    assert await process.stop(10) == 0
    assert log.read_text(encoding="utf-8") == "up\nbye\n"


async def test_command_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await start(log, "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    await until_logged(log)
    assert await process.stop(0.2) == 137


async def test_orphan_in_a_session_of_its_own_ends_with_the_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await start(log, PYTHON, "-c", ESCAPE + "else:\n    time.sleep(0.5)\n")
    (pid,) = await until_logged(log)
    assert alive(int(pid))
    assert await process.wait() == 0
    assert not alive(int(pid))


async def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    holder = f"""
import asyncio, os
from pathlib import Path
from llmservice_local.node.process import Process
async def main():
    await Process.start(["sh", "-c", "echo $$; sleep 60 & echo $!; wait"], env=os.environ, log=Path({str(log)!r}))
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(PYTHON, "-c", holder)
    log.touch()
    pids = [int(line) for line in await until_logged(log, 2)]
    assert all(alive(pid) for pid in pids)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(10):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def test_limited_command_still_ends_when_asked_while_it_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await start(log, PYTHON, "-c", "print('up', flush=True)\nwhile True: pass", cpu_limit=0.05)
    await until_logged(log)
    assert await process.stop(10) == 143


def test_waits_double_up_to_five_minutes() -> None:
    backoff = BackOff()
    assert [backoff.next_delay(1) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_a_run_of_ten_minutes_resets_the_delay() -> None:
    backoff = BackOff(1.0)
    waits = [backoff.next_delay(ran_s) for ran_s in (1, 1, 1, 600, 1)]
    assert waits == [0, 1, 2, 0, 1]
