"""How long requests are: prompt and output tokens, as real users send them.

Uniform lengths hide everything that batching does for heavy tails, so lengths come from a trace. The one that ships,
`azure_conv_2023_sample.csv`, is a uniform sample of 1,000 of the 19,366 rows of the Azure LLM inference trace 2023
(conversation), Microsoft, CC-BY 4.0, published with Patel et al., "Splitwise: Efficient Generative LLM Inference Using
Phase Splitting", ISCA 2024. It holds lengths and arrival times only, no text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE = Path(__file__).with_name("azure_conv_2023_sample.csv")
PROMPT_COLUMN = "ContextTokens"
OUTPUT_COLUMN = "GeneratedTokens"


class TraceError(ValueError):
    """The trace cannot be used; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request's size."""

    prompt_tokens: int
    output_tokens: int

    def scaled(self, factor: float) -> Lengths:
        """Both lengths times `factor`, at least 1: the shape of the distribution stays, its size fits a small model."""
        return Lengths(max(1, round(self.prompt_tokens * factor)), max(1, round(self.output_tokens * factor)))


def read_trace(path: Path = SAMPLE) -> list[Lengths]:
    """The lengths of a trace with the columns ContextTokens and GeneratedTokens (others are left alone).

    Raises:
        TraceError: no such file, a column is missing, a length is no whole number, or there is no row.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = {PROMPT_COLUMN, OUTPUT_COLUMN} - set(reader.fieldnames or ())
            if missing:
                raise TraceError(f"{path}: no column {', '.join(sorted(missing))}; found {reader.fieldnames}")
            lengths = [_lengths(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    if not lengths:
        raise TraceError(f"{path} holds no request")
    return lengths


def _lengths(row: dict[str, str], where: str) -> Lengths:
    try:
        lengths = Lengths(int(row[PROMPT_COLUMN]), int(row[OUTPUT_COLUMN]))
    except (TypeError, ValueError) as error:
        raise TraceError(f"{where}: lengths must be whole numbers, found {row}") from error
    if lengths.prompt_tokens < 1 or lengths.output_tokens < 1:
        raise TraceError(f"{where}: lengths must be at least 1, found {row}")
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
