"""The summary of the demo: figures before and after scaling, decisions, and whether it succeeded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Distribution
from llmservice_local.demo.observation import Observation

NEEDED_PEAK = 3
NEEDED_FINAL = 1


@dataclass(frozen=True, slots=True)
class Phase:
    """An interval of the traffic: throughput of what was received in it, latencies of the requests sent in it."""

    name: str
    start_s: float
    end_s: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution

    @classmethod
    def of(
        cls,
        name: str,
        span: tuple[float, float],
        observations: Sequence[Observation],
        records: Iterable[RequestRecord],
    ) -> Phase:
        start_s, end_s = span
        within = [seen for seen in observations if start_s <= seen.time_s <= end_s]
        seconds = within[-1].time_s - within[0].time_s if len(within) > 1 else 0.0
        pieces, completed = (
            (within[-1].pieces - within[0].pieces, within[-1].completed - within[0].completed) if seconds else (0, 0)
        )
        sent = [record for record in records if start_s <= record.started_s < end_s and record.error is None]
        return cls(
            name=name,
            start_s=start_s,
            end_s=end_s,
            output_tokens_per_s=pieces / seconds if seconds else 0.0,
            requests_per_s=completed / seconds if seconds else 0.0,
            ttft_s=Distribution.of([record.ttft_s for record in sent]),
            itl_s=Distribution.of([gap for record in sent for gap in record.itl_s]),
            e2e_s=Distribution.of([record.e2e_s for record in sent]),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result. Replicas are those that were ready."""

    peak: int
    final: int
    failed: int
    phases: tuple[Phase, ...]
    decisions: tuple[Mapping[str, Any], ...]

    @property
    def succeeded(self) -> bool:
        return self.peak >= NEEDED_PEAK and self.final == NEEDED_FINAL and self.failed == 0

    def lines(self) -> list[str]:
        """The lines of the summary; the last ones are the three figures that decide about success."""
        return [
            *_phase_lines(self.phases),
            "",
            "What the operator decided, and why:",
            *(line for decision in self.decisions for line in _decision_lines(decision)),
            "",
            f"peak replicas:   {self.peak}{'' if self.peak >= NEEDED_PEAK else f' (at least {NEEDED_PEAK} expected)'}",
            f"final replicas:  {self.final}{'' if self.final == NEEDED_FINAL else f' ({NEEDED_FINAL} expected)'}",
            f"failed requests: {self.failed}{'' if not self.failed else ' (0 expected)'}",
        ]


def summarise(
    observations: Sequence[Observation],
    records: Sequence[RequestRecord],
    decisions: Mapping[str, Mapping[str, Any]],
    traffic_s: float,
    failed_elsewhere: int = 0,
) -> Outcome:
    """Summarise the traffic (0 to `traffic_s`) before and after scaling.

    Before: until a second replica was ready. After: from the time when the maximum of replicas was ready.
    """
    under_load = [seen for seen in observations if 0 <= seen.time_s <= traffic_s]
    peak = max((seen.ready for seen in observations), default=0)
    first_more = next((seen.time_s for seen in under_load if seen.ready > 1), traffic_s)
    at_peak = next((seen.time_s for seen in under_load if seen.ready == peak), traffic_s)
    spans = {"before scaling": (0.0, first_more), "after scaling": (at_peak, traffic_s)}
    return Outcome(
        peak=peak,
        final=observations[-1].replicas if observations else 0,
        failed=failed_elsewhere + sum(record.error is not None for record in records),
        phases=tuple(Phase.of(name, span, under_load, records) for name, span in spans.items()),
        decisions=_changes(decisions[when] for when in sorted(decisions)),
    )


def _changes(decisions: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The decisions that changed the number of replicas."""
    kept: list[Mapping[str, Any]] = []
    for decision in decisions:
        if not kept or decision["replicas"] != kept[-1]["replicas"]:
            kept.append(decision)
    return tuple(kept)


def _phase_lines(phases: Sequence[Phase]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [
        ("", [phase.name for phase in phases]),
        ("seconds of the traffic", [f"{phase.start_s:.0f}–{phase.end_s:.0f}" for phase in phases]),
        ("output throughput", [f"{phase.output_tokens_per_s:.0f} tok/s" for phase in phases]),
        ("request throughput", [f"{phase.requests_per_s:.1f} req/s" for phase in phases]),
        *(
            (f"{name} p50 / p99", [_milliseconds(getattr(phase, field)) for phase in phases])
            for name, field in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
        ),
    ]
    return [f"{title:<24}" + "".join(f"{text:>22}" for text in texts) for title, texts in rows]


def _milliseconds(values: Distribution) -> str:
    return f"{values.p50 * 1000:.0f} / {values.p99 * 1000:.0f} ms" if values.count else "–"


def _decision_lines(decision: Mapping[str, Any]) -> list[str]:
    reasons = decision.get("reasons", ())
    head = f"  {decision['time']}  {decision['replicas']} replicas"
    return [f"{head}: {reasons[0]}" if reasons else head, *(f"{'':24}{reason}" for reason in reasons[1:])]
