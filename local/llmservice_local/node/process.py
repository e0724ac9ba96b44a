"""Processes that cannot outlive us: each runs under a shim that kills its whole tree when our end of a pipe closes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHIM = Path(__file__).with_name("shim.py")


class Process:
    """A running command with everything that it starts; `start` begins it."""

    def __init__(self, shim: asyncio.subprocess.Process) -> None:
        self._shim = shim

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        cpu_limit: float = 0.0,
    ) -> Process:
        """Start a command in a session of its own, its output appended to `log`.

        `cpu_limit` is a number of cores, 0 for no limit. The executable is looked up in the PATH of `env`.
        """
        with log.open("ab") as output:
            shim = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_SHIM), f"{cpu_limit:g}", *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        return cls(shim)

    @property
    def running(self) -> bool:
        return self._shim.returncode is None

    @property
    def shim_pid(self) -> int:
        return self._shim.pid

    async def wait(self) -> int:
        """The command's exit status; 128 plus the signal's number where a signal ended it."""
        status = await self._shim.wait()
        if self._shim.stdin is not None:
            self._shim.stdin.close()
        return status if status >= 0 else 128 - status

    def terminate(self) -> None:
        """Ask the command to end: SIGTERM to it alone, as a container runtime does."""
        self._order(b"T")

    def kill(self) -> None:
        """Kill the command and everything that it started."""
        self._order(b"K")

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, kill it where it has not after `grace_s` seconds; returns the exit status."""
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):  # not wait_for: in 3.11 that may swallow a cancellation
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _order(self, order: bytes) -> None:
        stdin = self._shim.stdin
        if self.running and stdin is not None and not stdin.is_closing():
            stdin.write(order)
