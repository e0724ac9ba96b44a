"""The sections of a run, their findings, and the log from which the findings of a dead process are read."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from llmservice_bench.results import Check


@dataclass(slots=True)
class Findings:
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ran: bool = True
    """False: there was no time for the section."""

    def add(self, other: Findings) -> None:
        self.rows += other.rows
        self.checks += other.checks
        self.notes += other.notes

    @classmethod
    def of_failure(cls, name: str, what: str) -> Self:
        """The findings of a section that failed."""
        return cls(checks=[Check(f"{name} completed", "= 1", 0)], notes=[f"{name} failed: {what}"])

    @classmethod
    def of_lack_of_time(cls, name: str) -> Self:
        return cls(
            checks=[Check(f"{name} was started in time", "= 1", 0)],
            notes=[f"{name} was not run: no time was left"],
            ran=False,
        )


def run_in_turn(
    sections: Mapping[str, Callable[[], Findings]],
    expected_s: Mapping[str, float],
    seconds: float,
    begin: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Findings]]:
    """Run sections in order; yields each name with its findings, also those of failures.

    A section that is expected to exceed the rest of `seconds` is skipped; a shorter one after it is not.
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
        except Exception as error:  # the other sections must run nevertheless
            traceback.print_exc()
            found = Findings.of_failure(name, f"{type(error).__name__}: {error}")
        found.rows.append({"part": "time", "section": name, "s": clock() - started, "expected s": expected_s[name]})
        yield name, found


@dataclass(slots=True)
class SectionLog:
    """The sections that a process completed, and the one that it had started (`begun`), from a file of JSON lines."""

    gpu: str | None = None
    done: dict[str, Findings] = field(default_factory=dict)
    begun: str | None = None

    @classmethod
    def read(cls, path: Path) -> SectionLog:
        """Read a log; an incomplete last line is ignored."""
        log = cls()
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            match json.loads(line):
                case {"gpu": gpu}:
                    log.gpu = gpu
                case {"begun": name}:
                    log.begun = name
                case {"done": name, "rows": rows, "checks": checks, "notes": notes, "ran": ran}:
                    log.done[name] = Findings(rows, [Check(**check) for check in checks], notes, ran)
                    log.begun = None
        return log


class SectionWriter:
    """Writes the file of a `SectionLog` line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def gpu(self, name: str) -> None:
        self._write({"gpu": name})

    def begun(self, name: str) -> None:
        self._write({"begun": name})

    def done(self, name: str, findings: Findings) -> None:
        self._write({"done": name, **asdict(findings)})

    def _write(self, what: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


SECTIONS: dict[str, int] = {
    "ceilings": 1,
    "checkpoint": 10,
    "start": 35,
    "steps": 10,
    "host_syncs": 5,
    "throughput": 20,
    "transformers": 60,
    "kernels": 5,
    "quantized": 25,
    "experts": 8,
    "attention_race": 6,
    "sampling": 5,
    "swapping": 5,
    "agreement": 65,
    "families": 110,
    "formats": 90,
    "by_transformers": 30,
    "with_adapters": 30,
    "out_of_memory": 25,
    "overlap": 105,
}
"""The sections in the order of their importance, with the expected seconds, as measured on an H200 (with_adapters:
as by_transformers). A section is skipped if less time is left."""
MODELS = ("families", "formats", "by_transformers", "with_adapters")
"""Those of `make bench-gpu-models`: the other run would be too long with them."""
GRACE_S = 60
"""A section that exceeds its expected time by this counts as hung: its process prints a traceback and exits."""
