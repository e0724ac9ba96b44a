"""`llmservice bench serve`: one load against one server, reported as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

import numpy as np

from llmservice_bench.client import Target, TargetError, measure_word_rate
from llmservice_bench.drive import Load, drive, open_session
from llmservice_bench.lengths import SAMPLE, TraceError, read_trace
from llmservice_bench.report import Report, machine
from llmservice_planner.command import CommandError

DEFAULT_NUM_PROMPTS = 200


def run_serve_benchmark(args: argparse.Namespace) -> int:
    """Exit status 0 when every request completed, 1 when some failed.

    Raises:
        CommandError: the trace or the server cannot be used.
    """
    try:
        load = _load(args)
        report = asyncio.run(_measure(args, load))
    except (TraceError, TargetError, ValueError) as error:
        raise CommandError(str(error)) from error
    if args.output == "json":
        print(json.dumps(_settings(args) | report.as_dict(), indent=2))
    else:
        where = machine()
        print(f"{args.model} at {args.url}, from {where['platform']} with {where['cpus']} CPUs")
        print("\n".join(report.lines()))
    return 1 if report.failed else 0


def _load(args: argparse.Namespace) -> Load:
    num_requests = args.num_prompts
    if num_requests is None and args.duration is None:
        num_requests = DEFAULT_NUM_PROMPTS
    return Load(
        lengths=[lengths.scaled(args.scale) for lengths in read_trace(args.trace or SAMPLE)],
        rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.concurrency,
        num_requests=num_requests,
        duration_s=args.duration,
        seed=args.seed,
    )


async def _measure(args: argparse.Namespace, load: Load) -> Report:
    key = os.environ.get("OPENAI_API_KEY")  # the environment, not a flag: flags show in the process list
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    target = Target(args.url, args.model, chat=args.chat, ignore_eos=args.ignore_eos, headers=headers)
    async with open_session(args.timeout) as session:
        word_rate = await measure_word_rate(session, target, np.random.default_rng(args.seed))
        return Report.of(await drive(session, target, load, word_rate))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "url": args.url,
        "model": args.model,
        "trace": (args.trace or SAMPLE).name,
        "scale": args.scale,
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "concurrency": args.concurrency,
        "num_prompts": args.num_prompts,
        "duration": args.duration,
        "seed": args.seed,
    }
