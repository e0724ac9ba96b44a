"""Sending a load and collecting what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
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
    """What to send. Exactly one of `num_requests` and `duration_s` bounds it (both: whichever comes first)."""

    lengths: list[Lengths]
    rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("a load needs an end: give num_requests or duration_s")
        if self.num_requests is None and self.rate == float("inf") and self.max_concurrency is None:
            raise ValueError("an infinite rate for a duration needs max_concurrency")

    def plan(self, word_rate: WordRate) -> Iterator[PlannedRequest]:
        """The requests in order of arrival; the same seed gives the same requests."""
        arrivals, sizes, words = (np.random.default_rng(seed) for seed in np.random.SeedSequence(self.seed).spawn(3))
        times: Iterable[float] = arrival_times(self.rate, self.burstiness, arrivals)
        if self.duration_s is not None and self.rate != float("inf"):
            end_s = self.duration_s
            times = takewhile(lambda at_s: at_s < end_s, times)
        for at_s, size in islice(zip(times, draw(self.lengths, sizes), strict=False), self.num_requests):
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
        late_s = now - planned.at_s if load.rate != float("inf") else 0.0
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
