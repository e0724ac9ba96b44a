"""Traces of real traffic as CSV files, and the request lengths and arrival times taken from them.

Uniform lengths would hide the effects of batching on heavy-tailed ones.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

SAMPLE = Path(__file__).with_name("azure_conv_2023_sample.csv")
"""A uniform sample of 1,000 of the 19,366 rows of the Azure LLM inference trace 2023 (conversation), Microsoft, CC-BY
4.0, published with Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024. It
holds lengths and arrival times only, no text."""

Value = TypeVar("Value")


class TraceError(ValueError):
    """The trace is unusable; the message names the file and the line."""


def read_rows(path: Path, columns: tuple[str, ...], parse: Callable[..., Value]) -> list[Value]:
    """The results of `parse` for the texts in `columns` of each row.

    Raises:
        TraceError: no such file, a column is missing, `parse` raised a ValueError or TypeError, or there is no row.
    """
    values: list[Value] = []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = set(columns) - set(reader.fieldnames or ())
            if missing:
                raise TraceError(f"{path}: no column {', '.join(sorted(missing))}; found {reader.fieldnames}")
            for row in reader:
                try:
                    values.append(parse(*(row[column] for column in columns)))
                except (TypeError, ValueError) as error:
                    raise TraceError(f"{path}, line {reader.line_num}: {error}, found {row}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    if not values:
        raise TraceError(f"{path} contains no request")
    return values


COLUMNS = ("ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a request."""

    prompt_tokens: int
    output_tokens: int

    def scaled(self, factor: float) -> Lengths:
        """Both lengths times `factor`, at least 1, to fit a small model."""
        return Lengths(max(1, round(self.prompt_tokens * factor)), max(1, round(self.output_tokens * factor)))


def read_trace(path: Path = SAMPLE) -> list[Lengths]:
    """The lengths of a trace with the columns ContextTokens and GeneratedTokens.

    Raises:
        TraceError: it cannot be read, or a length is not a positive integer.
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


COLUMN = "TIMESTAMP"


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
    """The arrival times of a trace in seconds from its first one, times `time_scale` (0.1 is ten times as fast).

    The column TIMESTAMP holds ISO 8601 times or numbers of seconds.

    Raises:
        TraceError: it cannot be read, a time is invalid, or a row is earlier than the one before it.
    """
    times = read_rows(path, (COLUMN,), _seconds)
    for row, (earlier, later) in enumerate(pairwise(times), start=2):
        if later < earlier:
            raise TraceError(f"{path}, request {row}: earlier than the one before it; sort the trace by {COLUMN}")
    return [(time - times[0]) * time_scale for time in times]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = _iso_seconds(text)
    if not math.isfinite(seconds):
        raise ValueError(f"{COLUMN} must be finite")
    return seconds


def _iso_seconds(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{COLUMN} must be ISO 8601 or a number of seconds") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
