"""`llmservice crd`: print the CustomResourceDefinition, write its files, or check that one is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmservice_planner.command import Command, CommandError

CRD_FOLDERS = (Path("crds"), Path("charts/llmservice/files"))
"""Where the repository keeps the definition: for kubectl, and for the chart's template to include."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", metavar="FILE", type=Path, help="exit 1 if FILE differs from what would be printed")
    group.add_argument("--write", action="store_true", help="write the repository's files, from its root")


def run(args: argparse.Namespace) -> int:
    from llmservice_operator.api.crd import FILE_NAME, crd_yaml

    text = crd_yaml()
    if args.check:
        return _check(args.check, text)
    if args.write:
        return write_files([folder / FILE_NAME for folder in CRD_FOLDERS], text)
    sys.stdout.write(text)
    return 0


def _check(path: Path, text: str) -> int:
    try:
        current = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"can't read {path}: {error.strerror}") from error
    if current == text:
        return 0
    print(f"{path} differs from the pydantic models: run `make crds` and commit the result", file=sys.stderr)
    return 1


def write_files(paths: list[Path], text: str) -> int:
    """Write generated files of the repository, whose folders exist in its root."""
    present = [path for path in paths if path.parent.is_dir()]
    if not present:
        raise CommandError(
            f"no {' or '.join(str(path.parent) for path in paths)} here: run it in the repository's root"
        )
    for path in present:
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


COMMAND = Command(
    help="print the CustomResourceDefinition of LLMService",
    add_arguments=add_arguments,
    run=run,
    extra="operator",
    requires=("pydantic",),
)
