"""The report of a run: throughput, latencies and failures."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmservice_bench.record import Goodput, LatencyTargets, RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds. All 0 where nothing was measured (`count` 0)."""

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls(0, 0.0, 0.0, 0.0)
        p50, p99 = np.percentile(values, (50, 99))
        return cls(len(values), float(np.mean(values)), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a set of requests. Latencies are of completed requests; failures are counted by reason."""

    duration_s: float
    """From the first request's start to the last one's end."""
    completed: int
    failed: int
    failures: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    """Over all gaps of all requests."""
    e2e_s: Distribution
    late_s: Distribution
    """The delay of sending; above a few ms, the concurrency limit or the load generator affected the load."""
    goodput: Goodput | None = None
    """None without targets."""

    @classmethod
    def of(cls, records: Iterable[RequestRecord], targets: LatencyTargets | None = None) -> Report:
        records = list(records)
        good = [record for record in records if record.error is None]
        failures = Counter(record.error for record in records if record.error is not None)
        duration_s = max((r.ended_s for r in records), default=0.0) - min((r.started_s for r in records), default=0.0)
        prompt_tokens = sum(record.prompt_tokens for record in good)
        output_tokens = sum(record.output_tokens for record in good)

        def per_second(count: int) -> float:
            return count / duration_s if duration_s > 0 else 0.0

        return cls(
            duration_s=duration_s,
            completed=len(good),
            failed=len(records) - len(good),
            failures=dict(failures.most_common()),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            requests_per_s=per_second(len(good)),
            output_tokens_per_s=per_second(output_tokens),
            total_tokens_per_s=per_second(prompt_tokens + output_tokens),
            ttft_s=Distribution.of([record.ttft_s for record in good]),
            tpot_s=Distribution.of([record.tpot_s for record in good if record.tpot_s is not None]),
            itl_s=Distribution.of([gap for record in good for gap in record.itl_s]),
            e2e_s=Distribution.of([record.e2e_s for record in good]),
            late_s=Distribution.of([record.late_s for record in records]),
            goodput=Goodput.of(records, targets, duration_s) if targets else None,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "machine": machine()}

    def row(self) -> dict[str, float | int]:
        """The report as a flat row of a results file, with latencies in milliseconds."""
        latencies = {"ttft": self.ttft_s, "itl": self.itl_s, "e2e": self.e2e_s}
        return {
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            **{f"{name}_p50_ms": values.p50 * 1000 for name, values in latencies.items()},
            **{f"{name}_p99_ms": values.p99 * 1000 for name, values in latencies.items()},
            "completed": self.completed,
            "failed": self.failed,
        }

    def lines(self) -> list[str]:
        """The report as lines for a terminal."""
        lines = [
            f"{'requests completed':<28}{self.completed:>12}",
            f"{'requests failed':<28}{self.failed:>12}{_reasons(self.failures)}",
            f"{'duration':<28}{self.duration_s:>12.2f} s",
            f"{'request throughput':<28}{self.requests_per_s:>12.2f} req/s",
            f"{'output throughput':<28}{self.output_tokens_per_s:>12.1f} tok/s",
            f"{'total throughput':<28}{self.total_tokens_per_s:>12.1f} tok/s",
            f"{'latency (ms)':<16}{'mean':>12}{'p50':>12}{'p99':>12}",
        ]
        for name, values in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("ITL", self.itl_s), ("E2E", self.e2e_s)):
            measured = (values.mean, values.p50, values.p99)
            figures = (f"{value * 1000:>12.2f}" if values.count else f"{'-':>12}" for value in measured)
            lines.append(f"{name:<16}{''.join(figures)}")
        if self.goodput:
            good = self.goodput
            lines.append(f"{'goodput':<28}{good.requests_per_s:>12.2f} req/s, {good.share:.1%} met {good.targets} (ms)")
        if self.late_s.p99 > 0.01:
            lines.append(
                f"sent late: p99 {self.late_s.p99 * 1000:.0f} ms, by the concurrency limit or the load of this machine"
            )
        return lines


LATENCIES = ("ttft", "itl", "e2e")
"""Of a row, as `Report.row` has them."""


def latency_titles(width: int = 20) -> str:
    """The head of columns of `latency_cells`."""
    return "".join(f"{f'{name.upper()} p50/p99 ms':>{width}}" for name in LATENCIES)


def latency_cells(row: Mapping[str, Any], width: int = 20) -> str:
    if not row["completed"]:
        return f"{'-':>{width}}" * len(LATENCIES)
    pairs = [(row[f"{name}_p50_ms"], row[f"{name}_p99_ms"]) for name in LATENCIES]
    return "".join(f"{f'{p50:.1f} / {p99:.1f}':>{width}}" for p50, p99 in pairs)


def _reasons(failures: dict[str, int]) -> str:
    return "  (" + ", ".join(f"{count} × {reason}" for reason, count in failures.items()) + ")" if failures else ""


AVX2_ONLY = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""The environment of a process that shall use no wider instructions than a CPU without AVX-512 has."""


def machine() -> dict[str, Any]:
    """The machine that sent the load."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }


_KINDS = {"amx_tile": "AMX", "avx512_bf16": "AVX-512", "avx512f": "AVX-512", "avx2": "AVX2"}


def cpu_kind() -> str:
    """By the widest vector instructions in use: AMX, AVX-512, AVX2 or other."""
    return _KINDS.get(_instructions() or "", "other")


def _instructions() -> str | None:
    """As /proc/cpuinfo names them; None where they are not known."""
    flags = _cpu_info().get("flags", "").split()
    if AVX2_ONLY.items() <= os.environ.items():
        flags = ["avx2"]
    return next((each for each in _KINDS if each in flags), None)


def _processor() -> str:
    """The processor's model and its vector instructions on Linux, else the architecture."""
    widest = _instructions()
    return _cpu_info().get("model name", platform.machine()) + (f" with {widest}" if widest else "")


def _cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
