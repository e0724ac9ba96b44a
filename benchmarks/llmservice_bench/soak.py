"""A soak test: many concurrent streams, of which some are cut at random, and the server's memory."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """`streams` concurrent streams from `url` of up to `max_tokens` tokens each; a `cut_share` of them is cut."""

    url: str
    model: str
    streams: int = 500
    cut_share: float = 1 / 3
    max_prompt_tokens: int = 64
    max_tokens: int = 32
    seed: int = 0


@dataclass(slots=True)
class SoakCounts:
    """The number of streams by outcome; `errors` are those of streams that were not cut."""

    finished: int = 0
    cut: int = 0
    tokens: int = 0  # events with a token
    errors: list[str] = field(default_factory=list)


async def soak(config: SoakConfig, is_over: Callable[[SoakCounts], bool]) -> SoakCounts:
    """Keep `streams` streams running until `is_over`, then wait for the last."""
    counts = SoakCounts()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def worker(chance: random.Random) -> None:
            while not is_over(counts):
                await _stream(session, config, chance, counts)

        seeds = random.Random(config.seed)  # noqa: S311  # a load, no secret
        await asyncio.gather(*(worker(random.Random(seeds.random())) for _ in range(config.streams)))  # noqa: S311
    return counts


async def _stream(
    session: aiohttp.ClientSession, config: SoakConfig, chance: random.Random, counts: SoakCounts
) -> None:
    max_tokens = chance.randint(1, config.max_tokens)
    cut_after = chance.randrange(max_tokens + 1) if chance.random() < config.cut_share else None
    try:
        async with session.post(f"{config.url}/v1/completions", json=_body(config, chance, max_tokens)) as response:
            if response.status != 200:
                counts.errors.append(f"{response.status}: {(await response.text())[:200]}")
                return
            await _read(response, cut_after, counts)
    except aiohttp.ClientError as error:
        counts.errors.append(f"{type(error).__name__}: {error}")


def _body(config: SoakConfig, chance: random.Random, max_tokens: int) -> dict[str, Any]:
    return {
        "model": config.model,
        "prompt": [chance.randrange(5, 200) for _ in range(chance.randint(1, config.max_prompt_tokens))],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


async def _read(response: aiohttp.ClientResponse, cut_after: int | None, counts: SoakCounts) -> None:
    """Read a stream to the end, or disconnect after `cut_after` events."""
    events = 0
    while cut_after is None or events < cut_after:
        event = await response.content.readuntil(b"\n\n") if not response.content.at_eof() else b""
        data = event.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            counts.finished += 1
            return
        if not data or "error" in json.loads(data):
            counts.errors.append(f"broken off: {data[:200].decode(errors='replace') or 'without a word'}")
            return
        events += 1
        counts.tokens += 1
    counts.cut += 1
    response.close()


def resident_bytes(process_id: int) -> int:
    """Anonymous memory of a process and its children, without mapped files."""
    total = 0
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            total = int(line.split()[1]) * 1024
    for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split():
        total += resident_bytes(int(child))
    return total
