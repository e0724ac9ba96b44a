"""`llmservice operator`: watch LLMServices and keep their pods as they should be."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmservice_planner.command import Command, CommandError

if TYPE_CHECKING:
    from llmservice_operator.settings import OperatorSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    env = os.environ.get
    parser.add_argument(
        "--server-image",
        default=env("LLMSERVICE_SERVER_IMAGE", "llmservice-server:0.1.0"),
        help="image of the server pods (env LLMSERVICE_SERVER_IMAGE)",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this namespace; repeatable (default: all)"
    )
    parser.add_argument("--tick", type=float, default=5.0, metavar="SECONDS", help="seconds between two passes")
    parser.add_argument(
        "--prometheus-url",
        default=env("LLMSERVICE_PROMETHEUS_URL"),
        help="read scaling signals from this Prometheus (env LLMSERVICE_PROMETHEUS_URL); else from the pods",
    )
    parser.add_argument(
        "--file-models-root",
        type=Path,
        default=env("LLMSERVICE_FILE_MODELS_ROOT"),
        metavar="DIR",
        help="allow file:///x as DIR/x, a folder that every node has and pods mount by a hostPath"
        " (env LLMSERVICE_FILE_MODELS_ROOT)",
    )
    parser.add_argument(
        "--hf-endpoint",
        default=env("HF_ENDPOINT", "https://huggingface.co"),
        help="hub or mirror that hf:// models come from, for the operator and the pods (env HF_ENDPOINT)",
    )
    parser.add_argument(
        "--share-hf-token",
        action="store_true",
        help="read config.json of everybody's models with this process's HF_TOKEN; without it a gated model is sized by"
        " its first pod",
    )
    parser.add_argument(
        "--usable-secrets",
        action="append",
        default=[],
        metavar="NAMESPACE=NAME,...",
        help="Secrets that LLMServices of a namespace may name, * for all, beside those that the Namespace's annotation"
        " lists; repeatable",
    )
    parser.add_argument(
        "--allow-env",
        action="append",
        default=[],
        metavar="NAME",
        help="let spec.podTemplate.env set this variable, or those of a pattern such as *_PROXY, though it is guarded;"
        " repeatable",
    )
    parser.add_argument(
        "--own-namespace",
        default=env("POD_NAMESPACE"),
        metavar="NAME",
        help="where operator and gateway run: only pods of it are let in as theirs (env POD_NAMESPACE)",
    )
    parser.add_argument(
        "--prometheus-peer",
        action="append",
        default=[],
        metavar="NAMESPACE[:KEY=VALUE,...]",
        help="let these pods scrape the services' pods; * is every namespace; repeatable"
        " (default: *:app.kubernetes.io/name=prometheus)",
    )
    parser.add_argument(
        "--leader-elect", action="store_true", help="of several operators only the one that holds a Lease works"
    )
    parser.add_argument("--lease-name", default="llmservice-operator", metavar="NAME", help="the Lease's name")
    parser.add_argument(
        "--lease-namespace",
        default=env("POD_NAMESPACE"),
        metavar="NAMESPACE",
        help="the Lease's namespace (env POD_NAMESPACE)",
    )
    parser.add_argument(
        "--webhook",
        metavar="NAME",
        help="review LLMServices at apply: the Service that the API server calls, and the Secret with its certificate,"
        " both in --own-namespace",
    )
    parser.add_argument("--webhook-port", type=int, default=9443, help="port of the webhook")
    parser.add_argument(
        "--webhook-configuration",
        metavar="NAME",
        help="give this ValidatingWebhookConfiguration a self-signed certificate (default: cert-manager does)",
    )
    parser.add_argument(
        "--watch-silence", type=float, default=70.0, metavar="SECONDS", help="begin a watch anew that is silent so long"
    )
    parser.add_argument(
        "--resync", type=float, default=300.0, metavar="SECONDS", help="seconds between two lists of what is watched"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address of /metrics and /healthz")
    parser.add_argument("--port", type=int, default=8080, help="port of /metrics; 0 takes a free one")
    parser.add_argument("--health-port", type=int, default=8081, help="port of /healthz")
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="what to log"
    )


def run(args: argparse.Namespace) -> int:
    from llmservice_operator.children.network_policy import DEFAULT_PROMETHEUS, PeerError, platform_peers
    from llmservice_operator.settings import OperatorSettings, WebhookSettings

    if not 0.1 <= args.tick <= 60:
        raise CommandError(f"--tick is {args.tick}, expected 0.1 to 60 seconds")
    try:
        peers = platform_peers(args.own_namespace, args.prometheus_peer or [DEFAULT_PROMETHEUS])
    except PeerError as error:
        raise CommandError(f"--prometheus-peer {error}") from error
    usable_secrets: dict[str, tuple[str, ...]] = {}
    for given in args.usable_secrets:
        namespace, _, names = given.partition("=")
        if not namespace or not names:
            raise CommandError(f"--usable-secrets is {given!r}, expected NAMESPACE=NAME,NAME or NAMESPACE=*")
        usable_secrets[namespace] = usable_secrets.get(namespace, ()) + tuple(names.split(","))
    for flag, value in (("--watch-silence", args.watch_silence), ("--resync", args.resync)):
        if value < 1:
            raise CommandError(f"{flag} is {value}, expected at least 1 second")
    for flag, port in (("--health-port", args.health_port), ("--webhook-port", args.webhook_port)):
        if not 1 <= port <= 65535:
            raise CommandError(f"{flag} is {port}, expected 1 to 65535")
    if args.webhook and not args.own_namespace:
        raise CommandError("--webhook needs --own-namespace, or POD_NAMESPACE in the environment")
    if args.leader_elect and not args.lease_namespace:
        raise CommandError("--leader-elect needs --lease-namespace, or POD_NAMESPACE in the environment")
    settings = OperatorSettings(
        server_image=args.server_image,
        namespaces=tuple(args.namespace),
        tick_s=args.tick,
        prometheus_url=args.prometheus_url or None,
        file_models_root=args.file_models_root,
        hf_endpoint=args.hf_endpoint,
        shares_hf_token=args.share_hf_token,
        usable_secrets=usable_secrets,
        allowed_env=tuple(args.allow_env),
        peers=peers,
        host=args.host,
        port=args.port,
        health_port=args.health_port,
        webhook=WebhookSettings(args.own_namespace, args.webhook, args.webhook_configuration, args.webhook_port)
        if args.webhook
        else None,
        lease_namespace=args.lease_namespace if args.leader_elect else None,
        lease_name=args.lease_name,
        watch_silence_s=args.watch_silence,
        resync_s=args.resync,
    )
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return asyncio.run(_run(settings))


async def _run(settings: OperatorSettings) -> int:
    from kubernetes.aio.config import ConfigException

    from llmservice_operator.framework.operator import OperatorEndedError, run_operator
    from llmservice_operator.leadership.election import LeadershipLostError

    try:
        await run_operator(settings)
    except ConfigException as error:
        raise CommandError(f"no way to the API server: {error}. Set KUBECONFIG, or run inside a cluster") from error
    except LeadershipLostError as error:
        raise CommandError(f"no longer the leader: {error}", status=1) from error
    except (OperatorEndedError, OSError) as error:
        raise CommandError(f"the operator ended, start it again: {error}", status=1) from error
    return 0


COMMAND = Command(
    help="run the control loop: a Deployment, a Service and a scale for every LLMService",
    add_arguments=add_arguments,
    run=run,
    extra="operator",
    requires=("kopf", "kubernetes", "aiohttp", "pydantic"),
)
