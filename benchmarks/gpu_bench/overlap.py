"""Overlapped scheduling: the gain in throughput, and the number of host synchronisations."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gpu_bench.bench import Bench, add, unique_prompt
from gpu_bench.kernels import KINDS
from gpu_bench.sections import Findings
from gpu_bench.throughput import drawn_requests, latencies, ours
from llmservice_bench.report import Report
from llmservice_bench.results import Check
from llmservice_server.engine.engine import Engine
from peers.workload import records

_ROUNDS = 2
_BESIDE_KV_BYTES = 22 << 30  # of each engine: weights, activations, graphs
_FIRST_STEPS = 3  # steps of a new batch that are not measured
_MAX_PREFILL_STEPS = 500  # within which every sequence must have reached decode


def host_syncs(bench: Bench) -> Findings:
    """Host synchronisations per decode step, besides the wait for the copy of the tokens."""
    engine, found, count = bench.engine(), Findings(), bench.sizes.loop_steps
    for kind, sampling in KINDS.items():
        _decode(bench, engine, bench.sizes.waiting_batch, sampling)
        waits = bench.gpu.host_waits(lambda: [engine.step() for _ in range(count)])
        _abort(engine)
        each = len(waits) / count
        found.rows.append({
            "part": "host waits", "sampling": kind, "a step": each, "where": ", ".join(sorted({*waits})),
        })  # fmt: skip
        found.checks.append(Check(f"host synchronisations a decode step, {kind}", "= 0", each))
    return found


def compare(bench: Bench) -> Findings:
    """Compare an engine with overlap and one without, measured alternately."""
    bench.clear()
    kv_bytes = bench.sizes.overlap_kv_bytes or int(bench.gpu.total_bytes * 0.9) // 2 - _BESIDE_KV_BYTES
    engines = {way: bench.start(overlap=way == "on", kv_cache_memory_bytes=kv_bytes) for way in ("on", "off")}
    found = Findings()
    for batch in bench.sizes.loop_batches:
        found.rows += _decode_loops(bench, engines, batch)
    busy = {way: _busy_share(bench, engine) for way, engine in engines.items()}
    found.rows.append({
        "part": f"GPU busy, {bench.sizes.busy_batch} decodes",
        **{f"overlap {way}": share for way, share in busy.items()},
    })  # fmt: skip
    requests, rates = drawn_requests(bench.sizes), {}
    for way, engine in engines.items():
        report = Report.of(records(requests, ours(engine, requests, bench.sizes.in_flight)))
        rates[way] = report.output_tokens_per_s
        found.rows.append({"part": f"{bench.sizes.in_flight} in flight", "overlap": way, **latencies(report)})
    ratio = rates["on"] / rates["off"]
    found.checks += [
        Check("share of a decode loop in which the GPU computes", ">= 0.95", busy["on"]),
        Check(f"output tokens/s with overlap ÷ without, {bench.sizes.in_flight} in flight", ">= 1", ratio),
    ]
    return found


def _decode_loops(bench: Bench, engines: dict[str, Engine], batch: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for _ in range(_ROUNDS):
        for way, engine in engines.items():
            _decode(bench, engine, batch, KINDS["top-p 0.95"])
            seconds[way] += _step_seconds(engine, bench.sizes.loop_steps)
            _abort(engine)
    rows = []
    for way, each in seconds.items():
        p50_s, p99_s = np.percentile(each, (50, 99)).tolist()
        rows.append({
            "part": "decode loop", "overlap": way, "sampling": "top-p 0.95", "batch": batch,
            "context": bench.sizes.context, "tokens/s": batch / float(np.mean(each)),
            "ITL p50 ms": p50_s * 1e3, "ITL p99 ms": p99_s * 1e3,
        })  # fmt: skip
    return rows


def _step_seconds(engine: Engine, count: int) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(count):
        engine.step()
        ends.append(time.perf_counter())
    return np.diff(ends).tolist()


def _busy_share(bench: Bench, engine: Engine) -> float:
    """The share of the time of decode steps in which kernels run, one after the other in one stream."""
    _decode(bench, engine, bench.sizes.busy_batch, KINDS["greedy"])
    taken: list[float] = []
    busy_s = bench.gpu.busy_s(lambda: taken.extend(_step_seconds(engine, bench.sizes.loop_steps)))
    _abort(engine)
    return busy_s / sum(taken)


def _decode(bench: Bench, engine: Engine, batch: int, sampling: dict[str, Any]) -> None:
    """Add `batch` requests and step until all of them decode. Raises RuntimeError if they do not."""
    for number in range(batch):
        prompt = unique_prompt(bench.sizes.context + number)
        add(engine, f"r{number}", prompt, 4 * (_FIRST_STEPS + bench.sizes.loop_steps), **sampling)
    for _ in range(_MAX_PREFILL_STEPS):
        engine.step()
        if len(engine.last_plan.scheduled) == batch == engine.last_plan.num_tokens:
            break
    else:
        raise RuntimeError(
            f"{batch} sequences did not all decode within {_MAX_PREFILL_STEPS} steps: the KV cache is too small"
        )
    for _ in range(_FIRST_STEPS):
        engine.step()


def _abort(engine: Engine) -> None:
    engine.abort([f"r{number}" for number in range(engine.ready.max_num_seqs)])
    while engine.has_work:
        engine.step()
