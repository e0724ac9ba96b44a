"""The workload of a comparison: requests, answers with token times, and the closed loop that sends them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmservice_bench.record import RequestRecord
from llmservice_bench.trace import Lengths, draw
from llmservice_server.types.messages import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from llmservice_server.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One greedy request for exactly `output_tokens`."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The settings of a run of one peer, which always has `in_flight` requests."""

    model: Path
    """A folder in Hugging Face's format."""
    gguf: Path
    """The same weights for llama.cpp."""
    dtype: str
    """`float32` or `bfloat16`: of weights, activations and KV cache."""
    requests: tuple[PeerRequest, ...]
    in_flight: int
    threads: int

    @property
    def longest(self) -> int:
        return max(request.num_tokens for request in self.requests)

    def warm_up(self) -> list[PeerRequest]:
        """A few requests of the same prompt lengths with three output tokens, for work that a peer does once per shape.

        Their prompts are reversed, so that the prefix cache does not contain the measured ones.
        """
        few = self.requests[: min(8, self.in_flight)]
        return [PeerRequest(request.prompt_token_ids[::-1], min(3, request.output_tokens)) for request in few]


@dataclass(slots=True)
class Answer:
    """The tokens of a request and their times on the peer's clock (`time.perf_counter`)."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    def take(self, token_id: int, now: float) -> None:
        self.token_ids.append(token_id)
        self.token_times_s.append(now)

    def record(self, request: PeerRequest, started_s: float) -> RequestRecord:
        """The record for a report; an answer of the wrong length is a failure."""
        times = self.token_times_s
        wrong = len(times) != request.output_tokens
        return RequestRecord(
            started_s=self.sent_s - started_s,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(times),
            ttft_s=times[0] - self.sent_s if times else 0.0,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
            e2e_s=times[-1] - self.sent_s if times else 0.0,
            error=f"{len(times)} tokens, expected {request.output_tokens}" if wrong else None,
        )


def records(requests: Sequence[PeerRequest], answers: Sequence[Answer], began_s: float = 0.0) -> list[RequestRecord]:
    """The records, with the first request sent at `began_s`."""
    started_s = min(answer.sent_s for answer in answers) - began_s
    return [answer.record(request, started_s) for request, answer in zip(requests, answers, strict=True)]


def in_turns(requests: Sequence[PeerRequest], answers: Sequence[Answer]) -> list[RequestRecord]:
    """The records of single requests, as if each had started when the one before ended."""
    laid: list[RequestRecord] = []
    for request, answer in zip(requests, answers, strict=True):
        laid += records([request], [answer], laid[-1].ended_s if laid else 0.0)
    return laid


def draw_requests(lengths: Sequence[Lengths], count: int, vocab_size: int, seed: int) -> tuple[PeerRequest, ...]:
    """`count` requests of random tokens, with lengths drawn from `lengths`."""
    rng = np.random.default_rng(seed)
    return tuple(
        PeerRequest(rng.integers(0, vocab_size, each.prompt_tokens).tolist(), each.output_tokens)
        for each in itertools.islice(draw(lengths, rng), count)
    )


def agreement(requests: Sequence[PeerRequest], left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Share of the output tokens before the first difference, over all requests: 1 if all are equal."""
    equal = 0
    for one, other in zip(left, right, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        equal += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return equal / sum(request.output_tokens for request in requests)


class StepServer(Protocol):
    """An engine whose steps the caller calls."""

    def add(self, index: int, request: PeerRequest) -> None:
        """Add a request for exactly `request.output_tokens` tokens."""

    def step(self) -> Sequence[tuple[int, int]]:
        """Compute one step; returns the (index, token) pairs."""


class EngineServer:
    """Implements `StepServer` with an engine of ours."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, index: int, request: PeerRequest) -> None:
        sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(
            GenerateRequest(
                request_id=str(index),
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                arrival_s=time.monotonic(),
            )
        )

    def step(self) -> Sequence[tuple[int, int]]:
        """Raises RuntimeError for a request that failed, whose tokens would be waited for."""
        outputs = self._engine.step().outputs
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        return [(int(output.request_id), token) for output in outputs for token in output.token_ids]


class OwnedServer(StepServer, Protocol):
    """A `StepServer` that is closed with its peer."""

    def close(self) -> None:
        """Release memory and threads."""


class SteppedPeer:
    """A peer that is called step by step; warmed up on construction."""

    def __init__(self, server: OwnedServer, job: Job) -> None:
        self._server = server
        self._in_flight = job.in_flight
        self.serve(job.warm_up())

    def serve(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        return closed_loop(self._server, requests, self._in_flight)

    def close(self) -> None:
        self._server.close()


def closed_loop(server: StepServer, requests: Sequence[PeerRequest], in_flight: int) -> list[Answer]:
    """Send all requests with `in_flight` at a time; returns the answers in their order."""
    coming = iter(enumerate(requests))
    answers: dict[int, Answer] = {}
    running = 0

    def send() -> int:
        following = next(coming, None)
        if following is None:
            return 0
        index, request = following
        answers[index] = Answer(time.perf_counter())
        server.add(index, request)
        return 1

    for _ in range(in_flight):
        running += send()
    while running:
        tokens = server.step()
        now = time.perf_counter()
        for index, token_id in tokens:
            answers[index].take(token_id, now)
            if len(answers[index].token_ids) == requests[index].output_tokens:
                running += send() - 1
    return [answers[index] for index in range(len(requests))]
