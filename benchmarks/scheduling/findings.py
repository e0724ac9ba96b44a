"""The set-up (model and requests) and the findings of the parts of the scheduling benchmark."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmservice_bench.report import Report, latency_cells, latency_titles
from llmservice_bench.results import Check
from llmservice_bench.trace import Lengths
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine
from scheduling.load import Arrival, Run, arrivals_of

CONTINUOUS, DYNAMIC, STATIC = "continuous", "dynamic", "static"
"""The engine's schedulers."""
AT_ONCE = float("inf")
"""The rate at which all requests arrive at the start."""

HEADER = f"{'':<50}{'req/s':>8}{'tok/s':>8}{latency_titles()}"


@dataclass(frozen=True, slots=True)
class Setup:
    model: Path
    vocab_size: int
    lengths: list[Lengths]
    name: str = "model"
    max_num_seqs: int = 32
    kv_cache_bytes: int = 512 << 20

    def engine(self, **settings: Any) -> Engine:
        """A warmed-up engine with the defaults of `llmservice serve`, except for `settings`."""
        common = {"max_num_seqs": self.max_num_seqs, "kv_cache_memory_bytes": self.kv_cache_bytes}
        engine = load_engine(EngineConfig(model=self.model, **common | settings))
        Run(engine, self.arrivals(AT_ONCE, self.max_num_seqs, seed=99)).complete()
        return engine

    def arrivals(self, rate: float, count: int | None = None, seed: int = 0) -> list[Arrival]:
        """The same requests at every rate: one per item of `lengths`, or `count`, repeating them."""
        lengths = list(itertools.islice(itertools.cycle(self.lengths), len(self.lengths) if count is None else count))
        return arrivals_of(lengths, rate, self.vocab_size, seed)


@dataclass(slots=True)
class Findings:
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_row(self, load: str, report: Report, **more: Any) -> None:
        """Add a row and print it."""
        self.rows.append({"load": load, **report.row(), **more})
        latencies = latency_cells(self.rows[-1])
        failed = f"  {report.failed} failed" if report.failed else ""
        print(
            f"{load:<50}{report.requests_per_s:>8.1f}{report.output_tokens_per_s:>8.0f}{latencies}{failed}", flush=True
        )

    def add_check(self, what: str, bound: str, measured: float, unit: str = "") -> None:
        self.checks.append(Check(what, bound, measured, unit))

    def add_note(self, note: str) -> None:
        """Add and print a sentence for the report."""
        self.notes.append(note)
        print(note, flush=True)
