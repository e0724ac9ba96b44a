"""A client that sends one streaming request and measures its latencies, with prompts of a given number of tokens.

The tokenizer is the server's: `usage` reports the tokens of two prompts with known numbers of words, which gives the
tokens per word and of the template; prompts are then made of words.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from llmservice_bench.record import RequestRecord

WORDS = tuple(Path(__file__).with_name("prompt_words.txt").read_text(encoding="utf-8").split())
PROBE_WORDS = (32, 160)


@dataclass(frozen=True, slots=True)
class WordRate:
    """`tokens = fixed + per_word · words`, as measured on the server's own tokenizer."""

    fixed: float
    per_word: float

    @classmethod
    def fitted(cls, few: int, many: int) -> WordRate:
        """From the token counts of prompts of `PROBE_WORDS` words.

        Raises:
            ValueError: the longer prompt has no more tokens than the shorter one.
        """
        if many <= few:
            raise ValueError(
                f"the server counted {few} and {many} tokens for {PROBE_WORDS[0]} and {PROBE_WORDS[1]} words"
            )
        per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        return cls(max(0.0, few - per_word * PROBE_WORDS[0]), per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


def make_prompt(num_words: int, rng: np.random.Generator) -> str:
    """Random words, so that prompts share no prefix."""
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=num_words))


DATA = b"data:"
DONE = b"[DONE]"


class TargetError(Exception):
    """The server under test is unusable; the message contains its response."""


class _StreamError(Exception):
    """A stream that failed; the message is the reason under which the failure is counted."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. `url` is its root, without /v1."""

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = False
    """Send `ignore_eos`, an extension of vLLM, to get exactly the planned number of output tokens."""
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
    """Send one request and fill in `record`, also after a failure; `on_piece` is called for each chunk of output."""
    started = clock()
    try:
        async with session.post(
            target.endpoint, json=target.body(prompt, max_tokens), headers=dict(target.headers)
        ) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}{_code(await response.read())}"
            else:
                await _follow(response.content, record, started, on_piece, clock)
    except TimeoutError:
        record.error = "timeout"
    except aiohttp.ClientError as error:
        record.error = type(error).__name__
    except _StreamError as error:
        record.error = str(error)
    record.e2e_s = clock() - started


def _code(body: bytes) -> str:
    """The code of an error of OpenAI's API, in parentheses."""
    try:
        return f" ({json.loads(body)['error']['code']})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


async def _follow(
    lines: AsyncIterable[bytes],
    record: RequestRecord,
    started: float,
    on_piece: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Record the times of the chunks of output; chunks without text (role, usage) do not count."""
    previous = 0.0
    pieces = 0
    usage: dict[str, Any] | None = None
    async for event in events(lines):
        if event == DONE:
            break
        found, is_output = _chunk(event)
        usage = found or usage
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
    try:
        record.output_tokens = int(usage["completion_tokens"]) if usage else pieces
        record.prompt_tokens = int(usage["prompt_tokens"]) if usage else record.prompt_tokens
    except (KeyError, TypeError, ValueError) as error:
        raise _StreamError("a usage that cannot be read") from error


def _chunk(event: bytes) -> tuple[dict[str, Any] | None, bool]:
    """The usage of an event, if any, and whether it has output; raises _StreamError for errors and invalid events."""
    try:
        chunk = json.loads(event)
        if "error" in chunk:
            raise _StreamError(f"error in the stream: {chunk['error'].get('code') or chunk['error'].get('type')}")
        return chunk.get("usage"), any(_is_output(choice) for choice in chunk["choices"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _StreamError("an answer that cannot be read") from error


_OUTPUTS = ("content", "reasoning_content", "reasoning")
"""Of a chat: reasoning is output too, which servers name in two ways."""


def _is_output(choice: dict[str, Any]) -> bool:
    return any(map(choice["delta"].get, _OUTPUTS)) if "delta" in choice else bool(choice.get("text"))


async def events(lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The payloads of a stream of server-sent events, one data line each, as OpenAI's API sends them."""
    async for line in lines:
        if line.startswith(DATA):
            yield line[len(DATA) :].strip()


async def measure_word_rate(session: aiohttp.ClientSession, target: Target, rng: Any) -> WordRate:
    """Measure the tokens per word of the target's tokenizer.

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
                counts.append(int((await response.json(content_type=None))["usage"]["prompt_tokens"]))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetError(f"cannot reach {target.endpoint}: {str(error) or 'it did not answer in time'}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TargetError(f"{target.endpoint} does not report usage.prompt_tokens") from error
    try:
        return WordRate.fitted(*counts)
    except ValueError as error:
        raise TargetError(str(error)) from error
