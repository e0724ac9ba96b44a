"""The gateway as a process: its socket, its two watches, and its end on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from aiohttp import web
from kubernetes.aio.config import ConfigException

from llmservice_gateway.app import Gateway, GatewayConfig
from llmservice_gateway.cluster_api import KubernetesAPI
from llmservice_gateway.routing import Routing
from llmservice_planner.command import CommandError

logger = logging.getLogger(__name__)


async def run_gateway(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then let what is in flight finish within the drain timeout.

    Raises:
        CommandError: no cluster is configured, or the port is taken.
    """
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = GatewayConfig(max_body_bytes=args.max_body_mib * 1024**2, read_timeout_s=args.read_timeout)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        api = await KubernetesAPI.connect()
    except ConfigException as error:
        raise CommandError(f"no cluster to follow: {error}: set KUBECONFIG, or run it in a pod") from error
    async with api:
        routing = Routing(api, args.namespace)
        following = asyncio.create_task(routing.run())
        following.add_done_callback(lambda _: stop.set())  # a gateway that no longer follows the cluster must not stay
        try:
            await _serve(Gateway(routing, config), args, stop)
        finally:
            following.cancel()
            await asyncio.wait([following])
    if not following.cancelled():
        following.result()  # raises what ended it
    return 0


async def _serve(gateway: Gateway, args: argparse.Namespace, stop: asyncio.Event) -> None:
    # A handler is cancelled when its client leaves: that closes the connection to the pod, which frees its blocks.
    runner = web.AppRunner(
        gateway.app(), handler_cancellation=True, shutdown_timeout=args.drain_timeout, access_log=None
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, args.host, args.port)
        try:
            await site.start()
        except OSError as error:
            raise CommandError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from error
        logger.info("listening on %s", ", ".join(f"{host}:{port}" for host, port, *_ in runner.addresses))
        await stop.wait()
        gateway.draining = True
        logger.info("draining: up to %g s", args.drain_timeout)
    finally:
        await runner.cleanup()
