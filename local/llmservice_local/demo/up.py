"""The demo's cluster: a process of `llmservice up`."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
from collections import deque
from pathlib import Path
from types import TracebackType

from llmservice_planner.command import CommandError

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
KUBECONFIG_LINE = re.compile(r"export KUBECONFIG=(\S+)")
GATEWAY_LINE = re.compile(r"gateway\S*\s.*?(http://[\w.:\[\]]+)", re.IGNORECASE)


class UpProcess:
    """A context manager that runs `llmservice up` and ends it with every process that it started."""

    def __init__(self, log: Path, flags: tuple[str, ...]) -> None:
        self._log = log
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=12)
        self._announced = asyncio.Event()
        self.kubeconfig = ""
        self.gateway_url = ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> UpProcess:
        """Start it and wait for its API and gateway.

        Raises:
            CommandError: it ended or timed out; contains its last lines.
        """
        self._process = await asyncio.create_subprocess_exec(
            *command("up", *self._flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C does not reach it: it gets one SIGINT at the end
            limit=2**20,
        )
        self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._announced.wait()
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise CommandError(
                    f"llmservice up did not start within {READY_TIMEOUT_S:g} s:\n{self._tail()}"
                ) from error
            raise
        if not self.gateway_url:
            await self.__aexit__(None, None, None)
            raise CommandError(f"llmservice up ended:\n{self._tail()}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reading is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._reading

    async def _read(self) -> None:
        """Write its output to the log, and parse the kubeconfig and the gateway's URL from it."""
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("llmservice up was not started")
        with self._log.open("w", encoding="utf-8") as log:
            async for raw in self._process.stdout:
                line = raw.decode(errors="replace").rstrip()
                print(line, file=log, flush=True)
                self._last_lines.append(line)
                if found := KUBECONFIG_LINE.search(line):
                    self.kubeconfig = found[1]
                elif found := GATEWAY_LINE.search(line):
                    self.gateway_url = found[1]
                if self.kubeconfig and self.gateway_url:
                    self._announced.set()
        self._announced.set()

    def _tail(self) -> str:
        return "\n".join(self._last_lines) + f"\n(all of it: {self._log})"


def command(*arguments: str) -> tuple[str, ...]:
    """A command line with the `llmservice` of this Python environment."""
    beside = Path(sys.executable).with_name("llmservice")
    return (str(beside) if beside.exists() else shutil.which("llmservice") or "llmservice", *arguments)


async def run_command(*arguments: str) -> None:
    """Run a subcommand with its output on the terminal.

    Raises:
        CommandError: it failed.
    """
    process = await asyncio.create_subprocess_exec(*command(*arguments))
    if status := await process.wait():
        raise CommandError(f"llmservice {arguments[0]} ended with status {status}", status=1)
