"""Sections run in a process of their own. Where it dies or hangs, the next process does what is left.

An illegal access makes every later call of its process fail, and a kernel may never end: neither may cost the sections
that come after it. This side imports no torch, so that nothing but the sections' process is on the card.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from card.section import Findings
from card.section_log import SectionLog

_TOO_SHORT_S = 20.0  # for a process to start and measure anything
_LOOK_S = 0.5

Watch = Callable[[SectionLog], None]
"""Is shown what a process has done so far, again and again."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one process has done, and how it ended, as a phrase."""

    log: SectionLog
    end: str


@dataclass(frozen=True, slots=True)
class Worker:
    """Starts processes that run sections: `command`, `--log FILE`, `--seconds S` to end in, and their names.

    Each ends when its standard input does, and so with this process, however that ends.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def __call__(self, names: Sequence[str], seconds: float, watch: Watch) -> Attempt:
        """Ends the process when `seconds` are over."""
        self.log.write_text("")
        command = [*self.command, "--log", str(self.log), "--seconds", f"{seconds:.1f}", *names]
        ends_s = time.monotonic() + seconds
        with subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE) as process:  # noqa: S603 - all ours
            while True:
                try:
                    status = process.wait(_LOOK_S)
                    end = f"its process ended with status {status}"
                    break
                except subprocess.TimeoutExpired:
                    watch(SectionLog.read(self.log))
                if time.monotonic() >= ends_s:
                    process.kill()
                    end = "the time was over while it ran"
                    break
        return Attempt(SectionLog.read(self.log), end)


@dataclass(frozen=True, slots=True)
class State:
    """Of a run that goes on, or has ended where nothing is `left`."""

    card: str | None
    found: Findings
    left: tuple[str, ...]


def relay(
    names: Sequence[str],
    attempt: Callable[[Sequence[str], float, Watch], Attempt],
    seconds: float,
    told: Callable[[State], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> State:
    """All sections, in as many attempts as it takes. What there is so far is `told` after each section.

    What was lost, and what the time did not do for, is a missed check and a note each.
    """
    found, card, left, ends = Findings(), None, list(names), clock() + seconds
    num_done = 0

    def watch(log: SectionLog) -> None:
        nonlocal num_done
        if len(log.done) == num_done:
            return
        num_done = len(log.done)
        rest = tuple(name for name in left if name not in log.done)
        told(State(log.card, Findings.joined([found, *log.done.values()]), rest))

    while left:
        if ends - clock() < _TOO_SHORT_S:
            found = Findings.joined([found, *map(Findings.of_lack_of_time, left)])
            break
        num_done = 0
        tried = attempt(left, ends - clock(), watch)
        card = card or tried.log.card
        found, lost = Findings.joined([found, *tried.log.done.values()]), tried.log.begun
        if lost is not None:
            found.add(Findings.of_failure(lost, tried.end))
        elif not tried.log.done:
            found.add(Findings.of_failure("the run", f"{tried.end} before it began a section"))
            break
        left = [name for name in left if name not in tried.log.done and name != lost]
    return State(card, found, ())
