"""One streaming request, timed as its user feels it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from llmservice_bench.prompt import PROBE_WORDS, WordRate, make_prompt
from llmservice_bench.record import RequestRecord

DATA = b"data:"
DONE = b"[DONE]"


class TargetError(Exception):
    """The server under test does not answer as needed; the text says what it said instead."""


class _StreamError(Exception):
    """A stream that will not become an answer; the text is the reason that its failure is counted under."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. `url` is its root, without /v1."""

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = False
    """Ask for exactly the planned output (`ignore_eos`, an extension of vLLM's that not every server takes)."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def endpoint(self) -> str:
        return f"{self.url.rstrip('/')}/v1/{'chat/completions' if self.chat else 'completions'}"

    def body(self, prompt: str, max_tokens: int, stream: bool = True) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {"model": self.model, "max_tokens": max_tokens, "temperature": 0.0, "stream": stream, **asked}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: str,
    max_tokens: int,
    record: RequestRecord,
    on_piece: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Send one request and fill in `record`; `on_piece` is called for each piece of output. Failures go there too."""
    started = clock()
    try:
        async with session.post(
            target.endpoint, json=target.body(prompt, max_tokens), headers=dict(target.headers)
        ) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}"
            else:
                await _follow(response.content, record, started, on_piece, clock)
    except TimeoutError:
        record.error = "timeout"
    except aiohttp.ClientError as error:
        record.error = type(error).__name__
    except _StreamError as error:
        record.error = str(error)
    record.e2e_s = clock() - started


async def _follow(
    lines: AsyncIterable[bytes],
    record: RequestRecord,
    started: float,
    on_piece: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Time the pieces of output. A piece without text (the role that opens a chat, the usage) is no output."""
    previous = 0.0
    pieces = 0
    usage: dict[str, Any] | None = None
    async for event in events(lines):
        if event == DONE:
            break
        told, is_output = _chunk(event)
        usage = told or usage
        if not is_output:
            continue
        now = clock()
        if pieces:
            record.itl_s.append(now - previous)
        else:
            record.ttft_s = now - started
        previous = now
        pieces += 1
        on_piece()
    else:
        record.error = "the stream ended before [DONE]"
        return
    if not pieces:
        record.error = "no output"
        return
    record.output_tokens = usage["completion_tokens"] if usage else pieces
    record.prompt_tokens = usage["prompt_tokens"] if usage else record.prompt_tokens


def _chunk(event: bytes) -> tuple[dict[str, Any] | None, bool]:
    """The usage that it tells, and whether it has output; raises _StreamError where it tells of an error or nothing."""
    try:
        chunk = json.loads(event)
        if "error" in chunk:
            raise _StreamError(f"error in the stream: {chunk['error'].get('code') or chunk['error'].get('type')}")
        return chunk.get("usage"), any(_is_output(choice) for choice in chunk["choices"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _StreamError("an answer that cannot be read") from error


def _is_output(choice: dict[str, Any]) -> bool:
    return bool(choice["delta"].get("content") if "delta" in choice else choice.get("text"))


async def events(lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The payloads of a stream of server-sent events, one data line each, as OpenAI's API sends them."""
    async for line in lines:
        if line.startswith(DATA):
            yield line[len(DATA) :].strip()


async def measure_word_rate(session: aiohttp.ClientSession, target: Target, rng: Any) -> WordRate:
    """Learn how many tokens the target's tokenizer makes of our words.

    Raises:
        TargetError: the target cannot be reached, refuses, or reports no usable `usage`.
    """
    counts = []
    for num_words in PROBE_WORDS:
        body = target.body(make_prompt(num_words, rng), max_tokens=1, stream=False)
        try:
            async with session.post(target.endpoint, json=body, headers=dict(target.headers)) as response:
                if response.status != 200:
                    raise TargetError(f"{target.endpoint} answered {response.status}: {(await response.text())[:300]}")
                counts.append((await response.json())["usage"]["prompt_tokens"])
        except aiohttp.ClientError as error:
            raise TargetError(f"cannot reach {target.endpoint}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TargetError(f"{target.endpoint} does not report usage.prompt_tokens") from error
    try:
        return WordRate.fitted(*counts)
    except ValueError as error:
        raise TargetError(str(error)) from error
