"""`llmservice bench`: load, and what it shows."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmservice_planner.command import Command


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    serve = subparsers.add_parser(
        "serve",
        help="drive a running server with an open loop of trace-shaped requests",
        description="Send requests at their own rate, however slow the answers; report throughput and latency.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serve.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server, without /v1")
    serve.add_argument("--model", required=True, help="the model to ask for")
    serve.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    serve.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="lengths (columns ContextTokens, GeneratedTokens); default: the bundled sample",
    )
    serve.add_argument("--scale", type=_positive, default=1.0, help="multiply the trace's lengths by this")
    serve.add_argument("--request-rate", type=_positive, default=float("inf"), metavar="RATE", help="requests a second")
    serve.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        help="shape of the gaps between requests: 1 Poisson, below 1 burstier",
    )
    serve.add_argument("--concurrency", type=_positive_int, help="never more than so many requests in flight")
    serve.add_argument("--num-prompts", type=_positive_int, help="end after so many; 200 without --duration")
    serve.add_argument("--duration", type=_positive, metavar="SECONDS", help="send no more requests after so long")
    serve.add_argument("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="longer has failed")
    serve.add_argument("--ignore-eos", action="store_true", help="ask for the trace's output lengths exactly")
    serve.add_argument("--seed", type=int, default=0, help="same seed, same requests")
    serve.add_argument("-o", "--output", choices=["table", "json"], default="table")


def _run(args: argparse.Namespace) -> int:
    from llmservice_bench.serve_benchmark import run_serve_benchmark

    return run_serve_benchmark(args)


COMMAND = Command(
    help="measure throughput and latency under load",
    add_arguments=_add_arguments,
    run=_run,
    extra="bench",
    requires=("aiohttp", "numpy"),
)
