"""Tokens per second through the HTTP process, between a stub engine and clients on plain sockets."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from llmservice_bench.models import checkpoint, started
from pieces.start import children
from pieces.timing import cpu_s

STUB_SERVER, CLIENTS = (
    str(Path(__file__).resolve().parents[1] / name) for name in ("stub_server.py", "stream_clients.py")
)
NUM_STREAMS = 256
LONGEST_ITL_MS = 100.0
"""The p99 ITL below which a pace counts as sustained. The share of the offered tokens that arrives is less meaningful:
a new stream misses the steps of its TTFT, which are more at a faster pace."""


@dataclass(frozen=True, slots=True)
class HttpRun:
    """The clients' figures at one pace, and the CPU usage of each process in cores."""

    offered_tokens_per_s: float
    traced: bool
    figures: dict[str, Any]
    http_process_busy: float
    engine_busy: float

    @property
    def is_sustained(self) -> bool:
        return bool(self.figures["itl_p99_ms"] <= LONGEST_ITL_MS)

    @property
    def row(self) -> dict[str, Any]:
        return {
            "tracing": "on" if self.traced else "off",
            "offered_tokens_per_s": self.offered_tokens_per_s,
            **self.figures,
            "http_process_busy": self.http_process_busy,
            "engine_busy": self.engine_busy,
            "tokens_per_core_second": self.figures["output_tokens_per_s"] / self.http_process_busy,
        }


async def measure_http(num_streams: int, period_s: float, seconds: float, *, traced: bool = False) -> HttpRun:
    """Run `num_streams` streams from an engine that generates a token for each every `period_s`.

    `traced`: every request is a span that is sent to a collector on loopback.
    """
    command = (sys.executable, STUB_SERVER, str(checkpoint("toy")), str(period_s), str(num_streams))
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(_collector()) if traced else {}
        server = await stack.enter_async_context(started(*command, environment=environment))
        engine_id = children(server.process_id)[0]
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, CLIENTS, server.url.removeprefix("http://"), "stub", str(num_streams), str(seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert clients.stdout is not None  # noqa: S101 - the process has a pipe
        await clients.stdout.readline()
        before = cpu_s(server.process_id), cpu_s(engine_id)
        line = await clients.stdout.readline()
        after = cpu_s(server.process_id), cpu_s(engine_id)
        if await clients.wait():
            raise SystemExit("the clients failed: see above")
    http_s, engine_s = (end - begin for begin, end in zip(before, after, strict=True))
    return HttpRun(num_streams / period_s, traced, json.loads(line), http_s / seconds, engine_s / seconds)


@asynccontextmanager
async def _collector() -> AsyncIterator[dict[str, str]]:
    """A collector that discards spans; yields the environment that names it. Raises SystemExit if it gets none."""
    num_exports = 0

    async def discard(request: web.Request) -> web.Response:
        nonlocal num_exports
        num_exports += 1
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/traces", discard)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    finally:
        await runner.cleanup()
    if not num_exports:
        raise SystemExit("the server sent no spans")


def sustained_tokens_per_s(runs: Sequence[HttpRun]) -> float:
    """The highest throughput at a sustained pace, or 0."""
    return max((run.figures["output_tokens_per_s"] for run in runs if run.is_sustained), default=0.0)
