"""The operator's own endpoints: /healthz for the kubelet, /metrics for Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from llmservice_operator.monitoring.metrics import OperatorMetrics


@asynccontextmanager
async def serve_http(host: str, port: int, metrics: OperatorMetrics, healthy: Callable[[], bool]) -> AsyncIterator[int]:
    """Serve until the context ends; yields the port, which is a free one where `port` is 0."""

    async def healthz(_: web.Request) -> web.Response:
        return (
            web.Response(text="ok\n") if healthy() else web.Response(status=503, text="not watching the API server\n")
        )

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
