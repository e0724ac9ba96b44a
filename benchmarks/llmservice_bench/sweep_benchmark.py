"""`llmservice bench sweep`: one sweep of one server, as a table, as JSON and as a plot."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import aiohttp
import numpy as np

from llmservice_bench.client import Target, TargetError, measure_word_rate
from llmservice_bench.drive import Load, drive, open_session, progress_bar
from llmservice_bench.record import LatencyTargets, RequestRecord
from llmservice_bench.report import latency_cells, latency_titles, machine
from llmservice_bench.serve_benchmark import from_where, lengths_of, target_of
from llmservice_bench.sweep import Measure, Point, Sweep, SweepPlan
from llmservice_bench.trace import SAMPLE
from llmservice_planner.command import CommandError, check_output, write_output

WARM_UP_REQUESTS = 16


def run_sweep_benchmark(args: argparse.Namespace) -> int:
    """Returns 0 if every request of every run completed, else 1.

    Raises:
        CommandError: an argument, the trace or the server is unusable, or a file cannot be written.
    """
    for path in (args.result, args.plot):
        check_output(path)
    shown = args.output == "table"
    try:
        plan = _plan(args)
        if shown:
            print(f"{args.model} at {args.url}, from {from_where()}\n{HEADER}")
        sweep = asyncio.run(sweep_server(target_of(args), plan, args.timeout, quiet=not shown))
    except (TargetError, ValueError) as error:
        raise CommandError(str(error)) from error
    result = json.dumps({**_settings(args, plan), "machine": machine(), **sweep.as_dict()}, indent=2)
    if not shown:
        print(result)
    elif sweep.highest_rate:
        print(sweep.highest_rate.line())
    if args.result:
        write_output(args.result, result + "\n")
    if args.plot:
        from llmservice_bench.plots import draw_sweep

        write_output(args.plot, draw_sweep(sweep.as_dict()["rows"], f"{args.model}, {from_where()}", plan.targets))
    return 1 if any(point.report.failed for point in sweep.points) else 0


async def sweep_server(target: Target, plan: SweepPlan, timeout_s: float = 600.0, *, quiet: bool = False) -> Sweep:
    """Make the runs of `plan`, and print a line for each unless `quiet`. Raises TargetError."""
    async with open_session(timeout_s) as session:
        measure = await _measuring(session, target, plan)
        sweep = Sweep(plan, measure, on_point=lambda point: None if quiet else print(line(point), flush=True))
        await sweep.run()
    return sweep


async def _measuring(session: aiohttp.ClientSession, target: Target, plan: SweepPlan) -> Measure:
    """Warm the server up; returns a function that sends a load."""
    word_rate = await measure_word_rate(session, target, np.random.default_rng(plan.seed))
    longest = max(plan.lengths, key=lambda each: each.prompt_tokens)
    for lengths, number in (([longest], 1), (plan.lengths, WARM_UP_REQUESTS)):
        await drive(session, target, Load(lengths, max_concurrency=4, num_requests=number), word_rate)

    async def measure(load: Load, name: str) -> list[RequestRecord]:
        async with progress_bar(load, name) as progress:
            return await drive(session, target, load, word_rate, progress)

    return measure


HEADER = f"{'load':<16}{'req/s':>8}{'out tok/s':>11}{latency_titles(22)}"


def line(point: Point) -> str:
    """One run as a line under `HEADER`."""
    report = point.report
    kept = f"{report.goodput.share:>8.1%} kept" if report.goodput else ""
    kept += "" if point.is_sustained else "  not sustained"
    failed = f"  {report.failed} failed" if report.failed else ""
    throughput = f"{report.requests_per_s:>8.2f}{report.output_tokens_per_s:>11.0f}"
    return f"{point.name:<16}{throughput}{latency_cells(report.row(), 22)}{kept}{failed}"


def _plan(args: argparse.Namespace) -> SweepPlan:
    return SweepPlan(
        lengths=lengths_of(args),
        seconds=args.seconds,
        concurrencies=args.concurrency,
        shares=args.load,
        targets=LatencyTargets.parse(args.goodput) if args.goodput else None,
        kept_share=args.share,
        tolerance=args.tolerance,
        limit_s=args.limit,
        seed=args.seed,
    )


def _settings(args: argparse.Namespace, plan: SweepPlan) -> dict[str, Any]:
    return {
        "url": args.url,
        "model": args.model,
        "trace": (args.trace or SAMPLE).name,
        "scale": args.scale,
        "seconds": plan.seconds,
        "goodput": None if plan.targets is None else str(plan.targets),
        "seed": plan.seed,
    }
