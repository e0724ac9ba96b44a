"""Open-loop traffic in the background of a test: every request is counted, none is retried."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmservice_bench.client import Target, send
from llmservice_bench.drive import open_session
from llmservice_bench.record import RequestRecord

PROMPT = "the quick brown fox jumps over the lazy dog and runs away"
MAX_IN_FLIGHT = 80
"""Past it the load stops growing: a queue long enough to scale on, short enough to be served soon by two slow cores."""


@dataclass
class Traffic:
    """`records` holds the requests that ended."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def failures(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]


@contextmanager
def traffic(url: str, model: str, rate: float, output_tokens: int) -> Iterator[Traffic]:
    """Poisson arrivals at `rate` requests a second until the block is left; then every request sent is awaited."""
    running = Traffic()
    thread = threading.Thread(target=lambda: asyncio.run(_drive(Target(url, model), rate, output_tokens, running)))
    thread.daemon = True
    thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        thread.join(timeout=120)
    assert not thread.is_alive(), f"{running.in_flight} requests are still unanswered"


async def _drive(target: Target, rate: float, output_tokens: int, running: Traffic) -> None:
    gaps = random.Random(0)  # noqa: S311 - arrivals, not secrets
    async with open_session(timeout_s=110) as session, asyncio.TaskGroup() as group:

        async def one() -> None:
            record = RequestRecord(started_s=0.0, prompt_tokens=0)
            running.in_flight += 1
            await send(session, target, PROMPT, output_tokens, record, on_piece=lambda: None)
            running.in_flight -= 1
            running.records.append(record)

        while not running.stop.is_set():
            await asyncio.sleep(gaps.expovariate(rate))
            if running.in_flight < MAX_IN_FLIGHT:
                group.create_task(one())
