"""`llmservice bench sweep`: its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmservice_bench import arguments

DESCRIPTION = """\
The throughput-latency curve of a running server: closed loops of growing concurrency find what it can deliver, then
open loops send shares of that at random times, however slow the answers. With --goodput also the highest rate of
requests at which the promises are kept, by bisection."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="draw a server's throughput-latency curve, and find the most that keeps what is promised",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    arguments.add_target(parser)
    arguments.add_requests(parser, "lengths of the requests (default: the bundled sample)")
    parser.add_argument("--seconds", type=arguments.positive, default=10.0, help="send so long, in each run")
    parser.add_argument(
        "--concurrency",
        type=arguments.positive_int,
        nargs="+",
        metavar="N",
        default=[1, 4, 16, 64],
        help="closed loops",
    )
    parser.add_argument(
        "--load",
        type=arguments.positive,
        nargs="+",
        metavar="SHARE",
        default=[0.5, 0.8, 0.95, 1.2],
        help="open loops, as shares of the most requests a second that the closed ones saw",
    )
    arguments.add_report(parser)
    parser.add_argument("--share", type=_share, default=0.99, help="of the requests is to keep --goodput")
    parser.add_argument("--tolerance", type=arguments.positive, default=0.05, help="of the highest rate: 0.05 is 5 %%")
    parser.add_argument(
        "--limit", type=arguments.positive, default=600.0, metavar="SECONDS", help="begin no run of the search later"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curve")
    parser.set_defaults(run_bench=_run)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text}")
    return value


def _run(args: argparse.Namespace) -> int:
    from llmservice_bench.sweep_benchmark import run_sweep_benchmark

    return run_sweep_benchmark(args)
