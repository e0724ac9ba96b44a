"""One part of the run: its rows and verdicts. A part that fails is told, and the next one follows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmservice_bench.results import Check


@dataclass(slots=True)
class Findings:
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.rows += other.rows
        self.checks += other.checks
        self.notes += other.notes


def run_in_turn(
    sections: dict[str, Callable[[], Findings]], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Findings:
    """All sections whose turn comes before `seconds` are over; what did not run, or failed, is in the notes."""
    found, ends = Findings(), clock() + seconds
    for name, section in sections.items():
        if clock() >= ends:
            found.notes.append(f"{name} was not run: the time was over")
            continue
        started = clock()
        try:
            found.add(section())
        except Exception as error:  # the card is lent for minutes: the rest must be measured all the same
            traceback.print_exc()
            found.notes.append(f"{name} failed: {type(error).__name__}: {error}")
            found.checks.append(Check(f"{name} ran to its end", "= 1", 0))
        print(f"{name}: {clock() - started:.0f} s", flush=True)
    return found
