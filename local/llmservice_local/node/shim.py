"""Runs one command and controls its process tree; a standalone script that needs only the standard library.

    python -I -S shim.py CPU_LIMIT COMMAND [ARGUMENT …]

The parent process writes to its standard input: `T` sends SIGTERM to the command, `K` kills its whole process tree, as
does the end of the file, which also occurs when the parent ends for any reason. The shim is the subreaper of its
descendants, so that orphaned processes remain in the tree. It exits with the command's exit status, or 128 plus the
number of the signal that ended it.

CPU_LIMIT is a number of cores, 0 for no limit. The limit works like the kernel's CFS bandwidth control: a quota per
period of 100 ms; the tree is stopped when it has used its quota and continues in the next period, whose quota is
reduced by the time used in excess.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

PERIOD_S = 0.1
TREE_REFRESH_S = 1.0
MIN_CHECK_S = 0.002
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCHED_CLOCK = 2  # the kernel's CPUCLOCK_SCHED: the process's CPU time in nanoseconds


class Throttle:
    """Limits a process tree to a number of cores."""

    def __init__(self, cores: float, now: float) -> None:
        self.cores = cores
        self.stopped = False
        self._budget_s = cores * PERIOD_S
        self._period_end = now + PERIOD_S
        self._refresh_at = now
        self._used: dict[int, float] = {}

    def step(self, now: float) -> float:
        """Account for the CPU time used, stop or continue the tree; returns the seconds until the next step."""
        if now >= self._refresh_at:
            self._refresh_at = now + TREE_REFRESH_S
            self._refresh()
        self._budget_s -= self._consumed()
        quota_s = self.cores * PERIOD_S
        while now >= self._period_end:
            self._period_end += PERIOD_S
            self._budget_s = min(quota_s, self._budget_s + quota_s)
        if self._budget_s <= 0 and not self.stopped:
            self._signal(signal.SIGSTOP)
            self.stopped = True
        elif self._budget_s > 0 and self.stopped:
            self._signal(signal.SIGCONT)
            self.stopped = False
        until_period_s = self._period_end - now
        if self.stopped:
            return until_period_s
        return max(MIN_CHECK_S, min(until_period_s, self._budget_s / (os.cpu_count() or 1)))

    def _refresh(self) -> None:
        known = self._used
        self._used = {pid: known.get(pid, 0.0) for pid in descendants(os.getpid())}
        if self.stopped:
            for pid in self._used.keys() - known.keys():
                _kill(pid, signal.SIGSTOP)

    def _consumed(self) -> float:
        consumed_s = 0.0
        for pid, before in list(self._used.items()):
            try:
                used_s = time.clock_gettime((~pid << 3) | _SCHED_CLOCK)
            except OSError:
                del self._used[pid]
                continue
            consumed_s += used_s - before
            self._used[pid] = used_s
        return consumed_s

    def _signal(self, number: int) -> None:
        for pid in self._used:
            _kill(pid, number)


def descendants(root: int) -> list[int]:
    """The pids of all running descendants of `root`, without zombies, from /proc."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in _processes():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_tree() -> None:
    """Kill and reap every descendant; repeated, as a process may fork while it is being killed."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            _kill(pid, signal.SIGKILL)
        time.sleep(MIN_CHECK_S)
        _reap()


def main(arguments: list[str]) -> int:
    cpu_limit, command = float(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the child has replaced the handlers of the shim
    child = os.fork()
    if child == 0:
        _run(libc, command)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    throttle = Throttle(cpu_limit, time.monotonic()) if cpu_limit > 0 else None
    timeout: float | None = None
    while True:
        if throttle is not None:
            timeout = throttle.step(time.monotonic())
        ready, _, _ = select.select([0, reader], [], [], timeout)
        order = os.read(0, 64) if 0 in ready else None
        signals = os.read(reader, 64) if reader in ready else b""
        if order is not None and b"T" in order:
            _kill(child, signal.SIGTERM)
        if order == b"" or (order is not None and b"K" in order) or signal.SIGTERM in signals:
            kill_tree()
            return 128 + signal.SIGKILL
        status = _reap().get(child)
        if status is not None:
            kill_tree()
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _run(libc: ctypes.CDLL, command: list[str]) -> None:
    """In the child: start a new session, close standard input, and end with the shim."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)  # noqa: S606 - running a given command is what this is for
    except OSError as error:
        os.write(2, f"exec {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent, state) of every process."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would make this a third slower, and it runs each second
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123 - likewise
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(entry), int(fields[1]), fields[0]


def _reap() -> dict[int, int]:
    """Reap the children that have ended; returns their wait statuses."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = status


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
