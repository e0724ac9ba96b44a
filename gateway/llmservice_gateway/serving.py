"""The gateway's process: sockets, watches, and draining on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from kubernetes.aio.config import ConfigException

from llmservice_gateway.app import Gateway, GatewayConfig
from llmservice_gateway.reflector import KubernetesAPI
from llmservice_gateway.routing import Routing
from llmservice_planner.command import CommandError

logger = logging.getLogger(__name__)

_SCRAPE_S = 1.0
"""Time for a running scrape to finish at the end."""


async def run_gateway(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish within the drain timeout.

    Raises:
        CommandError: no cluster is configured, or a port is taken.
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
        following.add_done_callback(lambda _: stop.set())  # a gateway that no longer follows the cluster must end
        try:
            await _serve(Gateway(routing, config), args, stop)
        finally:
            following.cancel()
            await asyncio.wait([following])
    if not following.cancelled():
        following.result()  # raises its error
    return 0


async def _serve(gateway: Gateway, args: argparse.Namespace, stop: asyncio.Event) -> None:
    shares_port = args.metrics_port == args.port != 0
    async with AsyncExitStack() as stack:
        if not shares_port:  # started first, so that it is served until the drain is over
            metrics = await stack.enter_async_context(
                _listening(gateway.metrics_app(), args.host, args.metrics_port, "--metrics-port", _SCRAPE_S)
            )
            logger.info("metrics on %s", metrics)
        api = gateway.app(serves_metrics=shares_port)
        addresses = await stack.enter_async_context(_listening(api, args.host, args.port, "--port", args.drain_timeout))
        logger.info("listening on %s", addresses)
        await stop.wait()
        gateway.draining = True
        logger.info("draining: up to %g s", args.drain_timeout)


@asynccontextmanager
async def _listening(
    app: web.Application, host: str, port: int, flag: str, shutdown_timeout_s: float
) -> AsyncIterator[str]:
    """Serve `app`; yields the addresses. Raises CommandError, which names the port's `flag`, where it is in use."""
    # A handler is cancelled when its client leaves, which closes the connection to the pod and frees its blocks.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = f"{os.strerror(error.errno) if error.errno else error}: choose another {flag} or --host"
            raise CommandError(f"cannot listen on {host}:{port}: {why}") from error
        yield ", ".join(f"{address}:{number}" for address, number, *_ in runner.addresses)
    finally:
        await runner.cleanup()
