"""Request lengths and arrival times, drawn or taken from traces of real traffic.

Uniform lengths would hide the effects of batching on heavy-tailed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmservice_planner.traffic.traces import read_requests

SAMPLE = Path(__file__).with_name("azure_conv_2023_sample.csv")
"""A uniform sample of 1,000 of the 19,366 rows of the Azure LLM inference trace 2023 (conversation), Microsoft, CC-BY
4.0, published with Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024. It
holds lengths and arrival times only, no text."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a request."""

    prompt_tokens: int
    output_tokens: int

    def scaled(self, factor: float) -> Lengths:
        """Both lengths times `factor`, at least 1, to fit a small model."""
        return Lengths(max(1, round(self.prompt_tokens * factor)), max(1, round(self.output_tokens * factor)))


def read_trace(path: Path = SAMPLE) -> list[Lengths]:
    """The lengths of a trace's requests, by arrival. Raises `TraceError`."""
    return [Lengths(each.prompt_tokens, each.output_tokens) for each in read_requests([path])]


def scaled_to(lengths: Sequence[Lengths], longest: Lengths) -> list[Lengths]:
    """The trace scaled so that the longest prompt and the longest output become those of `longest`.

    Each has its own factor, so that both keep the shape of their distribution.
    """
    by_prompt = longest.prompt_tokens / max(each.prompt_tokens for each in lengths)
    by_output = longest.output_tokens / max(each.output_tokens for each in lengths)
    return [
        Lengths(max(1, round(each.prompt_tokens * by_prompt)), max(1, round(each.output_tokens * by_output)))
        for each in lengths
    ]


def draw(lengths: Sequence[Lengths], rng: np.random.Generator) -> Iterator[Lengths]:
    """An endless iterator of lengths drawn with replacement."""
    while True:
        yield lengths[int(rng.integers(len(lengths)))]


def arrival_times(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """An endless iterator of arrival times in seconds from the start.

    Gaps are Gamma(shape = burstiness, scale = 1 / (rate · burstiness)), as in `vllm bench serve`: their mean is 1/rate,
    burstiness 1 is a Poisson process, below 1 burstier, above 1 more even. An infinite rate sends everything at once.

    Raises:
        ValueError: rate or burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be above 0, found {rate} and {burstiness}")
    now = 0.0
    while True:
        yield now
        if rate != float("inf"):
            now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))


def read_arrivals(path: Path, time_scale: float = 1.0) -> list[float]:
    """The arrivals of `read_trace` in seconds from the first, times `time_scale` (0.1 is ten times as fast)."""
    return [each.arrival_s * time_scale for each in read_requests([path])]
