"""What a benchmark leaves behind: its rows, its targets with their verdicts, and where they were measured."""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from llmservice_bench.report import machine

FOLDER = Path(__file__).resolve().parents[1] / "results"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and what was measured of it. `bound` reads `>= 4`, `<= 1.5`, `< 30` or `= 0`, in `unit`."""

    what: str
    bound: str
    measured: float
    unit: str = ""

    @property
    def met(self) -> bool:
        comparison, value = self.bound.split()
        return _COMPARISONS[comparison](self.measured, float(value))

    def line(self) -> str:
        """As a terminal shows it."""
        measured = f"{self.measured:,.4g} {self.unit}".rstrip()
        return f"{self.what:<88}{measured:>16}   {self.bound:<8} {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Results:
    """One benchmark's run. Each row is flat: a throughput never stands without the latencies of the same run."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Check] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What of the command line shaped the figures."""
    notes: Sequence[str] = ()
    """What the rows say, or why a target is missed: sentences for the report."""

    def write(self, folder: Path = FOLDER) -> Path:
        """Write `<name>.json`, replacing that of an earlier run, and say so on the terminal."""
        folder.mkdir(exist_ok=True)
        written = folder / f"{self.name}.json"
        replace(written, json.dumps(self.as_dict(), indent=2) + "\n")
        print(f"written: {written}")
        return written

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": machine(),
            "commit": commit(),
            "versions": versions(),
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "checks": [{**asdict(check), "met": check.met} for check in self.checks],
            "rows": [dict(row) for row in self.rows],
        }


def replace(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, and whatever ends us, finds the old one or the new one whole."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def commit() -> str | None:
    """Of the code measured, with `+` where a Python file differs from it; None outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [git, *arguments]
        return subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)  # noqa: S603 - all ours

    revision = ask("rev-parse", "--short=12", "HEAD")
    if revision.returncode:
        return None
    return revision.stdout.strip() + ("+" if ask("diff", "--quiet", "HEAD", "--", "*.py").returncode else "")


def versions() -> dict[str, str]:
    """Of the packages that figures depend on, as far as they are installed."""
    found = {}
    for package in ("llmservice", "torch", "triton", "numba", "numpy", "transformers", "llama-cpp-python"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
