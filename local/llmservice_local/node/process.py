"""Local processes: each runs under a shim that kills its whole process tree when this process ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_INHERITED = (
    "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS",
)  # fmt: skip
_SHIM = Path(__file__).with_name("shim.py")


class Process:
    """A running command with its descendants; `start` creates it."""

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
        """Start a command in a new session, with its output appended to `log`.

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
        """Send SIGTERM to the command alone, as a container runtime does."""
        self._order(b"T")

    def kill(self) -> None:
        """Kill the command and its descendants."""
        self._order(b"K")

    async def stop(self, grace_s: float) -> int:
        """Terminate the command, kill it after `grace_s` seconds; returns the exit status."""
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):  # not wait_for, which may swallow a cancellation in Python 3.11
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _order(self, order: bytes) -> None:
        stdin = self._shim.stdin
        if self.running and stdin is not None and not stdin.is_closing():
            stdin.write(order)


def base_environment() -> dict[str, str]:
    """The environment of every process: a few inherited variables, and a PATH with this interpreter's folder first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # Pods have a cache of their own each: compiled kernels are kept where servers outside of the cluster keep them.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kernels = os.environ.get("NUMBA_CACHE_DIR") or str(caches / "llmservice" / "numba")
    return {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1", "NUMBA_CACHE_DIR": kernels}


FIRST_S = 10.0
LONGEST_S = 300.0
RESET_AFTER_S = 600.0


class BackOff:
    """Kubelet's exponential back-off: no delay, then 10 s, 20 s … 5 minutes; reset after a run of 10 minutes."""

    def __init__(self, first_s: float = FIRST_S) -> None:
        self._first_s = first_s
        self._delay_s = 0.0

    def next_delay(self, ran_s: float) -> float:
        """The delay before the restart of a process that ran for `ran_s` seconds."""
        if ran_s >= RESET_AFTER_S:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._delay_s = min(LONGEST_S, max(self._first_s, 2 * self._delay_s))
        return delay_s
