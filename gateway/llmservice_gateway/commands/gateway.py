"""`llmservice gateway`: the entry point for the LLMServices of a cluster, or of some namespaces."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from pathlib import Path

from llmservice_planner.addresses import ANY_ADDRESS
from llmservice_planner.command import Command, CommandError, count, port, positive, whole_number


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default=ANY_ADDRESS, help="address to listen on (default: all, IPv4 and IPv6)")
    add("--port", type=port, default=8080, help="port to listen on; 0 takes a free one and logs it")
    add(
        "--metrics-port",
        type=port,
        default=8001,
        metavar="PORT",
        help="port of /metrics; the same as --port serves both there, 0 takes a free one and logs it",
    )
    add("--namespace", action="append", default=[], metavar="NAME", help="follow this namespace only; may be repeated")
    add(
        "--drain-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long requests may finish after SIGTERM",
    )
    add("--max-body-mib", type=whole_number, default=16, metavar="MIB", help="larger requests are refused with 413")
    add(
        "--read-timeout",
        type=_positive_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a pod may stay silent in the middle of an answer",
    )
    add(
        "--client-timeout",
        type=_positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long a client may take to send a request's head, or its body (408), or read nothing of its answer",
    )
    add(
        "--hold-timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a request waits for a service without a ready pod, which it starts; 0: not at all",
    )
    add("--max-held-requests", type=count, default=1000, metavar="N", help="more are refused with 503 and Retry-After")
    add("--max-held-mib", type=count, default=128, metavar="MIB", help="of their bodies; more are refused likewise")
    add("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: serve HTTPS on --port")
    add("--tls-key", type=Path, metavar="FILE", help="its key; both are reloaded when they change")
    add(
        "--cors-allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin (https://HOST, or *) call the API; may be repeated",
    )
    _add_key_arguments(parser)
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def _add_key_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--keys-namespace",
        metavar="NAME",
        help="require API keys: those of this namespace's Secrets with the label serving.llmservice.io/api-key=true, as"
        " `llmservice api-key` makes them (default: no key is needed)",
    )
    add(
        "--signing-keys",
        type=Path,
        metavar="FILE",
        help="sign requests for the pods: signing-keys.yaml of the Secret that `llmservice signing-key` makes; it is"
        " read again when it changes",
    )
    add(
        "--redis-url",
        default=os.environ.get("LLMSERVICE_REDIS_URL"),
        metavar="URL",
        help="count limits of keys over all gateways: redis://HOST:PORT/DB, or rediss:// with TLS"
        " (env LLMSERVICE_REDIS_URL; default: each gateway counts for itself)",
    )
    add(
        "--replicas",
        type=whole_number,
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
    from llmservice_gateway.tls import CertificateError
    from llmservice_httpserver.listening import ListenError

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_gateway(args))
    except (CertificateError, ListenError) as error:
        raise CommandError(str(error)) from error


COMMAND = Command(
    help="route OpenAI requests to the ready pods of each LLMService",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("aiohttp", "fastapi", "jwt", "kubernetes", "prometheus_client", "redis", "uvicorn", "uvloop"),
)
