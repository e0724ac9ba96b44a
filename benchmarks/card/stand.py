"""What every section is given: the card, the sizes, its ceilings, the checkpoint, and an engine that several share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card import ceilings, llama
from card.card import Card
from card.sizes import Sizes
from llmservice_server.engine import startup
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.startup import Started
from llmservice_server.messages import Generate, Output, SamplingParams


class Stand:
    """Measures the ceilings when it is made.

    To start an engine takes as long as most sections, so the one of the usual settings is kept until a section wants
    the card for itself.
    """

    def __init__(self, card: Card, sizes: Sizes, folder: Path) -> None:
        self.card = card
        self.sizes = sizes
        self._folder = folder
        self.ceilings = ceilings.measure(card, sizes)
        self.output_tokens_per_s: float | None = None
        """Of our engine at `sizes.in_flight`, once that has been measured here."""
        self._engine: Engine | None = None

    def checkpoint(self) -> Path:
        """The folder, written where it is not there."""
        llama.write(self._folder, self.sizes.config, self.card.device)
        return self._folder

    def start(self, start: Callable[[EngineConfig], Started] = startup.start, **settings: Any) -> Engine:
        """An engine of one's own, on whatever the card has left."""
        config = EngineConfig(
            model=self.checkpoint(),
            max_num_seqs=self.sizes.max_num_seqs,
            max_model_len=self.sizes.max_model_len,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            **{**self.card.settings, **settings},
        )
        return Engine(config, start=start)

    def keep(self, engine: Engine) -> None:
        self._engine = engine

    def engine(self) -> Engine:
        """The one that is kept, started where there is none; idle."""
        if self._engine is None:
            self._engine = self.start()
        return self._engine

    def clear(self) -> None:
        """Nothing of ours is left on the card."""
        self._engine = None
        self.card.release()


def add(engine: Engine, name: str, prompt: list[int], output_tokens: int, **sampling: Any) -> None:
    """Exactly so many tokens, but for stop tokens that are named; greedy, unless `sampling` says otherwise."""
    params = SamplingParams(**{"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    engine.add(Generate(request_id=name, prompt_token_ids=prompt, sampling=params, arrival_s=time.monotonic()))


def any_prompt(num_tokens: int) -> list[int]:
    """Of up to 500 lengths, each begins with another token: no two share what a prefix cache has."""
    return [(7 * place + num_tokens) % 500 for place in range(num_tokens)]


def run_to_the_end(engine: Engine) -> list[Output]:
    """Whatever was finished on the way."""
    finished = []
    while engine.has_work:
        finished += [output for output in engine.step().outputs if output.finish_reason is not None]
    return finished
