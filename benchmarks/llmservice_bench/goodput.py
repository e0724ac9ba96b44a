"""Goodput: what was served as promised. A request counts when it kept every promise, not when the average did."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from llmservice_bench.record import RequestRecord

FORM = "NAME:MILLISECONDS, such as ttft:500 itl:80; the names are ttft, tpot, itl and e2e"


@dataclass(frozen=True, slots=True)
class Promises:
    """Latencies promised to every request, in seconds; None is not promised. At least one is.

    `tpot_s` is a request's mean time per output token after the first, `itl_s` the 99th percentile of the gaps between
    its own pieces of output, and `e2e_s` what vLLM calls e2el.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Promises:
        """From `ttft:500 itl:80`, in milliseconds, as `vllm bench serve --goodput` takes them.

        Raises:
            ValueError: a pair has another form, or a name comes twice.
        """
        promised: dict[str, float] = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            field = f"{name}_s"
            if field not in cls.__dataclass_fields__ or field in promised:
                raise ValueError(f"cannot read the promise {pair!r}: expected each once, as {FORM}")
            try:
                promised[field] = float(text) / 1000
            except ValueError as error:
                raise ValueError(f"cannot read the promise {pair!r}: expected {FORM}") from error
            if not 0 < promised[field] < float("inf"):
                raise ValueError(f"the promise {pair!r} must be above 0 milliseconds")
        if not promised:
            raise ValueError(f"nothing is promised: expected {FORM}")
        return cls(**promised)

    def kept_by(self, record: RequestRecord) -> bool:
        """A failed request kept nothing. A latency that an answer is too short to have breaks no promise."""
        measured = (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.itl_s, _p99(record.itl_s) if record.itl_s else None),
            (self.e2e_s, record.e2e_s),
        )
        within = (value is None or promise is None or value <= promise for promise, value in measured)
        return record.error is None and all(within)

    def __str__(self) -> str:
        given = {name.removesuffix("_s"): value for name, value in asdict(self).items() if value is not None}
        return " ".join(f"{name}:{value * 1000:g}" for name, value in given.items())


def _p99(values: Sequence[float]) -> float:
    """By nearest rank: the largest of up to a hundred."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many of the requests sent kept all promises."""

    promises: str
    kept: int
    share: float
    """Of all requests, those that failed included."""
    requests_per_s: float

    @classmethod
    def of(cls, records: Iterable[RequestRecord], promises: Promises, duration_s: float) -> Goodput:
        kept = [promises.kept_by(record) for record in records]
        number = sum(kept)
        per_s = number / duration_s if duration_s > 0 else 0.0
        return cls(str(promises), number, number / len(kept) if kept else 0.0, per_s)
