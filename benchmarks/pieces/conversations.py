"""Conversations over several pods through the gateway: prefixes found in the caches, load of the pods, latency.

The engines are real but for a model that takes time and computes nothing. A conversation sends its whole history with
each turn. All setups have the same memory for the cache: together it holds all conversations, a single pod of four does
not.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import aiohttp

from llmservice_bench.client import events
from llmservice_bench.models import checkpoint, started
from llmservice_bench.report import Distribution
from llmservice_bench.results import Check
from pieces.gateway_fleet import cluster, metrics
from pieces.http_path import STUB_SERVER

NUM_PODS, NUM_CONVERSATIONS, NUM_TURNS, NUM_SYSTEM_PROMPTS = 4, 50, 8, 5
SYSTEM_WORDS, USER_WORDS, OUTPUT_TOKENS = 200, 20, 64
STEP_S, TOKEN_S = 0.015, 0.0002
"""Of a step, and of each of its tokens: 5,000 tokens of a prompt per second."""
NUM_SEQS, NUM_TOKENS_EACH = 16, 2000
"""Of each of four pods."""
THINK_S = 2.0
"""Mean time between an answer and the next turn."""
WINDOW_S, SAMPLE_S = 10.0, 0.25
WORDS = ("rain", "plain", "river", "stone", "light", "paper", "north", "glass", "field", "winter")


@dataclass
class Run:
    """What the clients and the pods of one setup measured."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    tokens: int = 0
    active: int = 0
    """Conversations that are not over."""
    loads: list[tuple[float, list[float]]] = field(default_factory=list)
    """Time, and the requests in each pod, while all conversations are active."""

    def imbalance(self) -> float:
        """The largest ratio of a pod's load to the mean, both averaged over `WINDOW_S`, of successive windows."""
        begun_s = self.loads[0][0]
        windows: dict[int, list[list[float]]] = {}
        for when_s, loads in self.loads:
            windows.setdefault(int((when_s - begun_s) / WINDOW_S), []).append(loads)
        whole = list(windows.values())[:-1]  # the last one is cut short
        means = [[fmean(pod) for pod in zip(*window, strict=True)] for window in whole]
        return max(max(pods) / fmean(pods) for pods in means)


async def measure_conversations() -> tuple[list[dict[str, Any]], list[Check]]:
    """A row for each setup, and the targets."""
    single = await _setup("one pod", 1, None)
    least = await _setup("leastLoad", NUM_PODS, "leastLoad")
    affine = await _setup("prefixAffinity", NUM_PODS, "prefixAffinity")
    rows = [single, least, affine]
    checks = [
        Check("affinity: prefix hit rate ÷ a single pod's", ">= 0.9", affine["hit_share"] / single["hit_share"]),
        Check("affinity: load of the busiest pod over 10 s ÷ the mean", "<= 1.35", affine["load_max_of_mean"]),
        Check("affinity: TTFT p50 ÷ leastLoad's", "<= 1", affine["ttft_p50_ms"] / least["ttft_p50_ms"]),
        Check("affinity: tokens/s ÷ leastLoad's", ">= 1", affine["tokens_per_s"] / least["tokens_per_s"]),
    ]
    return rows, checks


async def _setup(name: str, num_pods: int, strategy: str | None) -> dict[str, Any]:
    num_seqs = NUM_SEQS * NUM_PODS // num_pods
    model = str(await asyncio.to_thread(checkpoint, "toy"))
    engine = (str(STEP_S), str(num_seqs), str(TOKEN_S), str(NUM_TOKENS_EACH))
    async with AsyncExitStack() as stack:
        command = (sys.executable, STUB_SERVER, model, *engine)
        pods = [await stack.enter_async_context(started(*command)) for _ in range(num_pods)]
        api = await stack.enter_async_context(cluster())
        ports = [int(pod.url.rpartition(":")[2]) for pod in pods]
        await api.add_service("stub", ports, num_seqs, strategy)
        front = await stack.enter_async_context(api.gateway())
        run = Run(active=NUM_CONVERSATIONS)
        sampling = asyncio.create_task(_sample([pod.metrics_url for pod in pods], run))
        started_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(front.url, connector=connector) as session, asyncio.TaskGroup() as group:
            for number in range(NUM_CONVERSATIONS):
                group.create_task(_converse(session, number, run))
        took_s = time.monotonic() - started_s
        sampling.cancel()
        totals = [await metrics(pod.metrics_url) for pod in pods]
    queries, hits = (
        sum(each[f"llmservice_prefix_cache_{what}_total"] for each in totals) for what in ("queries", "hits")
    )
    ttft, itl = Distribution.of(run.ttft_s), Distribution.of(run.itl_s)
    return {
        "setup": name,
        "pods": num_pods,
        "turns": len(run.ttft_s),
        "hit_share": hits / queries,
        "load_max_of_mean": run.imbalance() if num_pods > 1 else None,
        "tokens_per_s": run.tokens / took_s,
        "ttft_p50_ms": ttft.p50 * 1000,
        "ttft_p99_ms": ttft.p99 * 1000,
        "itl_p50_ms": itl.p50 * 1000,
        "itl_p99_ms": itl.p99 * 1000,
    }


async def _sample(urls: list[str], run: Run) -> None:
    names = "llmservice_num_requests_running", "llmservice_num_requests_waiting"
    while run.active == NUM_CONVERSATIONS:
        totals = await asyncio.gather(*map(metrics, urls))
        run.loads.append((time.monotonic(), [sum(each[name] for name in names) for each in totals]))
        await asyncio.sleep(SAMPLE_S)


async def _converse(session: aiohttp.ClientSession, number: int, run: Run) -> None:
    dice = random.Random(number)  # noqa: S311 - traffic, not secrets
    topic = random.Random(1000 + number % NUM_SYSTEM_PROMPTS)  # noqa: S311 - likewise
    messages = [{"role": "system", "content": " ".join(topic.choices(WORDS, k=SYSTEM_WORDS))}]
    await asyncio.sleep(dice.uniform(0, 2 * THINK_S))
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": " ".join(dice.choices(WORDS, k=USER_WORDS))})
        messages.append({"role": "assistant", "content": await _turn(session, messages, run)})
        await asyncio.sleep(dice.uniform(0, 2 * THINK_S))
    run.active -= 1


async def _turn(session: aiohttp.ClientSession, messages: list[dict[str, str]], run: Run) -> str:
    body = {
        "model": "stub",
        "messages": messages,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    answer, started_s, last_s = "", time.monotonic(), 0.0
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the gateway answered {response.status}: {await response.text()}")
        async for event in events(response.content):
            if event == b"[DONE]":
                break
            piece = json.loads(event)["choices"][0]["delta"].get("content") or ""
            now = time.monotonic()
            if piece and last_s:
                run.itl_s.append(now - last_s)
            elif piece:
                run.ttft_s.append(now - started_s)
            last_s = now if piece else last_s
            answer += piece
    run.tokens += OUTPUT_TOKENS
    return answer
