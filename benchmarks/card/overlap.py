"""Steps that are planned while another is computed: what that gains, and that the host never waits for the card."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from card.sampling import KINDS
from card.section import Findings
from card.stand import Stand, add, any_prompt
from card.throughput import drawn_asks, latencies, ours
from llmservice_bench.report import Report
from llmservice_bench.results import Check
from llmservice_server.engine.engine import Engine
from peers.workload import records

_ROUNDS = 2
_BESIDE_KV_BYTES = 22 << 30  # of each engine: weights, activations, graphs
_FIRST_STEPS = 3  # of a batch that has just begun to decode
_PATIENCE = 500  # steps in which any batch must have come to decode


def host_syncs(stand: Stand) -> Findings:
    """How often a decode step keeps the host waiting, but for the event behind the one copy of the tokens."""
    engine, found, count = stand.engine(), Findings(), stand.sizes.loop_steps
    for kind, sampling in KINDS.items():
        _decode(stand, engine, stand.sizes.waiting_batch, sampling)
        waits = stand.card.host_waits(lambda: [engine.step() for _ in range(count)])
        _abort(engine)
        each = len(waits) / count
        found.rows.append({
            "part": "host waits", "sampling": kind, "a step": each, "where": ", ".join(sorted({*waits})),
        })  # fmt: skip
        found.checks.append(Check(f"host synchronisations a decode step, {kind}", "= 0", each))
    return found


def compare(stand: Stand) -> Findings:
    """Two engines side by side, one with overlap and one without, that take turns."""
    stand.clear()
    kv_bytes = stand.sizes.overlap_kv_bytes or int(stand.card.total_bytes * 0.9) // 2 - _BESIDE_KV_BYTES
    engines = {way: stand.start(overlap=way == "on", kv_cache_memory_bytes=kv_bytes) for way in ("on", "off")}
    found = Findings()
    for batch in stand.sizes.loop_batches:
        found.rows += _paces(stand, engines, batch)
    busy = {way: _busy_share(stand, engine) for way, engine in engines.items()}
    found.rows.append({
        "part": f"card busy, {stand.sizes.busy_batch} decodes",
        **{f"overlap {way}": share for way, share in busy.items()},
    })  # fmt: skip
    asks, rates = drawn_asks(stand.sizes), {}
    for way, engine in engines.items():
        report = Report.of(records(asks, ours(engine, asks, stand.sizes.in_flight)))
        rates[way] = report.output_tokens_per_s
        found.rows.append({"part": f"{stand.sizes.in_flight} in flight", "overlap": way, **latencies(report)})
    ratio = rates["on"] / rates["off"]
    found.checks += [
        Check("share of a decode loop in which the card computes", ">= 0.95", busy["on"]),
        Check(f"output tokens/s with overlap ÷ without, {stand.sizes.in_flight} in flight", ">= 1", ratio),
    ]
    return found


def _paces(stand: Stand, engines: dict[str, Engine], batch: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for _ in range(_ROUNDS):
        for way, engine in engines.items():
            _decode(stand, engine, batch, KINDS["top-p 0.95"])
            seconds[way] += _step_seconds(engine, stand.sizes.loop_steps)
            _abort(engine)
    rows = []
    for way, each in seconds.items():
        p50_s, p99_s = np.percentile(each, (50, 99)).tolist()
        rows.append({
            "part": "decode loop", "overlap": way, "sampling": "top-p 0.95", "batch": batch,
            "context": stand.sizes.context, "tokens/s": batch / float(np.mean(each)),
            "ITL p50 ms": p50_s * 1e3, "ITL p99 ms": p99_s * 1e3,
        })  # fmt: skip
    return rows


def _step_seconds(engine: Engine, count: int) -> list[float]:
    ends = [time.perf_counter()]
    for _ in range(count):
        engine.step()
        ends.append(time.perf_counter())
    return np.diff(ends).tolist()


def _busy_share(stand: Stand, engine: Engine) -> float:
    """Of the time that decode steps take, what the card's kernels take. They run in one stream: none beside another."""
    _decode(stand, engine, stand.sizes.busy_batch, KINDS["greedy"])
    taken: list[float] = []
    busy_s = stand.card.busy_s(lambda: taken.extend(_step_seconds(engine, stand.sizes.loop_steps)))
    _abort(engine)
    return busy_s / sum(taken)


def _decode(stand: Stand, engine: Engine, batch: int, sampling: dict[str, Any]) -> None:
    """Bring that many sequences to where they decode. Raises RuntimeError where they do not come to that."""
    for number in range(batch):
        prompt = any_prompt(stand.sizes.context + number)
        add(engine, f"r{number}", prompt, 4 * (_FIRST_STEPS + stand.sizes.loop_steps), **sampling)
    for _ in range(_PATIENCE):
        engine.step()
        if len(engine.last_plan.scheduled) == batch == engine.last_plan.num_tokens:
            break
    else:
        raise RuntimeError(f"{batch} sequences did not all decode within {_PATIENCE} steps: the KV cache is too small")
    for _ in range(_FIRST_STEPS):
        engine.step()


def _abort(engine: Engine) -> None:
    engine.abort([f"r{number}" for number in range(engine.ready.max_num_seqs)])
    while engine.has_work:
        engine.step()
