"""An engine without a process of its own: what it is asked, and everything that it answers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmservice_server.engine.engine import Engine
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams, TokenLogprobs

VOCAB = 512


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(length * 1000 + seed).choices(range(VOCAB), k=length)  # noqa: S311 - traffic, not secrets


def serve(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    """The tokens of each request, none of which fails."""
    answers: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
    return answers


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (sum(stats.num_running.values()), sum(stats.num_waiting.values()), stats.blocks_held) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == engine.pool.num_usable
    blocks = engine.pool.free_blocks() + engine.pool.cached_blocks()
    assert sorted(blocks) == list(range(1, engine.pool.num_usable + 1))
    assert engine.wait_s() > 0
    assert engine.swap is None or engine.swap.num_free == engine.swap.num_blocks


@dataclass
class EngineDriver:
    """An engine, and everything it has said, by request. A subclass makes it, with a clock that returns `now`."""

    engine: Engine
    now: float = 100.0
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    reported: dict[str, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, Output] = field(default_factory=dict)

    def add(self, request_id: str, prompt: list[int], **options: Any) -> None:
        """Some `options` are of the request, the others of its sampling."""
        of_request = ("lane", "deadline_s", "queue_deadline_s", "cache_salt")
        others = {name: options.pop(name) for name in of_request if name in options}
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0} | options)
        self.engine.add(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=self.now, **others
            )
        )

    def step(self) -> list[Output]:
        outputs = self.engine.step().outputs
        for output in outputs:
            assert output.request_id not in self.last, "a finished request spoke again"
            self.tokens[output.request_id] += output.token_ids
            self.reported[output.request_id] += output.prompt_logprobs + output.logprobs
            if output.finish_reason is not None:
                self.last[output.request_id] = output
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert_idle(self.engine)

    def answer(self, request_id: str, prompt: list[int], **options: Any) -> list[int]:
        self.add(request_id, prompt, **options)
        self.run()
        return self.tokens[request_id]
