"""Sends a load of requests and collects their records, with a progress bar on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from llmservice_bench.client import Target, WordRate, make_prompt, send
from llmservice_bench.record import RequestRecord
from llmservice_bench.trace import Lengths, arrival_times, draw


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send `at_s` seconds after the start of the run."""

    at_s: float
    prompt: str
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Load:
    """A load, bounded by `num_requests`, `duration_s` or the end of `arrivals`, whichever comes first."""

    lengths: Sequence[Lengths]
    rate: float = float("inf")
    burstiness: float = 1.0
    arrivals: Sequence[float] | None = None
    """Times in seconds of a trace, whose request i has `lengths[i]`; without them lengths are drawn."""
    max_concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    run: int = 0
    """Of several with the same arrivals and lengths: their prompts differ, so that no cache has those of another."""

    def __post_init__(self) -> None:
        if self.arrivals is not None:
            if self.rate != float("inf"):
                raise ValueError("a load has a rate or the arrivals of a trace, not both")
            if len(self.arrivals) != len(self.lengths):
                raise ValueError(f"{len(self.arrivals)} arrivals need as many lengths, found {len(self.lengths)}")
        elif self.num_requests is None and self.duration_s is None:
            raise ValueError("a load needs an end: give num_requests or duration_s")
        elif self.num_requests is None and self.rate == float("inf") and self.max_concurrency is None:
            raise ValueError("an infinite rate for a duration needs max_concurrency")

    @property
    def is_open(self) -> bool:
        """Whether each request has its own time to be sent."""
        return self.arrivals is not None or self.rate != float("inf")

    @property
    def total(self) -> int | None:
        """The number of requests; None if the duration bounds the load."""
        if self.duration_s is not None:
            return None
        bounds = (self.num_requests, None if self.arrivals is None else len(self.arrivals))
        return min(bound for bound in bounds if bound is not None)

    def plan(self, word_rate: WordRate) -> Iterator[PlannedRequest]:
        """The requests in order of arrival; the same seed and run give the same requests."""
        seeds = np.random.SeedSequence(self.seed).spawn(3 + self.run)
        gaps, sizes, words = map(np.random.default_rng, (seeds[0], seeds[1], seeds[-1]))
        timed: Iterable[tuple[float, Lengths]]
        if self.arrivals is not None:
            timed = zip(self.arrivals, self.lengths, strict=True)
        else:
            timed = zip(arrival_times(self.rate, self.burstiness, gaps), draw(self.lengths, sizes), strict=False)
        if self.duration_s is not None and self.is_open:
            end_s = self.duration_s
            timed = takewhile(lambda each: each[0] < end_s, timed)
        for at_s, size in islice(timed, self.num_requests):
            yield PlannedRequest(at_s, make_prompt(word_rate.words(size.prompt_tokens), words), size)


@dataclass(slots=True)
class Progress:
    """Live figures of a run."""

    sent: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    pieces: int = 0
    """Chunks of output received; a chunk may have several tokens."""
    records: list[RequestRecord] = field(default_factory=list)
    """Of the completed and failed requests, sorted by their end."""


@asynccontextmanager
async def open_session(timeout_s: float = 600.0) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit on connections, with `timeout_s` per request."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s)
    ) as session:
        yield session


async def drive(
    session: aiohttp.ClientSession,
    target: Target,
    load: Load,
    word_rate: WordRate,
    progress: Progress | None = None,
    on_record: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[RequestRecord]:
    """Send `load` to `target`; returns one record per request after the last has ended.

    Each request is sent at its planned time, independent of the responses, unless `max_concurrency` delays it. Its
    latency counts from when it is sent; the delay is in its record. `progress` is updated and `on_record` called
    during the run.
    """
    progress = Progress() if progress is None else progress
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    start = clock()

    async def one(planned: PlannedRequest) -> None:
        now = clock() - start
        late_s = now - planned.at_s if load.is_open else 0.0
        record = RequestRecord(started_s=now, prompt_tokens=planned.lengths.prompt_tokens, late_s=late_s)
        progress.in_flight += 1
        try:
            await send(session, target, planned.prompt, planned.lengths.output_tokens, record, count_piece, clock)
        finally:
            progress.in_flight -= 1
            if slots:
                slots.release()
        progress.completed += record.error is None
        progress.failed += record.error is not None
        progress.records.append(record)
        on_record(record)

    def count_piece() -> None:
        progress.pieces += 1

    async with asyncio.TaskGroup() as group:
        for planned in load.plan(word_rate):
            await sleep(max(0.0, start + planned.at_s - clock()))  # also if late, so that running requests can proceed
            if slots:
                await slots.acquire()
            if load.duration_s is not None and clock() - start >= load.duration_s:
                break
            progress.sent += 1
            group.create_task(one(planned))
    return progress.records


REDRAW_S = 0.2


@asynccontextmanager
async def progress_bar(load: Load, name: str) -> AsyncIterator[Progress]:
    """The progress for `drive`, shown on standard error until the block ends if that is a terminal."""
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
    """The progress as one line."""
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.in_flight} in flight, {progress.pieces / max(elapsed_s, REDRAW_S):,.0f} tok/s{failed}"
