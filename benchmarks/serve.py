"""Throughput and latency over HTTP on this machine, from an idle to an overloaded server.

A toy Llama (4 layers, hidden size 256) is served on loopback by the same processes as in a pod; the load generator uses
the same cores. Closed loops of growing concurrency measure the capacity, open loops of Poisson arrivals send shares of
it, and a bisection finds the highest rate at which 99 % of the requests meet the latency targets.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from llmservice_bench.client import Target
from llmservice_bench.models import MODEL, serving
from llmservice_bench.record import LatencyTargets
from llmservice_bench.results import Results
from llmservice_bench.sweep import SweepPlan
from llmservice_bench.sweep_benchmark import HEADER, sweep_server
from llmservice_bench.trace import read_trace

TARGETS = LatencyTargets(ttft_s=0.25, itl_s=0.05)


async def run(scale: float, seconds: float, limit_s: float) -> int:
    """Returns 1 if a request failed."""
    plan = SweepPlan(
        lengths=[each.scaled(scale) for each in read_trace()],
        seconds=seconds,
        concurrencies=(1, 4, 16, 64),
        shares=(0.5, 0.8, 0.95, 1.5),
        targets=TARGETS,
        limit_s=limit_s,
    )
    print(HEADER)
    async with serving() as server:
        sweep = await sweep_server(Target(server.url, MODEL, ignore_eos=True), plan)
    notes = [sweep.highest_rate.line()] if sweep.highest_rate else []
    print(*notes, sep="\n")
    settings = {"model": MODEL, "scale": scale, "seconds": seconds, "goodput": str(TARGETS)}
    Results("serve", [point.row() for point in sweep.points], settings=settings, notes=notes).write()
    return 1 if any(point.report.failed for point in sweep.points) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.25, help="multiply the trace's lengths by this")
    parser.add_argument("--seconds", type=float, default=6.0, help="a load")
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help="begin no run of the search later")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.scale, arguments.seconds, arguments.limit)))
