"""Components around the model: host time per step, block pool, sampler, HTTP path, loading, start-up.

Where the model is not measured, a model that computes nothing replaces it; everything else is as in a pod.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmservice_server.ipc.environment import for_computing

os.environ.update(for_computing(os.environ))  # before torch is imported, so that memory is allocated as in a server

import torch

from llmservice_bench.results import Check, Results
from llmservice_server.backend.cpu.linear_kernels import HAS_TILES
from llmservice_server.engine.scheduler import ContinuousScheduler
from pieces.adapters import measure_adapter_memory, measure_adapters
from pieces.block_pool import measure_block_pool
from pieces.embeddings import NUM_STREAMS as NUM_EMBEDDING_STREAMS
from pieces.embeddings import measure_embeddings
from pieces.experts import measure_experts
from pieces.http_path import LONGEST_ITL_MS, NUM_STREAMS, measure_http, sustained_tokens_per_s
from pieces.loading import measure_loading
from pieces.quantized_products import NUM_ROWS as PRODUCT_ROWS
from pieces.quantized_products import SHAPES as PRODUCT_SHAPES
from pieces.quantized_products import measure_products
from pieces.sampler import KINDS, NUM_ROWS, measure_sampler
from pieces.scheduling import NUM_RUNNING as NUM_SCHEDULED
from pieces.scheduling import SchedulerBefore, measure_prompts, measure_scheduling
from pieces.start import measure_phases, measure_serving
from pieces.step import measure_real_step, measure_step
from pieces.stream_chunks import measure_stream_chunks

Row = dict[str, Any]

NUM_RUNNING = (16, 64, 256, 1024)
STEP_ROUNDS = 5
"""Rounds over all sizes, of which the median counts, because a round takes 0.1 s and the speed of a shared machine
varies."""
OFFERED = (10_000, 15_000, 20_000, 25_000, 30_000)  # tokens/s
PROMPTS = (("16 requests with one prompt of 1,600 tokens", 16, 1600), ("one of 16,000 tokens, alone", 1, 16_000))
EMBEDDED = ((16, 32), (4, 512))  # inputs of a request, tokens of each
ADAPTER_LOADS = 500
EXPERTS_BOUND = 1.3  # times the longer of reading their weights and of their arithmetic
START_MODEL = "toy"


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one part."""

    rows: Sequence[Row]
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()


