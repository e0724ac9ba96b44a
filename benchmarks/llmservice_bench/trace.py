"""Traces of real traffic as CSV files: one request a row, what its columns mean is for their readers."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

SAMPLE = Path(__file__).with_name("azure_conv_2023_sample.csv")
"""A uniform sample of 1,000 of the 19,366 rows of the Azure LLM inference trace 2023 (conversation), Microsoft, CC-BY
4.0, published with Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024. It
holds lengths and arrival times only, no text."""

Value = TypeVar("Value")


class TraceError(ValueError):
    """The trace cannot be used; the text names the file and the line."""


def read_rows(path: Path, columns: tuple[str, ...], parse: Callable[..., Value]) -> list[Value]:
    """What `parse` makes of the texts in `columns` of each row; other columns are left alone.

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
        raise TraceError(f"{path} holds no request")
    return values
