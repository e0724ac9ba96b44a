"""What embeddings cost those who generate: the time between their tokens with and without /v1/embeddings beside them.

One server, and phases by turns, so that a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from llmservice_bench.models import checkpoint
from llmservice_bench.report import Distribution
from llmservice_bench.toy_server import LLMSERVICE, started

MODEL = "small"
NUM_STREAMS = 8
NUM_TOKENS = 100
PHASES = 4
"""Of each kind, after one that is not counted."""


@dataclass(slots=True)
class _Phase:
    """What one kind of phase showed so far."""

    itl_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    embedded_tokens: int = 0


async def measure_embeddings(num_inputs: int, input_tokens: int) -> dict[str, Any]:
    """`NUM_STREAMS` streams, and in every other phase one client that has `num_inputs` embedded again and again."""
    model = str(await asyncio.to_thread(checkpoint, MODEL))
    flags = ("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory", "512MiB")
    phases = {False: _Phase(), True: _Phase()}
    async with (
        started(LLMSERVICE, "serve", "--model", model, *flags) as server,
        aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        for number in range(PHASES + 1):
            for beside, phase in phases.items():
                await _run(session, phase if number else _Phase(), [[5] * input_tokens] * num_inputs if beside else [])
    alone, with_embeddings = (Distribution.of(phases[beside].itl_s) for beside in (False, True))
    return {
        "inputs": num_inputs,
        "tokens_per_input": input_tokens,
        "alone_tokens_per_s": phases[False].tokens / phases[False].seconds,
        "beside_tokens_per_s": phases[True].tokens / phases[True].seconds,
        "embedded_tokens_per_s": phases[True].embedded_tokens / phases[True].seconds,
        "alone_itl_p50_ms": alone.p50 * 1000,
        "beside_itl_p50_ms": with_embeddings.p50 * 1000,
        "alone_itl_p99_ms": alone.p99 * 1000,
        "beside_itl_p99_ms": with_embeddings.p99 * 1000,
        "itl_p99_ratio": with_embeddings.p99 / alone.p99,
    }


async def _run(session: aiohttp.ClientSession, phase: _Phase, inputs: list[list[int]]) -> None:
    embedding = asyncio.create_task(_embed(session, phase, inputs)) if inputs else None
    started_s = time.perf_counter()
    await asyncio.gather(*(_stream(session, phase) for _ in range(NUM_STREAMS)))
    phase.seconds += time.perf_counter() - started_s
    phase.tokens += NUM_STREAMS * NUM_TOKENS
    if embedding is not None:
        embedding.cancel()
        await asyncio.wait([embedding])


async def _stream(session: aiohttp.ClientSession, phase: _Phase) -> None:
    body = {"model": MODEL, "prompt": "Say", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    last_s: float | None = None
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            if last_s is not None:
                phase.itl_s.append(now_s - last_s)
            last_s = now_s


async def _embed(session: aiohttp.ClientSession, phase: _Phase, inputs: list[list[int]]) -> None:
    while True:
        async with session.post("/v1/embeddings", json={"model": MODEL, "input": inputs}) as response:
            response.raise_for_status()
            phase.embedded_tokens += json.loads(await response.read())["usage"]["prompt_tokens"]
