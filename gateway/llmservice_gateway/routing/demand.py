"""What a request asks of a pod, and what it used: estimated before it is sent, reported by the pod after.

The gateway has no tokenizer: a prompt's tokens are estimated from its characters, by the ratio of earlier requests of
the same model, and an answer's from the mean of earlier answers, at most what the request allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

_PROMPT_FIELDS = (
    *("messages", "tools", "prompt", "instructions", "input"),
    *("query", "queries", "documents", "texts", "text_1", "text_2"),
)
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""Of a chat, of a response, and of any request."""
_NO_TEXT = frozenset({"image_url", "input_audio", "file", "encrypted_content"})
"""Parts of messages whose strings are data."""
AFFINITY_CHARS = 1024
"""The part of a prompt without messages that chooses its pod."""
_MOST_CHOICES, _MOST_TOKENS = 128, 2**24
"""What is taken of a request's own figures, which its pod refuses where they are higher."""
_MEMORY = 300
"""Requests that a running mean covers."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Estimated tokens of a request."""

    prompt_tokens: int
    output_tokens: int
    """Expected; of all choices."""
    max_output_tokens: int | None = None
    """What the request allows, of all choices; None: it sets no limit."""
    affinity: bytes | None = None
    """Requests with the same value share the beginning of their prompts. None: there is nothing to share."""
    chars: int = field(default=0, compare=False)
    """Of a prompt of text alone; 0: it has token ids."""
    choices: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request, as its pod counted them; those of the prompt include the cached ones."""

    prompt: int
    cached: int
    completion: int

    @classmethod
    def parse(cls, text: str) -> Usage | None:
        """Of `<prompt> <cached> <completion>`; None where it is something else."""
        numbers = text.split()
        if len(numbers) != 3 or not all(number.isascii() and number.isdecimal() for number in numbers):
            return None
        return cls(*map(int, numbers))


@dataclass(slots=True)
class _Mean:
    """Of the last values, older ones weighing less."""

    value: float
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class Estimator:
    """The estimates for one model."""

    _tokens_per_char: _Mean = field(default_factory=lambda: _Mean(0.25))
    _output_tokens: _Mean = field(default_factory=lambda: _Mean(256.0))

    def demand(self, payload: Mapping[str, Any], *, generates: bool, affinity: bytes | None) -> Demand:
        """Of a request's body, which need not be valid beyond being a JSON object."""
        chars, tokens = _size(payload)
        prompt_tokens = tokens + round(chars * self._tokens_per_char.value)
        text_chars = 0 if tokens else chars
        if not generates:
            return Demand(prompt_tokens, 0, 0, affinity, text_chars)
        choices = _bounded(payload.get("n"), _MOST_CHOICES) or 1
        limits = (_bounded(payload.get(name), _MOST_TOKENS) for name in _LIMITS)
        limit = next((limit for limit in limits if limit is not None), None)
        expected = max(1, round(self._output_tokens.value))
        expected = expected if limit is None else min(expected, limit)
        limit = None if limit is None else limit * choices
        return Demand(prompt_tokens, expected * choices, limit, affinity, text_chars, choices)

    def learn(self, demand: Demand, usage: Usage) -> None:
        """Take the pod's figures of a request that ended."""
        if demand.chars and usage.prompt:
            self._tokens_per_char.add(usage.prompt / demand.chars)
        if usage.completion:
            self._output_tokens.add(usage.completion / demand.choices)


def affinity(model: str, payload: Mapping[str, Any], session: str | None, *, generates: bool) -> bytes | None:
    """The key by which requests find the pod that has the beginning of their prompt in its KV cache.

    It has the model or adapter, `cache_salt`, and the system messages with the first message of the user, or the first
    characters of a prompt. `session`, which the client chose, replaces what is of the body. What does not generate has
    no prompt in a cache.
    """
    if session is not None:
        return _digest(model, "session", session)
    salt = str(payload.get("cache_salt") or "")
    messages, prompt = payload.get("messages"), payload.get("prompt")
    if generates and "input" in payload:  # of a response
        given = payload["input"]
        said = given if isinstance(given, list) else [{"role": "user", "content": given}]
        messages = [{"role": "system", "content": payload.get("instructions")}, *said]
    if isinstance(messages, list):
        opening = _opening(messages)
        return _digest(model, salt, *map(_text, opening)) if opening else None
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list):  # of token ids
        prompt = prompt[:AFFINITY_CHARS]
    return _digest(model, salt, _text(prompt)[:AFFINITY_CHARS]) if prompt else None


def _opening(messages: list[Any]) -> list[Any]:
    opening = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role in ("system", "developer", "user"):
            opening.append((role, message.get("content")))
        if role == "user":
            break
    return opening


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _digest(*parts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8) + encoded)
    return digest.digest()


def _size(payload: Mapping[str, Any]) -> tuple[int, int]:
    """Characters of text and token ids in the fields that make up a prompt."""
    chars = tokens = 0
    pending = [payload[name] for name in _PROMPT_FIELDS if name in payload]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, int):
            tokens += 1
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += [part for name, part in value.items() if name not in _NO_TEXT]
    return chars, tokens


def _bounded(value: Any, most: int) -> int | None:
    """None where it is no positive integer."""
    return min(value, most) if isinstance(value, int) and value > 0 else None
