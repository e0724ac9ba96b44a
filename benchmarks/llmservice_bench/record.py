"""What one request showed its user."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request's life. Times are seconds; `started_s` counts from the run's start, the rest from the request's.

    A request failed when `error` says why; its latencies are then in no percentile, and it is counted apart.
    """

    started_s: float
    prompt_tokens: int
    late_s: float = 0.0
    """Sent so much later than planned: a concurrency cap held it back, or this machine is too slow to send in time."""
    output_tokens: int = 0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    """Gaps between one piece of output and the next."""
    e2e_s: float = 0.0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def ended_s(self) -> float:
        return self.started_s + self.e2e_s
