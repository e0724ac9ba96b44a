"""`llmservice gateway`: the entry point for the LLMServices of a cluster, or of some namespaces."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from pathlib import Path

from llmservice_planner.addresses import ANY_ADDRESS
from llmservice_planner.command import Command, port, positive


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default=ANY_ADDRESS, help="address to listen on (default: all, IPv4 and IPv6)")
    parser.add_argument("--port", type=port, default=8080, help="port to listen on; 0 takes a free one and logs it")
    parser.add_argument(
        "--metrics-port",
        type=port,
        default=8001,
        metavar="PORT",
        help="port of /metrics; the same as --port serves both there, 0 takes a free one and logs it",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="follow this namespace only; may be repeated"
    )
    parser.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long requests may finish after SIGTERM",
    )
    parser.add_argument(
        "--max-body-mib", type=int, default=16, metavar="MIB", help="larger requests are refused with 413"
    )
    parser.add_argument(
        "--read-timeout",
        type=_positive_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a pod may stay silent in the middle of an answer",
    )
    parser.add_argument(
        "--client-timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long a client may take to send a request's head, or its body (408), or to read what it is sent",
    )
    parser.add_argument(
        "--hold-timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a request waits for a service without a ready pod, which it starts; 0: not at all",
    )
    parser.add_argument(
        "--max-held-requests", type=int, default=1000, metavar="N", help="more are refused with 503 and Retry-After"
    )
    parser.add_argument(
        "--max-held-mib", type=int, default=256, metavar="MIB", help="of their bodies; more are refused likewise"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: serve HTTPS on --port")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key; both are reloaded when they change")
    parser.add_argument(
        "--cors-allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin (https://HOST, or *) call the API; may be repeated",
    )
    _add_key_arguments(parser)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def _add_key_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keys-namespace",
        metavar="NAME",
        help="require API keys: those of this namespace's Secrets with the label serving.llmservice.io/api-key=true, as"
        " `llmservice api-key` makes them (default: no key is needed)",
    )
    parser.add_argument(
        "--signing-keys",
        type=Path,
        metavar="FILE",
        help="sign requests for the pods: signing-keys.yaml of the Secret that `llmservice signing-key` makes; it is"
        " read again when it changes",
    )
    parser.add_argument(
        "--redis-url",
        default=os.environ.get("LLMSERVICE_REDIS_URL"),
        metavar="URL",
        help="count limits of keys over all gateways: redis://HOST:PORT/DB, or rediss:// with TLS"
        " (env LLMSERVICE_REDIS_URL; default: each gateway counts for itself)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="gateways; without Redis, or while it cannot be reached, each allows 1/N of each limit",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _positive_seconds(text: str) -> float:
    return positive(text, text, "a number of seconds above 0")


def _run(args: argparse.Namespace) -> int:
    import uvloop

    from llmservice_gateway.serving import run_gateway

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_gateway(args))


COMMAND = Command(
    help="route OpenAI requests to the ready pods of each LLMService",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("aiohttp", "fastapi", "jwt", "kubernetes", "prometheus_client", "redis", "uvicorn", "uvloop"),
)
