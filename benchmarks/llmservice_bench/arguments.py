"""Arguments that every load takes: whom to ask, with what, and how it is reported."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmservice_bench.goodput import FORM


def positive(text: str) -> float:
    """For argparse: a number above 0, infinity included."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return value


def positive_int(text: str) -> int:
    """For argparse: a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of the server, without /v1")
    parser.add_argument("--model", required=True, help="the model to ask for")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument("--ignore-eos", action="store_true", help="ask for the trace's output lengths exactly")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="longer has failed")


def add_requests(parser: argparse.ArgumentParser, trace: str) -> None:
    parser.add_argument("--trace", type=Path, metavar="CSV", help=trace)
    parser.add_argument("--scale", type=positive, default=1.0, help="multiply the trace's lengths by this")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same requests")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=f"what each request is promised, as {FORM}")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table", help="on the terminal")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the JSON there as well")
