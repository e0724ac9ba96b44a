"""The number of chunks per stream, and the latency of `/health` meanwhile, with a stub engine that never pauses.

A chunk is the result of one read of a client's socket. If tokens are sent step by step, a stream has about as many
chunks as tokens; if the event loop is blocked while steps are queued, it has few.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from statistics import median
from typing import Any

from llmservice_bench.models import checkpoint, started
from llmservice_bench.report import Distribution
from pieces.http_path import STUB_SERVER

NUM_STREAMS = 16
NUM_TOKENS = 300
ROUNDS = 5
_PROBE_PERIOD_S = 0.01
_READ_BYTES = 1 << 20


async def measure_stream_chunks() -> dict[str, Any]:
    """Run `ROUNDS` of `NUM_STREAMS` streams; `/health` is requested every 10 ms on its own connection."""
    model = str(await asyncio.to_thread(checkpoint, "toy"))
    async with started(sys.executable, STUB_SERVER, model, "0", str(NUM_STREAMS)) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        await _stream(host, int(port))  # the first request includes lazy initialisation
        latencies: list[float] = []
        chunks: list[int] = []
        async with asyncio.TaskGroup() as group:  # which fails where a probe does
            probing = group.create_task(_probe(host, int(port), latencies))
            started_s = time.perf_counter()
            for _ in range(ROUNDS):
                chunks += await asyncio.gather(*(_stream(host, int(port)) for _ in range(NUM_STREAMS)))
            took_s = time.perf_counter() - started_s
            probing.cancel()
    health = Distribution.of(latencies)
    return {
        "streams": NUM_STREAMS,
        "tokens_per_stream": NUM_TOKENS,
        "output_tokens_per_s": ROUNDS * NUM_STREAMS * NUM_TOKENS / took_s,
        "network_chunks_per_stream_p50": median(chunks),
        "network_chunks_per_stream_min": min(chunks),
        "health_p50_ms": health.p50 * 1000,
        "health_p99_ms": health.p99 * 1000,
        "health_probes": len(latencies),
    }


async def _stream(host: str, port: int) -> int:
    """The number of chunks of one response, without its head."""
    body = {"model": "stub", "prompt": "Say", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(content) + content)
    answer, chunks = b"", -1
    while data := await reader.read(_READ_BYTES):
        answer, chunks = answer + data, chunks + 1
    writer.close()
    if b"data: [DONE]" not in answer:
        raise SystemExit(f"a stream broke off: {answer[:200]!r}")
    return chunks


async def _probe(host: str, port: int, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        while True:
            started_s = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            latencies.append(time.perf_counter() - started_s)
            await asyncio.sleep(_PROBE_PERIOD_S)
    finally:
        writer.close()
