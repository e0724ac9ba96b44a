"""One request of a simulation: what the trace says of it, and what became of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmservice_planner.traffic.traces import HASH_TOKENS, TraceRequest

Outcome = Literal["finished", "refused", "failed", "timed_out"]
"""refused: every queue was full, or it is longer than a request may be. failed: its replica was lost."""
OWN = 1 << 63
"""Marks hashes of prompts that share nothing, so that no `hash_ids` are equal to them."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Times are seconds of the simulation. It may be sent to several replicas; latencies count from `arrival_s`."""

    number: int
    """In the order of arrival."""
    trace: TraceRequest
    arrival_s: float
    output_tokens: int
    """Of its answer; the scheduler does not know it."""
    is_measured: bool = True
    """Whether it arrives after the warm-up."""
    attempts: int = 0
    lost: int = 0
    """Replicas that were lost while it was there."""
    client_retries: int = 0
    is_counted: bool = False
    """As an arrival, by one of the replicas that it was offered to."""
    outcome: Outcome | None = None
    reason: str = ""
    """Why it did not finish."""
    first_scheduled_s: float | None = None
    """When a replica began to compute its prompt."""
    first_token_s: float | None = None
    last_token_s: float = math.nan
    num_tokens: int = 0
    """That the client has received."""
    late_gaps: int = 0
    """Times between two tokens that were longer than the target."""
    ended_s: float = math.nan

    @classmethod
    def of(cls, number: int, trace: TraceRequest, max_tokens: int) -> SimulatedRequest:
        """An answer ends where prompt and answer reach `max_tokens`, or at the client's limit."""
        most = min(max_tokens - trace.prompt_tokens, trace.max_tokens or max_tokens)
        return cls(number, trace, trace.arrival_s, max(1, min(trace.output_tokens, most)))

    @property
    def prompt_tokens(self) -> int:
        return self.trace.prompt_tokens

    @property
    def wait_s(self) -> float | None:
        """From its arrival, held in the gateway or not, until it was first scheduled."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def keeps_itl(self) -> bool:
        """Whether the 99th percentile (nearest rank) of its times between tokens is within the target."""
        gaps = self.num_tokens - 1
        return self.late_gaps <= gaps - math.ceil(0.99 * gaps)

    def end(self, outcome: Outcome, now: float, reason: str = "") -> None:
        """Raises ValueError for a request that has ended."""
        if self.outcome is not None:
            raise ValueError(f"request {self.number} has {self.outcome} already, and cannot end as {outcome}")
        self.outcome, self.ended_s, self.reason = outcome, now, reason


def block_hashes(request: TraceRequest, number: int, block_size: int) -> bytes:
    """Of the full blocks of its prompt, as `hash_blocks` would return them: equal where two prompts begin alike.

    A trace's hash id stands for its tokens and all before them, as a block's hash does. A prompt without any is like no
    other. Answers are like no prompt, so that a conversation's next request finds its prompts in the cache, and not the
    answers between them.
    """
    count = request.prompt_tokens // block_size
    hashes = np.empty((count, 2), "<u8")
    if not request.hash_ids:
        hashes[:, 0], hashes[:, 1] = number | OWN, np.arange(count)
        return hashes.tobytes()
    first_tokens = np.arange(count) * block_size
    chunk = np.minimum(first_tokens // HASH_TOKENS, len(request.hash_ids) - 1)
    hashes[:, 0] = np.array(request.hash_ids, "<u8")[chunk]
    hashes[:, 1] = first_tokens - chunk * HASH_TOKENS
    return hashes.tobytes()
