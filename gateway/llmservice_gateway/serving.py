"""The gateway's process: sockets, watches, and draining on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket

from kubernetes.aio.config import ConfigException

from llmservice_gateway.access.admission import Access
from llmservice_gateway.access.counters import SharedCounters
from llmservice_gateway.access.keys import Keyring
from llmservice_gateway.access.limits import Limiter
from llmservice_gateway.access.signing import Signer
from llmservice_gateway.app import Gateway
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.reflector import KubernetesAPI
from llmservice_gateway.requests.holding import HoldLimits
from llmservice_gateway.requests.inference import GatewayConfig
from llmservice_gateway.routing.table import Routing
from llmservice_gateway.tls import Certificate
from llmservice_httpserver.listening import HttpServer, bind
from llmservice_httpserver.protocol import BoundedHttpProtocol
from llmservice_planner.addresses import endpoint
from llmservice_planner.command import CommandError
from llmservice_planner.key_file import KeyFileError

logger = logging.getLogger(__name__)


async def run_gateway(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish within the drain timeout.

    Raises:
        CommandError: no cluster is configured, or keys cannot be used.
        CertificateError, ListenError: the certificate cannot be used, or a port is taken.
    """
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    hold = HoldLimits(args.max_held_requests, args.max_held_mib * 1024**2, args.hold_timeout)
    config = GatewayConfig(args.max_body_mib * 1024**2, args.read_timeout, args.client_timeout, hold)
    certificate = _certificate(args)
    limiter, signer = _limiter(args), _signer(args)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        api = await KubernetesAPI.connect()
    except ConfigException as error:
        raise CommandError(f"no cluster to follow: {error}: set KUBECONFIG, or run it in a pod") from error
    async with api:
        routing, metrics = Routing(api, args.namespace), GatewayMetrics()
        access = None
        following = [asyncio.create_task(routing.run())]
        if args.keys_namespace is None:
            logger.warning(
                "no API keys are required: whoever reaches this gateway may use every model (see --keys-namespace)"
            )
        else:
            access = Access(Keyring(api, args.keys_namespace, limiter.why_unusable), limiter, metrics, signer)
            following.append(asyncio.create_task(access.run()))
        gateway = Gateway(routing, config, access, metrics)
        for task in following:
            task.add_done_callback(lambda _: stop.set())  # a gateway that no longer follows the cluster must end
        try:
            await _serve(gateway, args, certificate, stop)
        finally:
            await gateway.close()
            for task in following:
                task.cancel()
            await asyncio.wait(following)
            await limiter.close()
    for task in following:
        if not task.cancelled():
            task.result()  # raises its error
    return 0


def _limiter(args: argparse.Namespace) -> Limiter:
    if args.keys_namespace is None and (args.redis_url or args.signing_keys):
        raise CommandError("--redis-url and --signing-keys are for API keys: set --keys-namespace as well")
    try:
        return Limiter(SharedCounters(args.redis_url) if args.redis_url else None, args.replicas)
    except ValueError as error:
        raise CommandError(f"--redis-url: {error}") from None


def _signer(args: argparse.Namespace) -> Signer | None:
    try:
        return None if args.signing_keys is None else Signer(args.signing_keys)
    except KeyFileError as error:
        raise CommandError(f"--signing-keys: {error}") from None


async def _serve(
    gateway: Gateway, args: argparse.Namespace, certificate: Certificate | None, stop: asyncio.Event
) -> None:
    shares_port = args.metrics_port == args.port != 0
    tls = None if certificate is None else certificate.context
    api = HttpServer(
        gateway.app(serves_metrics=shares_port, cors_allow_origins=args.cors_allow_origin),
        BoundedHttpProtocol.with_timeout(args.client_timeout),
        ssl_context_factory=None if tls is None else lambda *_: tls,
        timeout_graceful_shutdown=args.drain_timeout,
    )
    servers = [(api, bind(args.host, args.port, "--port"))]
    if not shares_port:
        servers.append((HttpServer(gateway.metrics_app()), bind(args.host, args.metrics_port, "--metrics-port")))
        logger.info("metrics on %s", _address(servers[1][1]))
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(server.serve(sockets=[listener])) for server, listener in servers]
        following = None if certificate is None else group.create_task(certificate.follow())
        gc.collect()
        gc.freeze()  # what is loaded now stays: collections, which delay requests, need not scan it
        logger.info("listening on %s", _address(servers[0][1]))
        await stop.wait()
        gateway.draining = True
        logger.info("draining: up to %g s", args.drain_timeout)
        api.should_exit = True
        await serving[0]
        api.abort_connections()
        for server, _ in servers[1:]:  # served until the drain is over
            server.should_exit = server.force_exit = True
        if following is not None:
            following.cancel()


def _address(listener: socket.socket) -> str:
    address, port, *_ = listener.getsockname()
    return endpoint(address, port)


def _certificate(args: argparse.Namespace) -> Certificate | None:
    if (args.tls_cert is None) != (args.tls_key is None):
        raise CommandError("--tls-cert and --tls-key belong together: give both, or none for plain HTTP")
    return None if args.tls_cert is None else Certificate(args.tls_cert, args.tls_key)
