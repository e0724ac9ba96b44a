"""The measurements of one request, latency targets, and goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from llmservice_planner.traffic.lengths import percentile


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds; `started_s` counts from the run's start, the others from the request's.

    A request with an `error` failed; it is counted separately, and its latencies are in no percentile.
    """

    started_s: float
    prompt_tokens: int
    late_s: float = 0.0
    """The delay after the planned time, by the concurrency limit or a slow load generator."""
    output_tokens: int = 0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    """Gaps between consecutive chunks of output."""
    e2e_s: float = 0.0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a response of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def ended_s(self) -> float:
        return self.started_s + self.e2e_s


FORM = "NAME:MILLISECONDS, such as ttft:500 itl:80; the names are ttft, tpot, itl and e2e"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets of every request in seconds. None: no target; at least one is set.

    `tpot_s` is a request's mean time per output token after the first, `itl_s` the 99th percentile of the gaps between
    its chunks of output, and `e2e_s` what vLLM calls e2el.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> LatencyTargets:
        """From `ttft:500 itl:80`, in milliseconds, as `vllm bench serve --goodput` takes them.

        Raises:
            ValueError: a pair has another form, or a name comes twice.
        """
        targets: dict[str, float] = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            field = f"{name}_s"
            if field not in cls.__dataclass_fields__ or field in targets:
                raise ValueError(f"cannot read the target {pair!r}: expected each once, as {FORM}")
            try:
                targets[field] = float(text) / 1000
            except ValueError as error:
                raise ValueError(f"cannot read the target {pair!r}: expected {FORM}") from error
            if not 0 < targets[field] < float("inf"):
                raise ValueError(f"the target {pair!r} must be above 0 milliseconds")
        if not targets:
            raise ValueError(f"no target is given: expected {FORM}")
        return cls(**targets)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request met all targets: a failed one did not; a latency that it does not have misses none."""
        measured = (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.itl_s, percentile(sorted(record.itl_s), 0.99) if record.itl_s else None),
            (self.e2e_s, record.e2e_s),
        )
        within = (value is None or target is None or value <= target for target, value in measured)
        return record.error is None and all(within)

    def __str__(self) -> str:
        given = {name.removesuffix("_s"): value for name, value in asdict(self).items() if value is not None}
        return " ".join(f"{name}:{value * 1000:g}" for name, value in given.items())


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met all targets, not only on average."""

    targets: str
    kept: int
    share: float
    """Share of all requests, including failed ones."""
    requests_per_s: float

    @classmethod
    def of(cls, records: Iterable[RequestRecord], targets: LatencyTargets, duration_s: float) -> Goodput:
        kept = [targets.met_by(record) for record in records]
        number = sum(kept)
        per_s = number / duration_s if duration_s > 0 else 0.0
        return cls(str(targets), number, number / len(kept) if kept else 0.0, per_s)
