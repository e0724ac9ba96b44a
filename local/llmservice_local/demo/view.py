"""The demo's live table: updated in place on a terminal, else printed as lines."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from llmservice_local.demo.observation import Observation

COLUMNS = ("time", "phase", "replicas", "queue", "p99 TTFT", "KV use", "tokens/s", "done", "failed")
WIDTHS = (6, 14, 12, 7, 10, 8, 10, 7, 7)
ROWS_SHOWN = 16


class LiveTable:
    """A context manager that shows a row every `every_s` seconds."""

    def __init__(self, console: Console, every_s: float = 3.0) -> None:
        self._console = console
        self._every_s = every_s
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS_SHOWN)
        self._previous: Observation | None = None
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live:
            self._live.start()
        else:
            self._console.print(_line(COLUMNS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, phase: str, observation: Observation) -> None:
        """Add a row if the last one is at least `every_s` old."""
        previous = self._previous
        if previous is not None and observation.time_s - previous.time_s < self._every_s:
            return
        self._previous = observation
        row = cells(phase, observation, previous)
        self._rows.append(row)
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            self._console.print(_line(row))

    def _table(self) -> Table:
        table = Table(*COLUMNS)
        for row in self._rows:
            table.add_row(*row)
        return table


def cells(phase: str, now: Observation, previous: Observation | None) -> tuple[str, ...]:
    """The cells of a row; tokens/s is the rate since the previous row."""
    replicas = (
        f"{now.ready} ready"
        if now.ready == now.replicas == now.desired
        else f"{now.ready}/{now.replicas}→{now.desired}"
    )
    rate = (now.pieces - previous.pieces) / (now.time_s - previous.time_s) if previous is not None else 0.0
    return (
        f"{now.time_s:.0f}s",
        phase,
        replicas,
        f"{now.waiting:.0f}",
        "–" if now.ttft_p99_s is None else f"{now.ttft_p99_s * 1000:.0f} ms",
        f"{now.kv_usage:.0%}",
        f"{rate:.0f}",
        str(now.completed),
        str(now.failed),
    )


def _line(texts: tuple[str, ...]) -> str:
    return "".join(text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True)).rstrip()
