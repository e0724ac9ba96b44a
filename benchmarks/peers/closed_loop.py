"""Users who wait for their answer before they ask again, in front of anything that is driven step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from peers.workload import Answer, Ask, Job


class StepServer(Protocol):
    """An engine that the caller drives."""

    def add(self, index: int, ask: Ask) -> None:
        """Take a request; it gets exactly `ask.output_tokens` tokens."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Compute once; returns (index, token) of everybody who got a token."""


class OwnedServer(StepServer, Protocol):
    """One that ends with its peer."""

    def close(self) -> None:
        """Give back its memory and threads."""


class SteppedPeer:
    """A peer that is driven step by step, warmed up."""

    def __init__(self, server: OwnedServer, job: Job) -> None:
        self._server = server
        self._in_flight = job.in_flight
        self.serve(job.warm_up())

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        return closed_loop(self._server, asks, self._in_flight)

    def close(self) -> None:
        self._server.close()


def closed_loop(server: StepServer, asks: Sequence[Ask], in_flight: int) -> list[Answer]:
    """One answer an ask, in their order."""
    coming = iter(enumerate(asks))
    answers: dict[int, Answer] = {}
    running = 0

    def send() -> int:
        following = next(coming, None)
        if following is None:
            return 0
        index, ask = following
        answers[index] = Answer(time.perf_counter())
        server.add(index, ask)
        return 1

    for _ in range(in_flight):
        running += send()
    while running:
        tokens = server.step()
        now = time.perf_counter()
        for index, token_id in tokens:
            answers[index].take(token_id, now)
            if len(answers[index].token_ids) == asks[index].output_tokens:
                running += send() - 1
    return [answers[index] for index in range(len(asks))]
