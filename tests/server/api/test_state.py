"""How many sequences must wait, from figures of which one is a step old."""

from __future__ import annotations

import pytest

from llmservice_server.api.state import num_queued
from llmservice_server.messages import Stats


def _stats(running: int, waiting: int) -> Stats:
    return Stats(
        num_running=running,
        num_waiting={"interactive": waiting},
        blocks_free=0,
        blocks_held=0,
        blocks_cached=0,
        preemptions={},
        prefix_queries=0,
        prefix_hits=0,
        batch_size=running,
        iteration_tokens=running,
    )


@pytest.mark.parametrize(
    ("in_flight", "stats", "queued"),
    [
        (0, None, 0),
        (8, None, 0),
        (9, None, 1),  # before the first step: as many run as may
        (8, _stats(0, 0), 0),  # a burst between two steps
        (20, _stats(3, 0), 12),
        (20, _stats(8, 12), 12),
        (20, _stats(5, 15), 15),  # the KV cache holds five
        (25, _stats(5, 15), 20),
        (3, _stats(8, 2), 0),  # most have just finished
    ],
)
def test_those_beyond_what_the_engine_can_run_are_queued(in_flight: int, stats: Stats | None, queued: int) -> None:
    assert num_queued(in_flight, 8, stats) == queued
