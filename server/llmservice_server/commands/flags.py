"""Types of command-line values, and the flags that are generated from `EngineConfig`."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llmservice_server.engine.config import EngineConfig, Flag

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_METAVARS = {
    **dict.fromkeys(("tokens", "len", "size"), "TOKENS"),
    **dict.fromkeys(("share", "utilization"), "SHARE"),
    "bytes": "BYTES",
    "s": "SECONDS",
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting of `EngineConfig` that names one, called as the setting without its unit.

    A setting that is on by default, or left open, gets a flag that turns it off.
    """
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    for name, kind, flag in _settings():
        option, default = re.sub(r"_(bytes|s)$", "", name).replace("_", "-"), defaults[name]
        add = functools.partial(parser.add_argument, dest=name, default=default, help=flag.help)
        if kind is bool:
            turns_off = default is not False
            add(f"--no-{option}" if turns_off else f"--{option}", action="store_const", const=not turns_off)
        elif get_origin(kind) is Literal:
            add(f"--{option}", choices=get_args(kind))
        else:
            unit = name.rpartition("_")[2]
            add(f"--{option}", type=flag.parse or _parser(unit, kind), metavar=flag.metavar or _METAVARS.get(unit, "N"))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that `add_engine_arguments` has made flags for."""
    return {name: getattr(args, name) for name, _, _ in _settings()}


def _settings() -> Iterator[tuple[str, Any, Flag]]:
    """Name, type (of `type | None` the type) and flag."""
    for name, hint in get_type_hints(EngineConfig, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, flag = get_args(hint)
            yield name, get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind, flag


def _parser(unit: str, kind: Any) -> Any:
    return {"bytes": memory, "s": duration}.get(unit) or (positive if kind is int else kind)


def memory(text: str) -> int:
    """Bytes: 536870912, 512MiB, 0.5Gi, 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None or (num_bytes := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory, expected bytes or something like 512MiB")
    return num_bytes


def positive(text: str) -> int:
    return _integer(text, 1)


def count(text: str) -> int:
    return _integer(text, 0)


def port(text: str) -> int:
    if (number := _integer(text, 0)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port, expected 0 to 65535")
    return number


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
    return int(text)


def duration(text: str) -> float:
    """Seconds, also as 90s or 2m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, expected seconds, or something like 90s or 2m")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"]


def prefix(text: str) -> str:
    """Of metric names."""
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot begin a metric's name: letters, digits, _ and : only")
    return text
