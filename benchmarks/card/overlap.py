"""Steps that are planned while another is computed: what that gains, and that the host never waits for the card."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from card.engine import CONTEXT, add, any_prompt, start
from card.sampling import KINDS
from card.section import Findings
from card.throughput import IN_FLIGHT, drawn_asks, latencies, ours
from llmservice_bench.report import Report
from llmservice_bench.results import Check
from llmservice_server.engine.engine import Engine
from peers.workload import records

_BATCHES = (8, 64, 256)
_ROUNDS, _STEPS = 2, 30
_BESIDE_KV_BYTES = 22 << 30  # of each engine: weights, activations, graphs


def host_syncs(folder: Path) -> Findings:
    """How often a decode step keeps the host waiting, but for the event behind the one copy of the tokens."""
    engine = start(folder)
    found = Findings()
    for kind, sampling in KINDS.items():
        _decode(engine, 32, sampling)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(_STEPS):
                    engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _abort(engine)
        waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
        places = sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits})
        each = len(waits) / _STEPS
        found.rows.append({"part": "host waits", "sampling": kind, "a step": each, "where": ", ".join(places)})
        found.checks.append(Check(f"host synchronisations a decode step, {kind}", "= 0", each))
    return found


def compare(folder: Path) -> Findings:
    """Two engines side by side, one with overlap and one without, that take turns."""
    kv_bytes = int(torch.cuda.mem_get_info()[1] * 0.9) // 2 - _BESIDE_KV_BYTES
    engines = {way: start(folder, overlap=way == "on", kv_cache_memory_bytes=kv_bytes) for way in ("on", "off")}
    found = Findings()
    for kind in ("greedy", "top-p 0.95"):
        for batch in _BATCHES:
            found.rows += _paces(engines, batch, kind)
    busy = {way: _busy_share(engine) for way, engine in engines.items()}
    found.rows.append({"part": "card busy, 64 decodes", **{f"overlap {way}": share for way, share in busy.items()}})
    asks, rates = drawn_asks(), {}
    for way, engine in engines.items():
        report = Report.of(records(asks, ours(engine, asks)))
        rates[way] = report.output_tokens_per_s
        found.rows.append({"part": f"{IN_FLIGHT} in flight", "overlap": way, **latencies(report)})
    found.checks += [
        Check("share of a decode loop in which the card computes, 64 decodes", ">= 0.95", busy["on"]),
        Check("output tokens/s with overlap ÷ without, 256 in flight", ">= 1", rates["on"] / rates["off"]),
    ]
    return found


def _paces(engines: dict[str, Engine], batch: int, kind: str) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for _ in range(_ROUNDS):
        for way, engine in engines.items():
            _decode(engine, batch, KINDS[kind])
            seconds[way] += _step_seconds(engine)
            _abort(engine)
    rows = []
    for way, each in seconds.items():
        p50_s, p99_s = np.percentile(each, (50, 99)).tolist()
        rows.append({
            "part": "decode loop", "overlap": way, "sampling": kind, "batch": batch, "context": CONTEXT,
            "tokens/s": batch / float(np.mean(each)), "ITL p50 ms": p50_s * 1e3, "ITL p99 ms": p99_s * 1e3,
        })  # fmt: skip
    return rows


def _step_seconds(engine: Engine) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    return np.diff(ends).tolist()


def _busy_share(engine: Engine) -> float:
    """Of the time that decode steps take, what the card's kernels take. They run in one stream: none beside another."""
    _decode(engine, 64, KINDS["greedy"])
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        started_s = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
        taken_s = time.perf_counter() - started_s
    _abort(engine)
    return float(sum(entry.self_device_time_total for entry in watched.key_averages())) * 1e-6 / taken_s


def _decode(engine: Engine, batch: int, sampling: dict[str, Any]) -> None:
    """Bring that many sequences to where they decode."""
    for number in range(batch):
        add(engine, f"r{number}", any_prompt(CONTEXT + number), 4 * _STEPS, **sampling)
    while len(engine.last_plan.scheduled) < batch or engine.last_plan.num_tokens > batch:
        engine.step()
    for _ in range(3):
        engine.step()


def _abort(engine: Engine) -> None:
    engine.abort([f"r{number}" for number in range(max(_BATCHES))])
    while engine.has_work:
        engine.step()
