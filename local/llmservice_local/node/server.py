"""The node's HTTP server, from which the API server gets container logs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from llmservice_local.node import logs
from llmservice_local.node.pod_worker import PodWorker

_KNOWN = {"follow", "tailLines", "limitBytes", "previous", "timestamps", "insecureSkipTLSVerifyBackend"}

Find = Callable[[str, str], PodWorker | None]
"""(namespace, name) -> the worker of a pod on this node."""


@asynccontextmanager
async def serve_node(find: Find, host: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve on a free port of `host`, which is yielded; with TLS if a context is given."""
    application = web.Application()
    application.router.add_get("/healthz", _health)
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", _Logs(find).handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0, ssl_context=tls)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _health(request: web.Request) -> web.Response:
    del request
    return web.Response(text="ok")


class _Logs:
    def __init__(self, find: Find) -> None:
        self._find = find

    async def handle(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        if unknown := {
            name for name in query if name not in _KNOWN or (name == "timestamps" and _is_true(query, name))
        }:
            return web.Response(
                status=400, text=f"logs: {', '.join(sorted(unknown))} is not supported by the local node"
            )
        name, container_name = request.match_info["pod"], request.match_info["container"]
        worker = self._find(request.match_info["namespace"], name)
        container = worker.container(container_name) if worker is not None else None
        if container is None:
            return web.Response(status=404, text=f"container {container_name} of pod {name} is not on this node")
        previous = _is_true(query, "previous")
        path = container.log_path(previous=previous)
        if path is None:
            if previous:
                message = f'previous terminated container "{container_name}" in pod "{name}" not found'
            else:
                reason = (container.state.get("waiting") or {}).get("reason", "ContainerCreating")
                message = f'container "{container_name}" in pod "{name}" is waiting to start: {reason}'
            return web.Response(status=400, text=message)
        offset = logs.tail(path, int(query["tailLines"])) if query.get("tailLines", "").isdigit() else 0
        limit = int(query["limitBytes"]) if query.get("limitBytes", "").isdigit() else None
        follow = _is_true(query, "follow") and not previous

        def growing() -> bool:
            return follow and container.log_path() == path and "running" in container.state

        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for chunk in logs.read(path, offset, limit, growing):
            await response.write(chunk)
        return response


def _is_true(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in {"1", "t", "true"}


async def self_signed(folder: Path, name: str) -> ssl.SSLContext:
    """A TLS context with a new self-signed certificate, which a real API server accepts; raises `OSError`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise FileNotFoundError("openssl is not on the PATH: it makes the node's certificate")
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    process = await asyncio.create_subprocess_exec(
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", f"/CN=system:node:{name}",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    if status := await process.wait():
        raise OSError(f"openssl req ended with status {status}")
    key.chmod(0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
