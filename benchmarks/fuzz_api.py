"""Damaged requests to a real server, or to a gateway in front of it.

python benchmarks/fuzz_api.py [--bodies 20000] [--gateway]      fails where a status is 5xx, /health is slow, or memory
grows

Bodies are valid ones with parts replaced: integers of 1 to 100 digits, NaN, deep nesting, huge strings, duplicate keys,
wrong types, and bytes that are no JSON. Then as many heads, a tenth of them: lengths and encodings that contradict each
other, methods, paths and headers that are none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from llmservice_bench.models import LLMSERVICE, started
from llmservice_bench.soak import resident_bytes
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from pieces.gateway_fleet import cluster

SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "Hello you", "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}),
    ("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "n": 2, "seed": 3, "stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": [[5], [6, 7]], "max_tokens": 1, "top_k": 5, "logprobs": 2}),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": "a", "max_tokens": 2, "logit_bias": {"7": -5}, "echo": True, "min_p": 0.1},
    ),
    (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": "a b c",
            "max_tokens": 2,
            "best_of": 2,
            "bad_words": ["the", "a b"],
            "allowed_token_ids": [5, 6, 7],
            "truncate_prompt_tokens": 2,
            "prompt_logprobs": 1,
            "priority": 3,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {"run": "7"},
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
    (
        "/v1/responses",
        {
            "model": "tiny",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "ok"},
            ],
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "include": ["message.output_text.logprobs"],
            "stream": True,
        },
    ),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": "Hi",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}},
            "reasoning": {"effort": "low"},
        },
    ),
    ("/v1/embeddings", {"model": "tiny", "input": ["one", "two"], "dimensions": 8, "encoding_format": "base64"}),
    ("/v1/embeddings", {"model": "tiny", "input": [[5, 6], [7]]}),
    ("/tokenize", {"model": "tiny", "prompt": "Hello", "add_special_tokens": False}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -0.0, float("nan"), float("inf")),
    *("", "\x00", "\ufeff", "\ud800", "🙂" * 50, "a" * 3000, "NaN", "-1", "<|user|>", "{{7*7}}"),
    *([], {}, [[]], [None], [[[]]], {"": {}}, {"type": "text"}, {"$ref": "#"}, [1, "a"], [-1], [2**40]),
]
FRAGMENTS = [b"", b"{", b"}", b"[", b'"', b"\\", b"\\u", b"\xff", b"\x00", b"1e999", b"NaN", b"-", b",", b"null"]
FRAGMENTS += [b"[" * 3000, b'{"a":' * 3000, b"9" * 3000]
UNKNOWN = ["x", "n", "logprobs", "tools", "top_p", "", "ünbekannt\n", "k" * 500]
MAX_HUGE = 200_000  # characters
METHODS = [b"POST", b"GET", b"PUT", b"OPTIONS", b"TRACE", b"post", b"P\x00ST", b"", b"A" * 3000]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"HTTP/1.1 x", b"", b"http/1.1"]
TARGETS = [
    b"/v1/completions",
    b"/v1/models",
    b"/v1/models/..%2f..",
    b"*",
    b"http://x/health",
    b"/\xff",
    b"/" + b"a" * 9000,
]
HEADERS = [
    *(b"content-length: %s" % value for value in (b"0", b"2", b"-1", b"1e3", b"+2", b"2, 2", b"9" * 30, b"2\x00", b"")),
    *(
        b"transfer-encoding: %s" % value
        for value in (b"chunked", b"identity", b"chunked, chunked", b"xchunked", b"\x0bchunked")
    ),
    *(
        b"content-length : 2",
        b"transfer-encoding : chunked",
        b"host: a",
        b"host: b",
        b"connection: close, te",
        b": empty",
    ),
    *(b"authorization: Bearer \xff\x00", b"x-request-id: " + b"r" * 5000, b"x-session-id: \r", b" folded", b"no colon"),
    *(b"expect: 100-continue", b"upgrade: websocket", b"accept-encoding: " + b"gzip," * 500, b"n" * 70000 + b": 1"),
]
CHUNKS = [
    b"{}",
    b"2\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    b"",
]
HEAD_TIMEOUT_S = 0.3
"""How long to wait for an answer to a request that may be incomplete."""
CONCURRENCY = 48
MAX_HEALTH_P99_S = 0.1
MAX_GROWTH_BYTES = 20 * 2**20


def body(chance: random.Random) -> tuple[str, bytes]:
    """A path and what to send to it."""
    path, value = chance.choice(SEEDS)
    damaged: Any = value
    for _ in range(chance.randrange(3)):
        damaged = _damage_value(damaged, chance)
    sent = json.dumps(damaged).encode()
    if chance.random() < 0.1 and sent.startswith(b'{"'):
        sent = sent[:-1] + b"," + sent[1:]  # every key twice
    for _ in range(chance.choice([0, 0, 1, 2])):
        sent = _damage_bytes(sent, chance) if sent else sent
    return path, sent


def _damage_value(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts, however deep, replaced, dropped, repeated or joined by another."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        match chance.randrange(5):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return value | {chance.choice(UNKNOWN): _value(chance)}
            case _:
                return value | {key: _damage_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.6:
        place = chance.randrange(len(value))
        return [*value[:place], _damage_value(value[place], chance), *value[place + chance.randrange(2) :]]
    return _value(chance)


def _value(chance: random.Random) -> Any:
    match chance.randrange(8):
        case 0:
            return int("9" * chance.randint(1, 100)) * chance.choice([1, -1])
        case 1:
            nested: Any = 1
            for _ in range(chance.randint(1, 400)):
                nested = [nested] if chance.random() < 0.5 else {"a": nested}
            return nested
        case 2:
            return chance.choice(["a", "é", "🙂", '"', "word "]) * chance.randint(1, MAX_HUGE // 5)
        case _:
            return chance.choice(VALUES)


def _damage_bytes(sent: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(sent))
    end = min(len(sent), start + chance.choice([0, 1, 1, 4, 40]))
    return sent[:start] + chance.choice(FRAGMENTS) + sent[end:]


async def send(url: str, bodies: list[tuple[str, bytes]]) -> Counter[int]:
    """Send all bodies; returns the number of answers by status. Raises AssertionError for a status of 5xx."""
    statuses: Counter[int] = Counter()
    pending = list(reversed(bodies))

    async def worker(session: aiohttp.ClientSession) -> None:
        while pending:
            path, sent = pending.pop()
            async with session.post(url + path, data=sent, headers={"content-type": "application/json"}) as response:
                await response.read()
                if response.status >= 500:
                    raise AssertionError(f"{response.status} for {path}: {sent[:2000]!r}")
                statuses[response.status] += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=300)) as session:
        await asyncio.gather(*(worker(session) for _ in range(CONCURRENCY)))
    return statuses


def head(chance: random.Random) -> bytes:
    """A request with a damaged head, and perhaps a body."""
    line = b" ".join((chance.choice(METHODS), chance.choice(TARGETS), chance.choice(VERSIONS)))
    sent = b"\r\n".join((line, *chance.choices(HEADERS, k=chance.randrange(5)), b"", chance.choice(CHUNKS)))
    return _damage_bytes(sent, chance) if chance.random() < 0.3 else sent


async def send_heads(url: str, heads: list[bytes]) -> Counter[int]:
    """Send each on a connection of its own; 0 counts those without an answer. Raises AssertionError for a 5xx."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    statuses: Counter[int] = Counter()
    pending = list(heads)

    async def worker() -> None:
        while pending:
            sent = pending.pop()
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(sent)
                line = await asyncio.wait_for(reader.readline(), HEAD_TIMEOUT_S)
            except (TimeoutError, ConnectionError):
                line = b""
            finally:
                writer.close()
            status = int(line.split()[1]) if line.startswith(b"HTTP/") else 0
            if status >= 500 and status != 501:  # a transfer encoding that is not implemented
                raise AssertionError(f"{status} for {sent[:2000]!r}")
            statuses[status] += 1

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return statuses


