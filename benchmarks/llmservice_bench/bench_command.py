"""`llmservice bench serve|sweep|profile`: their arguments."""

from __future__ import annotations

import argparse
import math
import os
import urllib.parse
from importlib.util import find_spec
from pathlib import Path

from llmservice_bench.record import FORM
from llmservice_planner.command import Command, CommandError, count, number, whole_number


def server_root(text: str) -> str:
    """An argparse type: the URL of a server, also given as a client's base URL, with /v1."""
    host = text.rsplit("://", maxsplit=1)[-1].partition("/")[0]
    if "@" in host:  # which reports would repeat
        raise argparse.ArgumentTypeError("expected http://HOST[:PORT] without a name and a password before the host")
    try:
        urllib.parse.urlsplit(text).port  # noqa: B018  # raises ValueError, as for an IPv6 address without brackets
    except ValueError:
        host = ""
    if not host or not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: expected http://HOST[:PORT]")
    return text.rstrip("/").removesuffix("/v1")


def _or_infinite(text: str) -> float:
    return math.inf if text == "inf" else number(text)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", type=server_root, default="http://127.0.0.1:8080", help="of the server, with or without /v1"
    )
    parser.add_argument("--model", required=True, help="the served model's name")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument("--ignore-eos", action="store_true", help="ask for the trace's output lengths exactly")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument("--timeout", type=number, default=600.0, metavar="SECONDS", help="longer requests have failed")


def _add_requests(parser: argparse.ArgumentParser, trace: str) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    parser.add_argument("--scale", type=number, default=1.0, help="multiply the trace's lengths by this")
    parser.add_argument("--seed", type=count, default=0, help="same seed, same requests")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=f"latency targets of each request, as {FORM}")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="format on the terminal")
    parser.add_argument("--result", type=Path, metavar="FILE", help="also write the JSON to this file")


_SERVE = """\
Send requests in one of three ways and report throughput, latency and failures:

  --trace FILE        at the trace's own times, stretched by --time-scale
  --request-rate R    at random times, R per second, independent of the responses
  --concurrency N     N in flight, the next after each response; with --request-rate: at most N

Without any of them all requests are sent at once. Their lengths come from the trace (of a format that `llmservice
traffic` reads), or from a bundled sample of the Azure LLM inference trace 2023."""


def _add_serve(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="send a realistic load to a running server",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_target(parser)
    _add_requests(parser, "lengths of the requests and, without --request-rate and --concurrency, their times")
    parser.add_argument("--time-scale", type=number, help="multiply the trace's times: 0.1 is 10x as fast")
    parser.add_argument("--request-rate", type=_or_infinite, metavar="R", help="requests a second (or inf)")
    parser.add_argument(
        "--burstiness",
        type=number,
        metavar="B",
        help="shape of the Gamma distributed gaps: 1 Poisson (the default), below 1 burstier",
    )
    parser.add_argument("--concurrency", type=whole_number, metavar="N", help="at most N requests in flight")
    parser.add_argument(
        "--num-prompts",
        type=whole_number,
        metavar="N",
        help="end after N; default: 200, or determined by --trace or --duration",
    )
    parser.add_argument(
        "--duration", type=_or_infinite, metavar="SECONDS", help="send no more requests after this time"
    )
    _add_report(parser)
    parser.set_defaults(run_bench=_run_serve)


def _run_serve(args: argparse.Namespace) -> int:
    from llmservice_bench.serve_benchmark import run_serve_benchmark

    return run_serve_benchmark(args)


_SWEEP = """\
The throughput-latency curve of a running server: closed loops of growing concurrency measure its capacity, then open
loops send shares of that at random times, independent of the responses. With --goodput, a bisection finds the highest
request rate at which the targets are met, and at which the waits do not grow from the first half of a run to the second
(`not sustained`)."""


def _add_sweep(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="measure a server's throughput-latency curve and the highest rate that meets the targets",
        description=_SWEEP,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_target(parser)
    _add_requests(parser, "lengths of the requests (default: the bundled sample)")
    parser.add_argument("--seconds", type=number, default=10.0, help="duration of each run")
    parser.add_argument(
        "--concurrency",
        type=whole_number,
        nargs="+",
        metavar="N",
        default=[1, 4, 16, 64],
        help="closed loops",
    )
    parser.add_argument(
        "--load",
        type=number,
        nargs="+",
        metavar="SHARE",
        default=[0.5, 0.8, 0.95, 1.2],
        help="open loops, as shares of the closed loops' highest request rate",
    )
    _add_report(parser)
    parser.add_argument("--share", type=_share, default=0.99, help="share of the requests that must keep --goodput")
    parser.add_argument("--tolerance", type=number, default=0.05, help="relative tolerance of the highest rate")
    parser.add_argument(
        "--limit", type=_or_infinite, default=600.0, metavar="SECONDS", help="start no run of the search later"
    )
    parser.add_argument("--plot", type=_svg, metavar="FILE.svg", help="write a plot of the curve")
    parser.set_defaults(run_bench=_run_sweep)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text}")
    return value


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an SVG file: expected FILE.svg")
    return Path(text)


def _run_sweep(args: argparse.Namespace) -> int:
    from llmservice_bench.sweep_benchmark import run_sweep_benchmark

    return run_sweep_benchmark(args)


_PROFILE = """\
Run prefill and decode of a model on this machine's CPU under torch.profiler: the time of each step by kind of
operation, and the minimum time by memory bandwidth and arithmetic, both measured in the same run."""


def _add_profile(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="profile a model's prefill and decode and compare them with this CPU's limits",
        description=_PROFILE,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder with config.json and safetensors")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: the checkpoint's"
    )
    parser.add_argument("--threads", type=whole_number, help="default: one per core")
    parser.add_argument(
        "--batches",
        type=whole_number,
        nargs="+",
        metavar="N",
        default=[1, 8, 32, 64],
        help="batch sizes of decode steps",
    )
    parser.add_argument("--context", type=whole_number, default=128, help="tokens per decoding sequence")
    parser.add_argument(
        "--prompts",
        type=whole_number,
        nargs="+",
        metavar="N",
        default=[128, 512, 1024],
        help="prompt lengths of prefill steps",
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="format on the terminal")
    parser.set_defaults(run_bench=_run_profile)


def _run_profile(args: argparse.Namespace) -> int:
    for module in ("torch", "numba"):
        if find_spec(module) is None:
            raise CommandError(f"bench profile runs a model and needs {module}: pip install 'llmservice[server]'")
    from llmservice_server.ipc.environment import for_computing

    os.environ.update(for_computing(os.environ))  # before torch is imported, so that threads wait as in a server
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch.profiler logs each start
    from llmservice_bench.profile.benchmark import run_profile_benchmark

    return run_profile_benchmark(args)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for add in (_add_serve, _add_sweep, _add_profile):
        add(subparsers)


COMMAND = Command(
    help="measure throughput and latency under load",
    add_arguments=_add_arguments,
    run=lambda args: args.run_bench(args),
    extra="bench",
    requires=("aiohttp", "matplotlib", "numpy", "rich"),
)
