"""What every peer is asked, and what it answered when: the same requests, the same number of them in flight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmservice_bench.lengths import Lengths, draw
from llmservice_bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy, and exactly `output_tokens` long whatever the model says of an end."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for one peer. Whoever gets an answer sends the next request at once, so `in_flight` are always there."""

    model: Path
    """A Hugging Face folder."""
    gguf: Path
    """The same weights for llama.cpp."""
    dtype: str
    """`float32` or `bfloat16`: of weights, activations and KV cache."""
    asks: tuple[Ask, ...]
    in_flight: int
    threads: int

    @property
    def longest(self) -> int:
        return max(ask.num_tokens for ask in self.asks)

    def warm_up(self) -> list[Ask]:
        """A few requests of the same sizes, cut to three tokens: for what a peer does once per shape or at first.

        Their prompts are turned round, so that no prefix cache knows the real ones afterwards.
        """
        few = self.asks[: min(8, self.in_flight)]
        return [Ask(ask.prompt_token_ids[::-1], min(3, ask.output_tokens)) for ask in few]


@dataclass(slots=True)
class Answer:
    """What came back, on the peer's own clock (`time.perf_counter`)."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    def take(self, token_id: int, now: float) -> None:
        self.token_ids.append(token_id)
        self.token_times_s.append(now)

    def record(self, ask: Ask, started_s: float) -> RequestRecord:
        """As a load generator's report wants it; an answer of the wrong length is a failure."""
        times = self.token_times_s
        wrong = len(times) != ask.output_tokens
        return RequestRecord(
            started_s=self.sent_s - started_s,
            prompt_tokens=len(ask.prompt_token_ids),
            output_tokens=len(times),
            ttft_s=times[0] - self.sent_s if times else 0.0,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
            e2e_s=times[-1] - self.sent_s if times else 0.0,
            error=f"{len(times)} tokens, expected {ask.output_tokens}" if wrong else None,
        )


def records(asks: Sequence[Ask], answers: Sequence[Answer], began_s: float = 0.0) -> list[RequestRecord]:
    """With times from the first that was sent, which began at `began_s`."""
    started_s = min(answer.sent_s for answer in answers) - began_s
    return [answer.record(ask, started_s) for ask, answer in zip(asks, answers, strict=True)]


def in_turns(asks: Sequence[Ask], answers: Sequence[Answer]) -> list[RequestRecord]:
    """Of requests that were served one by one, as if no time had passed between one and the next."""
    laid: list[RequestRecord] = []
    for ask, answer in zip(asks, answers, strict=True):
        laid += records([ask], [answer], laid[-1].ended_s if laid else 0.0)
    return laid


def draw_asks(lengths: Sequence[Lengths], count: int, vocab_size: int, seed: int) -> tuple[Ask, ...]:
    """`count` requests of random tokens, with lengths drawn from `lengths`."""
    rng = np.random.default_rng(seed)
    return tuple(
        Ask(rng.integers(0, vocab_size, each.prompt_tokens).tolist(), each.output_tokens)
        for each in itertools.islice(draw(lengths, rng), count)
    )


def agreement(asks: Sequence[Ask], left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Share of the output tokens before the first that differs, over all requests: 1 where all are equal."""
    equal = 0
    for one, other in zip(left, right, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        equal += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return equal / sum(ask.output_tokens for ask in asks)
