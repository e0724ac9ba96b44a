"""`llmservice alerts`: print the alerting rules for a plain Prometheus, or write the chart's copy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmservice_operator.crd_command import write_files
from llmservice_planner.command import Command

CHART_FILE = Path("charts/llmservice/files/alerts.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the chart's copy, from the repository's root")


def run(args: argparse.Namespace) -> int:
    text = alerts_yaml()
    if args.write:
        return write_files([CHART_FILE], text)
    sys.stdout.write(text)
    return 0


def alerts_yaml() -> str:
    """The rules as Prometheus' `rule_files` take them."""
    import yaml

    from llmservice_operator.monitoring.alerts import rule_file

    source = "operator/llmservice_operator/monitoring/alerts.py"
    rules: str = yaml.safe_dump(rule_file(), sort_keys=False, width=1000)
    return f"# Made by `llmservice alerts --write`; change {source} instead.\n{rules}"


COMMAND = Command(
    help="print the alerting rules about every LLMService and the operator, for Prometheus",
    add_arguments=add_arguments,
    run=run,
    extra="operator",
    requires=("pydantic",),
)
