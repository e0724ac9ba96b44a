"""`llmservice bench profile`: its arguments."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from llmservice_bench import arguments
from llmservice_planner.command import CommandError

DESCRIPTION = """\
Run prefill and decode of a model on this machine's CPU, under torch.profiler: what each step spends its time on, the
least that memory and arithmetic, both measured on the spot, would take for it, and which of the two that is."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="show what a model's prefill and decode spend their time on, beside this CPU's limits",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder with config.json and safetensors")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: the checkpoint's"
    )
    parser.add_argument("--threads", type=arguments.positive_int, help="default: a core each")
    parser.add_argument(
        "--batches", type=arguments.positive_int, nargs="+", metavar="N", default=[1, 8, 32, 64], help="decode so many"
    )
    parser.add_argument("--context", type=arguments.positive_int, default=128, help="tokens of each that decodes")
    parser.add_argument(
        "--prompts", type=arguments.positive_int, nargs="+", metavar="N", default=[128, 512, 1024], help="their tokens"
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="on the terminal")
    parser.set_defaults(run_bench=_run)


def _run(args: argparse.Namespace) -> int:
    for module in ("torch", "numba"):
        if find_spec(module) is None:
            raise CommandError(f"bench profile runs a model and needs {module}: pip install 'llmservice[server]'")
    from llmservice_server.environment import for_computing

    os.environ.update(for_computing(os.environ))  # before torch: threads wait as those of a server do
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler tells of each of its starts otherwise
    from llmservice_bench.profile.benchmark import run_profile_benchmark

    return run_profile_benchmark(args)