async def _probe(url: str, seconds: list[float]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            started_s = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                await response.read()
            seconds.append(time.perf_counter() - started_s)
            await asyncio.sleep(0.02)


async def _fuzz(model: Path, num_bodies: int, stuck_timeout_s: float, *, by_gateway: bool) -> int:
    command = [LLMSERVICE, "serve", "--model", str(model), "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
    command += ["--kv-cache-memory", "32MiB", "--max-num-seqs", "32", "--threads", "1"]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(started(*command, "--stuck-timeout", str(stuck_timeout_s)))
        if not by_gateway:
            return await _run(server.url, server.process_id, num_bodies, stuck_timeout_s)
        api = await stack.enter_async_context(cluster())
        await api.add_service("tiny", [int(server.url.rpartition(":")[2])], 32, None)
        front = await stack.enter_async_context(api.gateway())
        return await _run(front.url, front.process_id, num_bodies, stuck_timeout_s)


async def _run(url: str, pid: int, num_bodies: int, stuck_timeout_s: float) -> int:
    chance, seconds = random.Random(11), list[float]()  # noqa: S311  # a load, no secret
    resident, statuses = list[int](), Counter[int]()
    async with asyncio.TaskGroup() as group:  # which fails where a probe does
        probe = group.create_task(_probe(url, seconds))
        for _ in range(2):
            statuses += await send(url, [body(chance) for _ in range(num_bodies // 2)])
            statuses += await send_heads(url, [head(chance) for _ in range(num_bodies // 20)])
            resident.append(resident_bytes(pid))
        await asyncio.sleep(stuck_timeout_s + 1)
        probe.cancel()
    served = await send(url, [("/v1/completions", json.dumps(SEEDS[0][1]).encode())])
    p99_s = sorted(seconds)[int(0.99 * len(seconds))]
    growth = resident[1] - resident[0]
    result = {
        "statuses": dict(sorted(statuses.items())),
        "health_p99_ms": round(p99_s * 1000, 1),
        "resident_growth_mib": round(growth / 2**20, 1),
        "serves_afterwards": served[200] == 1,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return int(p99_s > MAX_HEALTH_P99_S or growth > MAX_GROWTH_BYTES or served[200] != 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--gateway", action="store_true", help="send them through a gateway")
    parser.add_argument("--stuck-timeout", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        spec = TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, max_position_embeddings=512)
        write_tiny_model(model, spec)
        return asyncio.run(_fuzz(model, args.bodies, args.stuck_timeout, by_gateway=args.gateway))


if __name__ == "__main__":
    raise SystemExit(main())
