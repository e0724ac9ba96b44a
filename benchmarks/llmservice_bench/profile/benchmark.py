"""`llmservice bench profile`: the time of prefill and decode by kind of operation, compared with the roofline."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from llmservice_bench.profile.ceilings import Ceilings, seconds
from llmservice_bench.profile.phase import Phase, PhaseLoad
from llmservice_bench.profile.step_profile import multiply_alone, profile_steps
from llmservice_bench.report import machine
from llmservice_planner.command import CommandError
from llmservice_server.backend.layers import DenseMlp
from llmservice_server.engine.config import DType, EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.startup import load_engine, model_runner
from llmservice_server.types.errors import StartError

_TIMED_STEPS = {"prefill": 5, "decode": 20}
_PROFILED_STEPS = 3


def run_profile_benchmark(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        CommandError: the model cannot be served, or not with such contexts.
    """
    phases = [Phase("prefill", 1, length) for length in args.prompts]
    phases += [Phase("decode", batch, args.context) for batch in args.batches]
    try:
        engine = open_engine(args.model, phases, dtype=args.dtype, threads=args.threads)
    except StartError as error:
        raise CommandError(str(error)) from error
    model = model_runner(engine).model
    if not isinstance(model, DecoderModel) or not all(isinstance(layer.mlp, DenseMlp) for layer in model.layers):
        raise CommandError(
            f"{args.model} is a mixture of experts or runs by transformers' code, whose operations are not told apart: "
            "give a dense model of an architecture of our own (docs/models.md)"
        )
    ceilings, rows = profile_phases(engine, phases)
    if args.output == "json":
        print(json.dumps({"machine": machine(), "ceilings": ceilings.as_dict(), "rows": rows}, indent=2))
    else:
        print("\n".join([f"{args.model} on {machine()['platform']}", *table(ceilings, rows)]))
    return 0


def open_engine(model: Path, phases: Sequence[Phase], dtype: DType = "auto", threads: int | None = None) -> Engine:
    """An engine with room for every phase, without chunked prefill. Raises `StartError`."""
    longest = max(phase.context for phase in phases)
    most_seqs = max(phase.num_seqs for phase in phases)
    max_model_len = longest + _TIMED_STEPS["decode"] + _PROFILED_STEPS + most_seqs + 1
    config = EngineConfig(
        model=model,
        device="cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=most_seqs,
        max_num_batched_tokens=2 * longest + most_seqs,
        max_prefill_tokens=2 * longest,
        prefill_chunk_tokens=longest,
        prefix_caching=False,
    )
    return load_engine(config)


def profile_phases(engine: Engine, phases: Sequence[Phase]) -> tuple[Ceilings, list[dict[str, Any]]]:
    """The machine's ceilings, and a row for each phase.

    The ceilings are also measured between the phases, because the speed of a shared machine varies.
    """
    model = cast("DecoderModel", model_runner(engine).model)
    ceilings, rows = Ceilings.measure(model.dtype), []
    for phase in phases:
        rows.append(profile_phase(engine, phase))
        ceilings = ceilings.or_better(Ceilings.measure(model.dtype))
    return ceilings, [row | least(phase, model, ceilings, row) for phase, row in zip(phases, rows, strict=True)]


def least(phase: Phase, model: DecoderModel, ceilings: Ceilings, row: dict[str, Any]) -> dict[str, Any]:
    """The bytes and operations of a phase, and its minimum time as a share of the measured one."""
    num_bytes, operations = phase.least_bytes(model), phase.least_operations(model)
    least_s, bound = ceilings.seconds(num_bytes, operations)
    return {
        "gigabytes": num_bytes / 1e9,
        "gigaflop": operations / 1e9,
        "bound": bound,
        "least_ms": 1000 * least_s,
        "ceiling_share": least_s * row["tokens_per_s"] / phase.num_rows,
    }


def profile_phase(engine: Engine, phase: Phase) -> dict[str, Any]:
    """The time of a step, in total and by kind, and of its matrix products alone, measured alternately."""
    model = cast("DecoderModel", model_runner(engine).model)
    num_steps = _TIMED_STEPS[phase.kind]
    load = PhaseLoad(engine, phase, num_steps + _PROFILED_STEPS + 1)
    multiply = multiply_alone(model, phase.num_rows, phase.num_seqs)
    steps_s, products_s = [], []
    for number in range(num_steps + 1):
        load.before_step()
        step_s, alone_s = seconds(engine.step), seconds(multiply)
        if number > 0:  # the first includes one-time work
            steps_s.append(step_s)
            products_s.append(alone_s)
    by_kind = profile_steps(engine, _PROFILED_STEPS, load.before_step)
    load.end()
    step_s = statistics.median(steps_s)
    p50, p99 = (1000 * float(value) for value in np.percentile(steps_s, (50, 99)))
    latency = "ttft" if phase.kind == "prefill" else "itl"
    return {
        "phase": phase.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "rows": phase.num_rows,
        "tokens_per_s": phase.num_rows / step_s,
        f"{latency}_p50_ms": p50,
        f"{latency}_p99_ms": p99,
        "products_alone_ms": 1000 * statistics.median(products_s),
        "step_by_products": statistics.median(a / b for a, b in zip(steps_s, products_s, strict=True)),
        **asdict(by_kind),
    }


def table(ceilings: Ceilings, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The results as lines for a terminal."""
    kinds = ("layers", "products", "attention", "between", "sampling", "host")
    lines = [
        (
            f"{ceilings.bandwidth_bytes_per_s / 1e9:.1f} GB/s read, {ceilings.flops / 1e9:.0f} GFLOP/s in "
            f"{str(ceilings.dtype).removeprefix('torch.')}: the ridge is at {ceilings.ridge:.1f} operations a byte, "
            f"{ceilings.ridge_rows:.0f} rows"
        ),
        f"{'':<18}{'tok/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'least ms':>10}{'bound':>9}{'of it':>7}{'÷ products':>12}"
        + "".join(f"{kind:>11}" for kind in kinds),
    ]
    for row in rows:
        latency = "ttft" if "ttft_p50_ms" in row else "itl"
        total = sum(row[f"{kind}_ms"] for kind in kinds)
        lines.append(
            f"{row['phase']:<18}{row['tokens_per_s']:>8.0f}{row[f'{latency}_p50_ms']:>9.2f}"
            f"{row[f'{latency}_p99_ms']:>9.2f}{row['least_ms']:>10.2f}{row['bound']:>9}{row['ceiling_share']:>7.0%}"
            f"{row['step_by_products']:>12.2f}" + "".join(f"{row[f'{kind}_ms'] / total:>11.1%}" for kind in kinds)
        )
    return lines
