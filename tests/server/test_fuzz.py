"""Ten thousand damaged bodies: each is answered below 500, and afterwards the engine is alive and every block free."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

NUM_BODIES = 10_000
CONCURRENCY = 48
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "Hello you", "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}),
    ("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "n": 2, "seed": 3, "stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": [[5], [6, 7]], "max_tokens": 1, "top_k": 5, "logprobs": 2}),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": "a", "max_tokens": 2, "logit_bias": {"7": -5}, "echo": True, "min_p": 0.1},
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_completion_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        },
    ),
    ("/v1/embeddings", {"model": "tiny", "input": ["one", "two"], "dimensions": 8, "encoding_format": "base64"}),
    ("/v1/embeddings", {"model": "tiny", "input": [[5, 6], [7]]}),
    ("/tokenize", {"model": "tiny", "prompt": "Hello", "add_special_tokens": False}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
]
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -0.0),
    *("", "\x00", "\ufeff", "\ud800", "🙂" * 50, "a" * 3000, "NaN", "-1", "<|im_start|>", "{{7*7}}"),
    *([], {}, [[]], [None], [[[]]], {"": {}}, {"type": "text"}, {"$ref": "#"}, [1, "a"], [-1], [2**40]),
]
FRAGMENTS = [b"", b"{", b"}", b"[", b'"', b"\\", b"\\u", b"\xff", b"\x00", b"1e999", b"NaN", b"-", b",", b"null"]
FRAGMENTS += [b"[" * 3000, b'{"a":' * 3000, b"9" * 3000]


def _damage_value(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts, however deep, replaced, dropped, doubled or joined by another."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        match chance.randrange(5):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return value | {chance.choice(["x", "n", "logprobs", "tools", "top_p", ""]): chance.choice(NASTY)}
            case _:
                return value | {key: _damage_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.6:
        place = chance.randrange(len(value))
        return [*value[:place], _damage_value(value[place], chance), *value[place + chance.randrange(2) :]]
    return chance.choice(NASTY)


def _damage_bytes(body: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(body))
    end = min(len(body), start + chance.choice([0, 1, 1, 4, 40]))
    return body[:start] + chance.choice(FRAGMENTS) + body[end:]


def _body(seed: dict[str, Any], chance: random.Random) -> bytes:
    value: Any = seed
    for _ in range(chance.randrange(3)):
        value = _damage_value(value, chance)
    body = json.dumps(value).encode()
    for _ in range(chance.choice([0, 0, 1, 2])):
        body = _damage_bytes(body, chance) if body else body
    return body


async def test_ten_thousand_damaged_bodies_neither_break_nor_leak_anything(start_server: Callable[..., Any]) -> None:
    server = start_server("--max-num-seqs", "32").wait_until_ready()
    url, chance = server.url, random.Random(11)  # noqa: S311  # a load, no secret
    bodies = [(path, _body(seed, chance)) for path, seed in (chance.choice(SEEDS) for _ in range(NUM_BODIES))]
    statuses: Counter[int] = Counter()

    async def worker(session: aiohttp.ClientSession) -> None:
        while bodies:
            path, body = bodies.pop()
            async with session.post(url + path, data=body, headers={"content-type": "application/json"}) as response:
                await response.read()
                assert response.status < 500, (path, body[:2000])
                statuses[response.status] += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
        await asyncio.gather(*(worker(session) for _ in range(CONCURRENCY)))
    assert statuses.total() == NUM_BODIES
    assert min(statuses[200], statuses[400]) > NUM_BODIES // 10  # both sides of the line were tried
    server.wait_until_idle()
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "Hello"})[0] == 200
    assert not [line for line in server.log if line["level"] in ("warning", "error")]
    assert server.errors == []
