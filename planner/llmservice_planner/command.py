"""The `llmservice` command, which loads the subcommands of all packages.

Packages register their commands in the entry-point group `llmservice.commands`. A command whose dependencies are not
installed is not in the help: the operator's image, which has no torch, does not show `serve`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP = "llmservice.commands"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `run` returns the process's exit status; user errors are raised as `CommandError`."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    extra: str | None = None
    requires: tuple[str, ...] = ()
    """Top-level modules that `run` needs; the extra `extra` installs them."""

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.requires if find_spec(name) is None)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except of switches, empty ones, and where the help itself says what the default is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.nargs == 0 or not action.default or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class CommandError(Exception):
    """A user error: its message is printed without a traceback, and the command exits with `status`."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (0 success, 1 a negative result, 2 a user error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if arguments and arguments[0] in entries:
        entries = {arguments[0]: entries[arguments[0]]}  # load only the requested command
    commands = {name: _load(entry) for name, entry in entries.items()}
    if arguments and (command := commands.get(arguments[0])) and (missing := command.missing()):
        print(
            f"llmservice {arguments[0]}: not installed here ({', '.join(missing)} missing): "
            f"pip install 'llmservice[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    args = _parser(commands).parse_args(arguments)
    try:
        return commands[args.command].run(args)
    except CommandError as error:
        print(f"llmservice {args.command}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `llmservice plan … | head`
        sys.stderr.close()
        return 0


def _load(entry: EntryPoint) -> Command:
    command = entry.load()
    if not isinstance(command, Command):
        raise TypeError(f"entry point {entry.name} names {command!r}, expected a Command")
    return command


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmservice",
        description="Serve open-weight LLMs on Kubernetes: sized by arithmetic, scaled on user-visible latency.",
    )
    parser.add_argument("--version", action="version", version=f"llmservice {version('llmservice')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in sorted(commands.items()):
        if command.missing():
            continue
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,  # abbreviated flags would bypass checks for refused flags
        )
        command.add_arguments(subparser)
    return parser


def check_output(path: Path | None) -> None:
    """Raises `CommandError` if that file cannot be written, before anything is computed."""
    if path is not None and path.is_dir():
        raise CommandError(f"{path} is a folder: give the name of a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(f"{path.absolute().parent} is no folder: create it, or give another path")


def write_output(path: Path, text: str) -> None:
    """Raises `CommandError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error


def duration(text: str) -> float:
    """Seconds, from a flag's 80ms, 2s, 5m, 1h or plain number of seconds."""
    for suffix, seconds in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if text.endswith(suffix):
            return positive(text.removesuffix(suffix), text, "a time such as 80ms") * seconds
    return positive(text, text, "a time such as 80ms")


def number(text: str) -> float:
    """A flag's number above 0."""
    return positive(text, text, "a number above 0")


def whole_number(text: str, least: int = 1) -> int:
    """A flag's whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def count(text: str) -> int:
    """A flag's whole number, which may be 0."""
    return whole_number(text, least=0)


def port(text: str) -> int:
    """Of TCP, from a flag; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, expected 0 to 65535")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def positive(number: str, text: str, expected: str) -> float:
    """The `number` in the `text` of a flag, which is `expected`."""
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
