"""`llmservice bench serve`: one load against one server, reported as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

import numpy as np

from llmservice_bench.client import Target, TargetError, measure_word_rate
from llmservice_bench.drive import Load, drive, open_session, progress_bar
from llmservice_bench.record import LatencyTargets
from llmservice_bench.report import Report, machine
from llmservice_bench.trace import SAMPLE, Lengths, read_arrivals, read_trace
from llmservice_planner.command import CommandError, check_output, write_output

DEFAULT_NUM_PROMPTS = 200


def run_serve_benchmark(args: argparse.Namespace) -> int:
    """Returns 0 if every request completed, else 1.

    Raises:
        CommandError: an argument, the trace or the server is unusable, or the result cannot be written.
    """
    check_output(args.result)
    try:
        load = load_of(args)
        targets = LatencyTargets.parse(args.goodput) if args.goodput else None
        report = asyncio.run(_measure(args, load, targets))
    except (TargetError, ValueError) as error:
        raise CommandError(str(error)) from error
    result = json.dumps(_settings(args, load) | report.as_dict(), indent=2)
    if args.output == "json":
        print(result)
    else:
        print(f"{args.model} at {args.url}, from {from_where()}")
        print("\n".join(report.lines()))
    if args.result:
        write_output(args.result, result + "\n")
    return 1 if report.failed else 0


def load_of(args: argparse.Namespace) -> Load:
    """The load of the arguments; raises ValueError if they contradict each other."""
    replayed = args.trace is not None and args.request_rate is None and args.concurrency is None
    if args.time_scale is not None and not replayed:
        raise ValueError(
            "--time-scale stretches the times of --trace: give it without --request-rate and --concurrency"
        )
    if args.burstiness is not None and args.request_rate in {None, float("inf")}:
        raise ValueError("--burstiness shapes the gaps of --request-rate: give both, and a rate that is finite")
    num_requests = args.num_prompts
    if num_requests is None and args.duration is None and not replayed:
        num_requests = DEFAULT_NUM_PROMPTS
    return Load(
        lengths=lengths_of(args),
        rate=args.request_rate or float("inf"),
        burstiness=args.burstiness or 1.0,
        arrivals=read_arrivals(args.trace, args.time_scale or 1.0) if replayed else None,
        max_concurrency=args.concurrency,
        num_requests=num_requests,
        duration_s=args.duration,
        seed=args.seed,
    )


def lengths_of(args: argparse.Namespace) -> list[Lengths]:
    return [lengths.scaled(args.scale) for lengths in read_trace(args.trace or SAMPLE)]


def target_of(args: argparse.Namespace) -> Target:
    """The target; the API key comes from the environment, as flags are visible in the process list."""
    key = os.environ.get(args.api_key_env)
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    return Target(args.url, args.model, chat=args.chat, ignore_eos=args.ignore_eos, headers=headers)


def from_where() -> str:
    where = machine()
    return f"{where['platform']} with {where['cpus']} CPUs"


async def _measure(args: argparse.Namespace, load: Load, targets: LatencyTargets | None) -> Report:
    target = target_of(args)
    async with open_session(args.timeout) as session:
        word_rate = await measure_word_rate(session, target, np.random.default_rng(args.seed))
        async with progress_bar(load, args.model) as progress:
            return Report.of(await drive(session, target, load, word_rate, progress), targets)


def _settings(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    return {
        "url": args.url,
        "model": args.model,
        "trace": (args.trace or SAMPLE).name,
        "scale": args.scale,
        "arrivals": "replayed" if load.arrivals is not None else "gamma" if load.is_open else "at once",
        "time_scale": args.time_scale,
        "request_rate": load.rate if load.rate != float("inf") else "inf",
        "burstiness": load.burstiness,
        "concurrency": args.concurrency,
        "num_prompts": load.num_requests,
        "duration": "inf" if args.duration == float("inf") else args.duration,
        "seed": args.seed,
    }
