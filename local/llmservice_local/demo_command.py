"""`llmservice demo`: the whole project in a few minutes, without a GPU, Docker or a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmservice_planner.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where the model, logs and state go")
    parser.add_argument(
        "--manifest", type=Path, default=Path("examples/tiny-llama.yaml"), help="the LLMService to apply"
    )
    parser.add_argument("--duration", type=float, default=60.0, metavar="SECONDS", help="how long to send traffic")
    parser.add_argument(
        "--overload",
        type=float,
        default=2.5,
        metavar="FACTOR",
        help="the rate, in multiples of what one replica delivers",
    )
    parser.add_argument("--scale", type=float, default=0.15, help="multiply the trace's lengths by this")
    parser.add_argument(
        "--scale-down-timeout",
        type=float,
        default=90.0,
        metavar="SECONDS",
        help="how long to wait for one replica again",
    )


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from rich.console import Console

    from llmservice_local.demo.run import DemoConfig, run_demo

    config = DemoConfig(
        folder=args.dir,
        manifest=args.manifest,
        duration_s=args.duration,
        overload=args.overload,
        scale=args.scale,
        scale_down_timeout_s=args.scale_down_timeout,
    )
    return 0 if asyncio.run(run_demo(config, Console(soft_wrap=True))).succeeded else 1


COMMAND = Command(
    help="watch one LLMService go from a manifest to tokens to several replicas and back, on this machine",
    add_arguments=_add_arguments,
    run=_run,
    extra="local",
    requires=("kubernetes", "aiohttp", "rich"),
)
