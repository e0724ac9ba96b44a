"""A server of the toy model on loopback, for the benchmarks of this machine."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from llmservice_bench.models import checkpoint

LLMSERVICE = str(Path(sys.executable).with_name("llmservice"))
MODEL = "toy"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ToyServer:
    url: str
    metrics_url: str
    process_id: int


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[ToyServer]:
    """A server of the toy model, with more `flags` of `llmservice serve`; it ends with the block."""
    model = await asyncio.to_thread(checkpoint, MODEL)
    command = (
        LLMSERVICE, "serve", "--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", "0",
        "--metrics-port", "0", "--kv-cache-memory", "512MiB", *flags,
    )  # fmt: skip
    async with started(*command) as server:
        yield server


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[ToyServer]:
    """What `command` starts, once it is ready: it logs its ports as `llmservice serve` does. It ends with the block."""
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            port, metrics_port, reading = await _ports(server)
            await _ready(f"http://127.0.0.1:{port}")
        yield ToyServer(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", server.pid)
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()
        await reading


async def _ports(server: asyncio.subprocess.Process) -> tuple[int, int, asyncio.Task[None]]:
    """Those of the API and of /metrics, as the server logs them.

    What it logs after that is read, so that it never blocks, and dropped.
    """
    if server.stdout is None:
        raise RuntimeError("the server was started without a pipe")
    stdout = server.stdout

    async def drain() -> None:
        while await stdout.readline():
            pass

    async for line in stdout:
        if found := re.search(rb'"message":"listening".*"port":(\d+),"metrics_port":(\d+)', line):
            return int(found[1]), int(found[2]), asyncio.create_task(drain())
    raise SystemExit(f"the server ended with status {await server.wait()}")


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
