"""How long requests are: prompt and output tokens, as real users send them.

Uniform lengths hide everything that batching does for heavy tails, so lengths come from a trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmservice_bench.trace import SAMPLE, read_rows

COLUMNS = ("ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request's size."""

    prompt_tokens: int
    output_tokens: int

    def scaled(self, factor: float) -> Lengths:
        """Both lengths times `factor`, at least 1: the shape of the distribution stays, its size fits a small model."""
        return Lengths(max(1, round(self.prompt_tokens * factor)), max(1, round(self.output_tokens * factor)))


def read_trace(path: Path = SAMPLE) -> list[Lengths]:
    """The lengths of a trace with the columns ContextTokens and GeneratedTokens.

    Raises:
        TraceError: it cannot be read, or a length is no whole number from 1 on.
    """
    return read_rows(path, COLUMNS, _lengths)


def _lengths(prompt: str, output: str) -> Lengths:
    try:
        lengths = Lengths(int(prompt), int(output))
    except (TypeError, ValueError) as error:
        raise ValueError("lengths must be whole numbers") from error
    if lengths.prompt_tokens < 1 or lengths.output_tokens < 1:
        raise ValueError("lengths must be at least 1")
    return lengths


def scaled_to(lengths: Sequence[Lengths], longest: Lengths) -> list[Lengths]:
    """The trace for a model that bears no longer prompt and output than `longest`: each side times a factor of its own.

    The longest of either side becomes `longest`, so that both keep the shape of their distribution and its tail.
    """
    by_prompt = longest.prompt_tokens / max(each.prompt_tokens for each in lengths)
    by_output = longest.output_tokens / max(each.output_tokens for each in lengths)
    return [
        Lengths(max(1, round(each.prompt_tokens * by_prompt)), max(1, round(each.output_tokens * by_output)))
        for each in lengths
    ]


def draw(lengths: Sequence[Lengths], rng: np.random.Generator) -> Iterator[Lengths]:
    """Lengths drawn with replacement, for ever."""
    while True:
        yield lengths[int(rng.integers(len(lengths)))]
