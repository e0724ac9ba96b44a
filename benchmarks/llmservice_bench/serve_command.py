"""`llmservice bench serve`: its arguments."""

from __future__ import annotations

import argparse

from llmservice_bench import arguments

DESCRIPTION = """\
Send requests in one of three ways, and report throughput, latency and failures:

  --trace CSV         at the trace's own times (column TIMESTAMP), stretched by --time-scale
  --request-rate R    at random times, R a second, however slow the answers
  --concurrency N     the next when an answer has ended, N in flight; with --request-rate: never more than N

Without any of them all requests are sent at once. Their lengths come from the trace (columns ContextTokens and
GeneratedTokens), or from a bundled sample of the Azure LLM inference trace 2023."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="drive a running server with requests as real users send them",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_target(parser)
    arguments.add_requests(parser, "lengths of the requests and, without --request-rate and --concurrency, their times")
    parser.add_argument("--time-scale", type=arguments.positive, help="multiply the trace's times: 0.1 is 10x as fast")
    parser.add_argument("--request-rate", type=arguments.positive, metavar="R", help="requests a second (or inf)")
    parser.add_argument(
        "--burstiness",
        type=arguments.positive,
        metavar="B",
        help="shape of the Gamma distributed gaps: 1 Poisson (the default), below 1 burstier",
    )
    parser.add_argument(
        "--concurrency", type=arguments.positive_int, metavar="N", help="never more than N requests in flight"
    )
    parser.add_argument(
        "--num-prompts",
        type=arguments.positive_int,
        metavar="N",
        help="end after N; default: 200, or what --trace or --duration bring",
    )
    parser.add_argument(
        "--duration", type=arguments.positive, metavar="SECONDS", help="send no more requests after so long"
    )
    arguments.add_report(parser)
    parser.set_defaults(run_bench=_run)


def _run(args: argparse.Namespace) -> int:
    from llmservice_bench.serve_benchmark import run_serve_benchmark

    return run_serve_benchmark(args)
