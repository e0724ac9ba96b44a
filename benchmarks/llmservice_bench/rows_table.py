"""The rows of a benchmark as a table of Markdown: whatever their columns are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

Row = Mapping[str, Any]

ACRONYMS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "kv": "KV", "http": "HTTP", "cpu": "CPU"}
UNITS = {"ms": "ms", "us": "µs", "s": "s", "mib": "MiB", "gib": "GiB", "bytes": "bytes", "share": "share"}


def rows_tables(rows: Sequence[Row]) -> str:
    """One table a run of rows with the same columns."""
    tables = [_table(list(alike)) for _, alike in groupby(rows, key=_columns)]
    return "\n\n".join(tables)


def _columns(row: Row) -> tuple[str, ...]:
    return tuple(row)


def _table(rows: Sequence[Row]) -> str:
    """Columns that are empty in every row are left out; a p50 and its p99 share a column."""
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
    told = " ".join(ACRONYMS.get(word, word) for word in (words[:-1] if unit else words))
    return f"{told}, {unit}" if unit else told


def cell(value: Any) -> str:
    """Three significant digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value)
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def figure(value: float) -> str:
    """`1,234`, `98.7`, `0.0123`."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
