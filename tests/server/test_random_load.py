"""Hundreds of random requests, a tenth of them cancelled: afterwards every block is free and the server answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.slow

CONCURRENCY = 64


def _body(chance: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [chance.randrange(5, 900) for _ in range(1 + min(300, int(chance.paretovariate(1) * 4)))],
        "max_tokens": 1 + min(90, int(chance.paretovariate(1) * 6)),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "top_k": chance.choice([0, 5, 50]),
        "top_p": chance.choice([1, 0.9]),
        "stream": chance.random() < 0.5,
        "n": chance.choice([1, 1, 1, 2]),
    }
    if chance.random() < 0.2:
        body["stop"] = [" the", "ing"]
    return body


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any], cancel_after_s: float | None) -> str:
    try:
        async with asyncio.timeout(cancel_after_s):
            async with session.post(url, json=body) as response:
                await response.read()
                return str(response.status)
    except TimeoutError:
        return "cancelled"


@pytest.mark.parametrize("num_requests", [700, pytest.param(2000, marks=pytest.mark.soak)])
async def test_after_all_of_them_every_block_is_free(start_server: Callable[..., Any], num_requests: int) -> None:
    # Too few blocks for 32 sequences, whose answers are long: one of twenty is preempted, on a busy machine as well.
    few_blocks = ("--kv-cache-memory", "224KiB", "--max-model-len", "400", "--expected-tokens", "1")
    server = start_server(*few_blocks, "--max-num-seqs", "32").wait_until_ready()
    url, chance, turn = f"{server.url}/v1/completions", random.Random(7), asyncio.Semaphore(CONCURRENCY)  # noqa: S311  # a load, no secret

    async def one(session: aiohttp.ClientSession) -> str:
        async with turn:
            cancel_after_s = chance.random() * 0.05 if chance.random() < 0.1 else None
            return await _send(session, url, _body(chance), cancel_after_s)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
        answers = Counter(await asyncio.gather(*(one(session) for _ in range(num_requests))))
    assert set(answers) == {"200", "cancelled"}
    assert answers["cancelled"] > num_requests * 0.03  # of a tenth; the others were faster
    server.wait_until_idle()
    assert server.metric("llmservice_request_success_total", finished_reason="abort") > 0
    assert server.metric("llmservice_request_success_total", finished_reason="error") == 0
    assert server.metric("llmservice_num_preemptions_total", mode="recompute") > 0
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "Hello"})[0] == 200
    assert not [line for line in server.log if line["level"] in ("warning", "error")]
    assert server.errors == []
