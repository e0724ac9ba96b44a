"""`llmservice fetch URI DIR`: what a pod's init container runs before the server starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmservice_planner.command import Command, CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help="hf://org/name[@revision] (token: $HF_TOKEN) or file:///path")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to put the checkpoint; created when missing")


def run(args: argparse.Namespace) -> int:
    from llmservice_server.fetch import FetchError, fetch

    try:
        names = fetch(args.uri, args.directory)
    except FetchError as error:
        raise CommandError(str(error), status=1) from error
    print(f"{args.directory}: {', '.join(names)}")
    return 0


COMMAND = Command(
    help="download or copy a checkpoint (safetensors only)",
    add_arguments=add_arguments,
    run=run,
    extra="server",
    requires=("huggingface_hub",),
)
