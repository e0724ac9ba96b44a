"""`llmservice bench`: load, and what it shows."""

from __future__ import annotations

import argparse

from llmservice_bench import serve_command, sweep_command
from llmservice_bench.profile import command as profile_command
from llmservice_planner.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for command in (serve_command, sweep_command, profile_command):
        command.add_parser(subparsers)


def _run(args: argparse.Namespace) -> int:
    status: int = args.run_bench(args)
    return status


COMMAND = Command(
    help="measure throughput and latency under load",
    add_arguments=_add_arguments,
    run=_run,
    extra="bench",
    requires=("aiohttp", "numpy", "rich"),
)
