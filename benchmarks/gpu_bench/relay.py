"""Runs sections in worker processes: after a crash or a hang, a new process runs the remaining sections.

An illegal memory access makes all later calls of a process fail, and a kernel may never end; the other sections must
run nevertheless. This module does not import torch, so that only the worker uses the GPU.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_bench.sections import Findings, SectionLog

_TOO_SHORT_S = 20.0  # for a process to start and measure anything
_POLL_S = 0.5

Watch = Callable[[SectionLog], None]
"""Called repeatedly with the log of a running process."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The log of one process, and how it ended."""

    log: SectionLog
    end: str


@dataclass(frozen=True, slots=True)
class Worker:
    """Starts worker processes: `command --log FILE --seconds S NAME …`.

    A worker ends when its standard input is closed, and so with this process.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def __call__(self, names: Sequence[str], seconds: float, watch: Watch) -> Attempt:
        """Run sections in one process, which is killed after `seconds`."""
        self.log.write_text("")
        command = [*self.command, "--log", str(self.log), "--seconds", f"{seconds:.1f}", *names]
        ends_s = time.monotonic() + seconds
        with subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE) as process:  # noqa: S603 - all ours
            while True:
                try:
                    status = process.wait(_POLL_S)
                    end = f"its process ended with status {status}"
                    break
                except subprocess.TimeoutExpired:
                    watch(SectionLog.read(self.log))
                if time.monotonic() >= ends_s:
                    process.kill()
                    end = "the time limit was reached while it ran"
                    break
        return Attempt(SectionLog.read(self.log), end)


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run, which is complete when no section is `left`."""

    gpu: str | None
    found: dict[str, Findings]
    """By section."""
    left: tuple[str, ...]


def relay(
    names: Sequence[str],
    attempt: Callable[[Sequence[str], float, Watch], Attempt],
    seconds: float,
    on_progress: Callable[[State], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> State:
    """Run all sections in as many processes as necessary; calls `on_progress` after each section.

    A section that crashed or was not started in time becomes a missed check and a note.
    """
    found: dict[str, Findings] = {}
    gpu, left, ends = None, list(names), clock() + seconds
    num_done = 0

    def watch(log: SectionLog) -> None:
        nonlocal num_done
        if len(log.done) == num_done:
            return
        num_done = len(log.done)
        rest = tuple(name for name in left if name not in log.done)
        on_progress(State(log.gpu, found | log.done, rest))

    while left:
        if ends - clock() < _TOO_SHORT_S:
            found |= {name: Findings.of_lack_of_time(name) for name in left}
            break
        num_done = 0
        tried = attempt(left, ends - clock(), watch)
        gpu = gpu or tried.log.gpu
        found |= tried.log.done
        lost = tried.log.begun
        if lost is not None:
            found[lost] = Findings.of_failure(lost, tried.end)
        elif not tried.log.done:
            found["the run"] = Findings.of_failure("the run", f"{tried.end} before it started a section")
            break
        left = [name for name in left if name not in tried.log.done and name != lost]
    return State(gpu, found, ())
