"""What a process has said of its sections before it ended, however it ended: a line of JSON for each thing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from card.section import Findings
from llmservice_bench.results import Check


@dataclass(slots=True)
class SectionLog:
    """`begun` is the section that was begun and not ended, if any."""

    card: str | None = None
    done: dict[str, Findings] = field(default_factory=dict)
    begun: str | None = None

    @classmethod
    def read(cls, path: Path) -> SectionLog:
        """A line that was cut off as its process died says nothing."""
        log = cls()
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            match json.loads(line):
                case {"card": card}:
                    log.card = card
                case {"begun": name}:
                    log.begun = name
                case {"done": name, "rows": rows, "checks": checks, "notes": notes}:
                    log.done[name] = Findings(rows, [Check(**check) for check in checks], notes)
                    log.begun = None
        return log


class SectionWriter:
    """Writes what `SectionLog` reads, each line at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def card(self, name: str) -> None:
        self._write({"card": name})

    def begun(self, name: str) -> None:
        self._write({"begun": name})

    def done(self, name: str, findings: Findings) -> None:
        self._write({"done": name, **asdict(findings)})

    def _write(self, what: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")
