"""Sending a load and collecting what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile

import aiohttp
import numpy as np

from llmservice_bench.arrivals import arrival_times
from llmservice_bench.client import Target, send
from llmservice_bench.lengths import Lengths, draw
from llmservice_bench.prompt import WordRate, make_prompt
from llmservice_bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`at_s` counts from the run's start."""

    at_s: float
    prompt: str
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. `num_requests`, `duration_s` or the end of `arrivals` bounds it: whichever comes first."""

    lengths: Sequence[Lengths]
    rate: float = float("inf")
    burstiness: float = 1.0
    arrivals: Sequence[float] | None = None
    """A trace's own times (s): request i has `lengths[i]` and leaves at `arrivals[i]`. Otherwise lengths are drawn."""
    max_concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

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
        """Has each request a time of its own at which it leaves?"""
        return self.arrivals is not None or self.rate != float("inf")

    @property
    def total(self) -> int | None:
        """How many requests there will be; None where the clock ends the load."""
        if self.duration_s is not None:
            return None
        bounds = (self.num_requests, None if self.arrivals is None else len(self.arrivals))
        return min(bound for bound in bounds if bound is not None)

    def plan(self, word_rate: WordRate) -> Iterator[PlannedRequest]:
        """The requests in order of arrival; the same seed gives the same requests."""
        gaps, sizes, words = (np.random.default_rng(seed) for seed in np.random.SeedSequence(self.seed).spawn(3))
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
    """Live figures of a run, for whoever watches."""

    sent: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    pieces: int = 0
    """Pieces of output received: tokens, but for those that the server sent together."""
    records: list[RequestRecord] = field(default_factory=list)
    """Of the requests that ended, in the order of their ends."""


@asynccontextmanager
async def open_session(timeout_s: float = 600.0) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit of its own on connections; a request may take `timeout_s` in all."""
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
    """Send `load` to `target`; returns one record a request, once the last has ended.

    Each request leaves at its planned time whatever became of those before it, unless `max_concurrency` holds it back.
    Its latency counts from when it is sent; how late that was is in its record. `progress` and `on_record` tell of the
    run while it lasts.
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
            await sleep(max(0.0, start + planned.at_s - clock()))  # also where late: those under way need their turn
            if slots:
                await slots.acquire()
            if load.duration_s is not None and clock() - start >= load.duration_s:
                break
            progress.sent += 1
            group.create_task(one(planned))
    return progress.records
