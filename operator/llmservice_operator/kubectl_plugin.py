"""`kubectl llm …`: kubectl runs the executable kubectl-llm on the PATH, which is this."""

from __future__ import annotations

import sys

from llmservice_planner.command import main

COMMANDS = ("explain", "plan")
"""The subcommands of `llmservice` that are offered through kubectl."""


def run() -> int:
    """The console script kubectl-llm."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(
            f"usage: kubectl llm {{{','.join(COMMANDS)}}} …\n\n  kubectl llm explain NAME [-n NAMESPACE]",
            file=sys.stderr,
        )
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    return main(sys.argv[1:])