def step() -> Found:
    rows: list[Row] = []
    temperatures = {"greedy": 0.0, "sampled": 1.0}
    kinds = list(itertools.product(temperatures, NUM_RUNNING))
    rounds = [[measure_step(num, temperatures[name]) for name, num in kinds] for _ in range(STEP_ROUNDS)]
    for (name, num_running), costs in zip(kinds, zip(*rounds, strict=True), strict=True):
        cost = sorted(costs, key=lambda cost: cost.host.p50_s)[STEP_ROUNDS // 2]
        rows.append(
            {
                "running": num_running,
                "sampling": name,
                "host_p50_ms": cost.host.p50_s * 1000,
                "host_p99_ms": cost.host.p99_s * 1000,
                "cpu_p50_ms": cost.cpu_p50_s * 1000,
                "model_p50_ms": cost.model_p50_s * 1000,
                "message_bytes": cost.message_bytes,
            }
        )
    host_ms = {(row["sampling"], row["running"]): row["host_p50_ms"] for row in rows}
    checks = [
        Check(f"scheduling and bookkeeping per step at 256 running, {name}", "<= 0.5", host_ms[name, 256], "ms")
        for name in temperatures
    ]
    step_ms = measure_real_step("small", 256) * 1000
    share = 100 * host_ms["greedy", 256] / step_ms
    rows.append({"running": 256, "sampling": "greedy", "step_of_12x768_p50_ms": step_ms, "host_share_percent": share})
    checks.append(Check("the same, of the step on the 12×768 model", "<= 5", share, "%"))
    return Found(rows, checks)


def scheduling() -> Found:
    timings = measure_scheduling()
    rows: list[Row] = [
        {"situation": name, "scheduling_p50_ms": each.p50_s * 1000, "scheduling_p99_ms": each.p99_s * 1000}
        for name, each in timings.items()
    ]
    checks = [
        Check(f"scheduling alone at {NUM_SCHEDULED} running, {name}", "<= 0.5", each.p50_s * 1000, "ms")
        for name, each in timings.items()
    ]
    for prompt, count, tokens in PROMPTS:
        for name, kind in (("before, as of commit 82f1556", SchedulerBefore), ("now", ContinuousScheduler)):
            work = measure_prompts(kind, count, tokens)
            rows.append({"prompt": prompt, "scheduler": name, "steps": work.steps, "tokens_computed": work.tokens})
    return Found(rows, checks)


def block_pool() -> Found:
    timings = measure_block_pool()
    return Found([{"operation": name, "p50_us": t.p50_s * 1e6, "p99_us": t.p99_s * 1e6} for name, t in timings.items()])


def sampler() -> Found:
    costs = {(kind, num_rows): measure_sampler(kind, num_rows) for kind in KINDS for num_rows in NUM_ROWS}
    rows: list[Row] = [
        {"kind": kind, "rows": num_rows, "p50_ms": draw.p50_s * 1000, "p99_ms": draw.p99_s * 1000}
        for (kind, num_rows), draw in costs.items()
    ]
    top_p_ms = costs["top-p 0.9", 64].p50_s * 1000
    return Found(rows, [Check("top-p of 64 rows, vocabulary 32k", "<= 10", top_p_ms, "ms")])


def quantized_products() -> Found:
    """At the number of rows of a step of 32 sequences, and of one."""
    rows: list[Row] = []
    for outputs, inputs in PRODUCT_SHAPES:
        for num_rows in PRODUCT_ROWS:
            taken_s = measure_products(outputs, inputs, num_rows)
            row: Row = {"outputs": outputs, "inputs": inputs, "rows": num_rows}
            row |= {f"{name}_us": each * 1e6 for name, each in taken_s.items()}
            row |= {f"{name}_speedup": taken_s["bfloat16"] / taken_s[name] for name in taken_s if name != "bfloat16"}
            rows.append(row)
    what = "int8 products ÷ bfloat16, the slowest of three shapes"
    bounds = {1: ">= 1.0", 32: ">= 1.3"} if "int8_speedup" in rows[0] else {}
    slowest = {count: min(row["int8_speedup"] for row in rows if row["rows"] == count) for count in bounds}
    return Found(rows, [Check(f"{what}, {count} rows", bounds[count], slowest[count]) for count in bounds])


def experts() -> Found:
    """Reading is bounded by the machine's copy bandwidth, arithmetic by a large matrix product, of bfloat16 both."""
    rows = list(measure_experts(torch.bfloat16))
    checks = []
    for row in rows:
        what = f"experts of Qwen3-30B-A3B, {row['tokens']} tokens, "
        bound = "reading their weights" if row["read_ms"] > row["arithmetic_ms"] else "their arithmetic (the longer)"
        checks.append(Check(f"{what}÷ {bound}", f"<= {EXPERTS_BOUND}", row["of_the_longer"]))
        for kind in ("", "int4_", "mxfp4_", "nvfp4_", "int8_"):
            if f"{kind}of_the_loop" in row:
                of = f" of {kind.removesuffix('_')}" if kind else ""
                checks.append(Check(f"{what}÷ a loop over experts{of}", "<= 1.0", row[f"{kind}of_the_loop"]))
    return Found(rows, checks, [note for row in rows if (note := arithmetic_note(row))])


def arithmetic_note(row: Row) -> str | None:
    """Why a time near that of reading the weights is out of reach, where arithmetic alone takes longer."""
    ratio = row["arithmetic_ms"] / row["read_ms"]
    if ratio <= EXPERTS_BOUND:
        return None
    cpu = "this CPU" if HAS_TILES else "this CPU, which has no AMX"
    return (
        f"experts of {row['tokens']} tokens cannot take at most {EXPERTS_BOUND} times as long as reading their weights "
        f"on {cpu}: their arithmetic alone, at the rate of a large matrix product, takes {row['arithmetic_ms']:.3g} "
        f"ms, {ratio:.1f} times the {row['read_ms']:.3g} ms of reading"
    )


def http() -> Found:
    what = f"HTTP path, stub model, {NUM_STREAMS} streams, one API process, p99 ITL at most {LONGEST_ITL_MS:g} ms"
    rows: list[Row] = []
    checks: list[Check] = []
    for traced, name in ((False, what), (True, f"{what}, every request traced")):
        runs = [
            asyncio.run(measure_http(NUM_STREAMS, NUM_STREAMS / rate, seconds=5.0, traced=traced)) for rate in OFFERED
        ]
        rows += [run.row for run in runs]
        checks.append(Check(name, ">= 20000", sustained_tokens_per_s(runs), "tokens/s"))
    return Found(rows, checks)


def stream_chunks() -> Found:
    row = asyncio.run(measure_stream_chunks())
    what = f"{row['streams']} streams of {row['tokens_per_stream']} tokens"
    return Found(
        [row],
        [
            Check(f"network chunks per stream, median, {what}", ">= 100", row["network_chunks_per_stream_p50"]),
            Check(f"/health, p99, under the same load of {what}", "< 100", row["health_p99_ms"], "ms"),
        ],
    )


def embeddings() -> Found:
    rows = [measure_embeddings(*shape) for shape in EMBEDDED]
    return Found(
        rows,
        [
            Check(
                f"p99 ITL of {NUM_EMBEDDING_STREAMS} streams beside embeddings of {row['inputs']} × "
                f"{row['tokens_per_input']} tokens ÷ without",
                "<= 1.2",
                row["itl_p99_ratio"],
            )
            for row in rows
        ],
    )


def adapters() -> Found:
    row, memory = measure_adapters(), measure_adapter_memory(ADAPTER_LOADS)
    slower, load = row["slowdown_percent"], row["load_beside_streams_s"]
    return Found(
        [row, memory],
        [
            Check("requests without an adapter slower with slots for adapters", "<= 3", slower, "%"),
            Check(
                f"load of an adapter of {row['adapter_mb']:.0f} MB beside {row['streams']} streams", "<= 1", load, "s"
            ),
            Check("requests failed by the loads", "<= 0", row["failed_requests"]),
            Check(f"memory after {ADAPTER_LOADS} loads and unloads", "< 20", memory["growth_mib"], "MiB more"),
        ],
    )


def loading() -> Found:
    return Found(list(measure_loading(layers=32, experts=64)))


def start() -> Found:
    served = {**measure_phases(START_MODEL), **asyncio.run(measure_serving(START_MODEL))}
    with tempfile.TemporaryDirectory() as empty:
        compiling = measure_phases("small", runs=1, kernels=Path(empty))
        compiled = measure_phases("small", runs=1, kernels=Path(empty))
    return Found(
        [
            {"model": START_MODEL, "kernels": "compiled before", **served},
            {"model": "small", "kernels": "compiled before", **compiled},
            {"model": "small", "kernels": "none yet, as in a new pod", **compiling},
        ]
    )


PARTS: dict[str, Callable[[], Found]] = {
    "step": step,
    "scheduling": scheduling,
    "block_pool": block_pool,
    "sampler": sampler,
    "quantized_products": quantized_products,
    "experts": experts,
    "http": http,
    "stream_chunks": stream_chunks,
    "embeddings": embeddings,
    "adapters": adapters,
    "loading": loading,
    "start": start,
}

BY_CPU = {"quantized_products", "experts"}
"""Parts whose figures depend on the CPU's vector instructions."""


def main(parts: Sequence[str]) -> int:
    for name in parts:
        found = PARTS[name]()
        print(f"\n{name}")
        for row in found.rows:
            print(
                "  "
                + "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                )
            )
        print(*(check.line() for check in found.checks), *found.notes, sep="\n", flush=True)
        settings = {"threads": torch.get_num_threads(), "model": "one that computes nothing, where it is not measured"}
        results = Results(f"micro_{name}", found.rows, found.checks, settings, found.notes)
        (results.by_cpu() if name in BY_CPU else results).write()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    sys.exit(main(parser.parse_args().only))
