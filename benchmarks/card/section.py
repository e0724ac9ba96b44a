"""One part of the run: its rows and verdicts. A part that fails is told, and the next one follows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

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

    @classmethod
    def joined(cls, parts: Iterable[Findings]) -> Self:
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    @classmethod
    def of_failure(cls, name: str, what: str) -> Self:
        """Of a section that did not come to its end."""
        return cls(checks=[Check(f"{name} ran to its end", "= 1", 0)], notes=[f"{name} failed: {what}"])

    @classmethod
    def of_lack_of_time(cls, name: str) -> Self:
        return cls(checks=[Check(f"{name} was begun in time", "= 1", 0)], notes=[f"{name} was not run: time was over"])


def run_in_turn(
    sections: Mapping[str, Callable[[], Findings]],
    expected_s: Mapping[str, float],
    seconds: float,
    begin: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Findings]]:
    """Each section's findings under its name; what failed says so.

    One that is expected to take longer than is left of `seconds` is not begun; a shorter one behind it is.
    """
    ends = clock() + seconds
    for name, section in sections.items():
        if clock() + expected_s[name] > ends:
            yield name, Findings.of_lack_of_time(name)
            continue
        started = clock()
        begin(name)
        try:
            found = section()
        except Exception as error:  # the card is lent for minutes: the rest must be measured all the same
            traceback.print_exc()
            found = Findings.of_failure(name, f"{type(error).__name__}: {error}")
        found.rows.append({"part": "time", "section": name, "s": clock() - started, "expected s": expected_s[name]})
        yield name, found
