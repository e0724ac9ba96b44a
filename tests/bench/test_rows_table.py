from __future__ import annotations

from typing import Any

import pytest

from llmservice_bench.rows_table import cell, column_title, rows_tables


def test_a_p50_and_its_p99_share_a_column_and_empty_columns_are_left_out() -> None:
    rows = [
        {"load": "1 at once", "rate": None, "ttft_p50_ms": 11.64, "ttft_p99_ms": 459.9, "failed": 0},
        {"load": "a|b", "rate": None, "ttft_p50_ms": 0.0123, "ttft_p99_ms": 1234.5, "failed": 12000},
    ]
    assert rows_tables(rows).splitlines() == [
        "| load | TTFT p50 / p99, ms | failed |",
        "| --- | ---: | ---: |",
        "| 1 at once | 11.6 / 460 | 0 |",
        "| a\\|b | 0.0123 / 1,234 | 12,000 |",
    ]


def test_rows_with_other_columns_get_a_table_of_their_own() -> None:
    tables = rows_tables([{"a": 1}, {"a": 2}, {"b": 3}]).split("\n\n")
    assert [table.splitlines()[0] for table in tables] == ["| a |", "| b |"]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("output_tokens_per_s", "output tokens/s"),
        ("itl_p99_ms", "ITL p99, ms"),
        ("kv_waste_share", "KV waste, share"),
        ("ms", "ms"),
    ],
)
def test_columns_are_titled_in_the_words_of_the_field(name: str, title: str) -> None:
    assert column_title(name) == title


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (True, "yes"), (0.0, "0"), (99.94, "99.9"), (-1500.0, "-1,500")]
)
def test_cells_show_no_more_digits_than_a_measurement_has(value: Any, text: str) -> None:
    assert cell(value) == text
