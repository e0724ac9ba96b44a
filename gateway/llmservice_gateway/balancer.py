"""Which of a model's ready pods gets the next request: the one with the least in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmservice_gateway.routes import Backend

FAILURE_PENALTY_S = 2.0
"""A pod that just refused a connection is asked last for so long: it has nothing in flight, so it would otherwise be
picked first by every request until the cluster notices that it is gone."""


@dataclass(slots=True)
class _Load:
    in_flight: int = 0
    last_turn: int = 0
    failed_at: float = float("-inf")


class Balancer:
    """Least in flight first; ties go to the pod that was picked longest ago, which is round-robin among equals."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._turn = 0

    def pick(self, backends: Sequence[Backend], tried: Collection[str], now: float) -> Backend | None:
        """The pod to ask next, or None when all were `tried` (uids). `now` is any monotonic clock, in seconds."""
        candidates = [backend for backend in backends if backend.uid not in tried]
        if not candidates:
            return None

        def order(backend: Backend) -> tuple[bool, int, int]:
            load = self._loads.get(backend.uid) or _Load()
            return now - load.failed_at < FAILURE_PENALTY_S, load.in_flight, load.last_turn

        return min(candidates, key=order)

    @contextmanager
    def hold(self, backend: Backend) -> Iterator[None]:
        """Count one request in flight on `backend` while the block runs."""
        load = self._loads.setdefault(backend.uid, _Load())
        self._turn += 1
        load.last_turn = self._turn
        load.in_flight += 1
        try:
            yield
        finally:
            load.in_flight -= 1

    def mark_failed(self, backend: Backend, now: float) -> None:
        """`backend` did not take a connection."""
        self._loads.setdefault(backend.uid, _Load()).failed_at = now

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Drop the figures of pods that left the table, once nothing is in flight on them."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.in_flight or uid in uids}

    def in_flight(self, backend: Backend) -> int:
        return self._loads[backend.uid].in_flight if backend.uid in self._loads else 0
