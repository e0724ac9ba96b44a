"""The results of a benchmark: rows, targets, machine and versions, as JSON and as Markdown tables."""

from __future__ import annotations

import dataclasses
import json
import operator
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from llmservice_bench.report import cpu_kind, machine

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
    """One target and its measurement; `bound` is such as `>= 4`, `<= 1.5`, `< 30` or `= 0`, in `unit`."""

    what: str
    bound: str
    measured: float
    unit: str = ""

    @property
    def met(self) -> bool:
        comparison, value = self.bound.split()
        return _COMPARISONS[comparison](self.measured, float(value))

    def line(self) -> str:
        """The check as a line for a terminal."""
        measured = f"{self.measured:,.4g} {self.unit}".rstrip()
        return f"{self.what:<88}{measured:>16}   {self.bound:<8} {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one benchmark. Rows are flat; a row with a throughput also has the latencies of the same run."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Check] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The options that affect the figures."""
    notes: Sequence[str] = ()
    """Sentences for the report about the rows or missed targets."""

    def by_cpu(self) -> Results:
        """With names of this kind of CPU, so that results of another kind stay."""
        kind = cpu_kind()
        checks = [dataclasses.replace(check, what=f"{kind}, {check.what}") for check in self.checks]
        return dataclasses.replace(self, name=f"{self.name}_{kind.lower().replace('-', '')}", checks=checks)

    def write(self, folder: Path = FOLDER) -> Path:
        """Write `<name>.json`, replacing an earlier one."""
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
    """Replace a file atomically."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def commit() -> str | None:
    """The commit of the measured code, with `+` if a Python file differs from it; None outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [git, *arguments]
        return subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)  # noqa: S603 - our own command

    revision = ask("rev-parse", "--short=12", "HEAD")
    if revision.returncode:
        return None
    return revision.stdout.strip() + ("+" if ask("diff", "--quiet", "HEAD", "--", "*.py").returncode else "")


def versions() -> dict[str, str]:
    """The versions of the installed packages that affect the figures."""
    found = {}
    for package in ("llmservice", "torch", "triton", "numba", "numpy", "transformers", "llama-cpp-python"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


Row = Mapping[str, Any]

ACRONYMS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "kv": "KV", "http": "HTTP", "cpu": "CPU"}
UNITS = {"ms": "ms", "us": "µs", "s": "s", "mib": "MiB", "gib": "GiB", "bytes": "bytes", "share": "share"}


def rows_tables(rows: Sequence[Row]) -> str:
    """A Markdown table for each sequence of rows with the same columns."""
    tables = [_table(list(alike)) for _, alike in groupby(rows, key=_columns)]
    return "\n\n".join(tables)


def _columns(row: Row) -> tuple[str, ...]:
    return tuple(row)


def _table(rows: Sequence[Row]) -> str:
    """A table without columns that are empty in every row; a p50 and its p99 share a column."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    merged = {name: name.replace("_p50", "_p99") for name in names if "_p50" in name}
    merged = {p50: p99 for p50, p99 in merged.items() if p99 in names}
    columns = [name for name in names if name not in merged.values()]
    titles = [
        column_title(name.replace("_p50", "_p50 / p99")) if name in merged else column_title(name) for name in columns
    ]
    lines = [_line(titles), _line(["---" if _is_text(rows, name) else "---:" for name in columns])]
    for row in rows:
        cells = [cell(row[name]) for name in columns]
        for number, name in enumerate(columns):
            if name in merged:
                cells[number] += f" / {cell(row[merged[name]])}"
        lines.append(_line(cells))
    return "\n".join(lines)


def _is_text(rows: Sequence[Row], name: str) -> bool:
    return any(isinstance(row[name], str) for row in rows)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def column_title(name: str) -> str:
    """`ttft_p99_ms` → `TTFT p99, ms`; `output_tokens_per_s` → `output tokens/s`."""
    words = name.replace("_per_", "/").split("_")
    unit = UNITS.get(words[-1]) if len(words) > 1 else None
    title = " ".join(ACRONYMS.get(word, word) for word in (words[:-1] if unit else words))
    return f"{title}, {unit}" if unit else title


def cell(value: Any) -> str:
    """A value as the text of a cell; None is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value)
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def figure(value: float) -> str:
    """A number with three significant digits, or all before the point: `1,234`, `98.7`, `0.0123`."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
