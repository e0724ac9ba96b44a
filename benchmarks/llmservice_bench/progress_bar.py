"""A run as its user watches it: a bar on the terminal, nothing where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from llmservice_bench.drive import Load, Progress

REDRAW_S = 0.2


@asynccontextmanager
async def progress_bar(load: Load, name: str) -> AsyncIterator[Progress]:
    """The progress to hand to `drive`, drawn on standard error while the block lasts, and wiped after it."""
    progress, console = Progress(), Console(stderr=True)
    if not console.is_terminal:
        yield progress
        return
    text = TextColumn("{task.fields[figures]}", style="dim")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=load.total, figures="")

        async def draw() -> None:
            while True:
                await asyncio.sleep(REDRAW_S)
                ended, elapsed_s = progress.completed + progress.failed, bar.tasks[task].elapsed or 0.0
                bar.update(task, completed=ended, figures=figures(progress, elapsed_s), refresh=True)

        drawing = asyncio.create_task(draw())
        try:
            yield progress
        finally:
            drawing.cancel()


def figures(progress: Progress, elapsed_s: float) -> str:
    """What is under way, in one line."""
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.in_flight} in flight, {progress.pieces / max(elapsed_s, REDRAW_S):,.0f} tok/s{failed}"
