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
_LAST_BEGIN_S = 15.0  # so long before a process is ended it begins nothing more


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one process has done, and how it ended, as a phrase."""

    log: SectionLog
    end: str


@dataclass(frozen=True, slots=True)
class Worker:
    """Starts processes that run sections: `command`, `--log FILE`, `--seconds S` to begin them in, and their names."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path

    def __call__(self, names: Sequence[str], seconds: float) -> Attempt:
        """Ends the process when `seconds` are over."""
        self.log.write_text("")
        begins_s = max(0.0, seconds - _LAST_BEGIN_S)
        command = [*self.command, "--log", str(self.log), "--seconds", f"{begins_s:.1f}", *names]
        try:
            status = subprocess.run(command, env=self.environment, timeout=seconds, check=False).returncode  # noqa: S603 - all ours
            end = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            end = "the time was over while it ran"
        return Attempt(SectionLog.read(self.log), end)


def relay(
    names: Sequence[str],
    attempt: Callable[[Sequence[str], float], Attempt],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Findings, str | None]:
    """All sections, in as many attempts as it takes, and the card's name, where a process came to tell it.

    What was lost, and what the time did not do for, is a missed check and a note each.
    """
    found, card, left, ends = Findings(), None, list(names), clock() + seconds
    while left:
        if ends - clock() < _TOO_SHORT_S:
            for name in left:
                found.add(Findings.of_lack_of_time(name))
            break
        tried = attempt(left, ends - clock())
        card = card or tried.log.card
        for findings in tried.log.done.values():
            found.add(findings)
        lost = tried.log.begun
        if lost is not None:
            found.add(Findings.of_failure(lost, tried.end))
        elif not tried.log.done:
            found.add(Findings.of_failure("the run", f"{tried.end} before it began a section"))
            break
        left = [name for name in left if name not in tried.log.done and name != lost]
    return found, card
