from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmservice_bench.results import Check, Results, cell, column_title, rows_tables
from report import over_seeds


@pytest.mark.parametrize(
    ("bound", "measured", "met"),
    [
        (">= 4", 4.0, True),
        (">= 4", 3.99, False),
        ("<= 1.5", 1.5, True),
        ("<= 1.5", 1.6, False),
        ("< 30", 30.0, False),
        ("> 0", 0.1, True),
        ("= 0", 0.0, True),
        ("= 0", 1.0, False),
    ],
)
def test_a_check_compares_as_its_bound_reads(bound: str, measured: float, met: bool) -> None:
    check = Check("what", bound, measured)

    assert check.met is met
    assert check.line().endswith("met" if met else "MISSED")


def test_results_name_where_they_were_measured(tmp_path: Path) -> None:
    written = Results("example", [{"tokens_per_s": 5.0}], [Check("rate", ">= 4", 5.0, "tok/s")]).write(tmp_path)

    content = json.loads(written.read_text(encoding="utf-8"))
    assert written.name == "example.json"
    assert content["rows"] == [{"tokens_per_s": 5.0}]
    assert content["checks"] == [
        {"what": "rate", "bound": ">= 4", "measured": 5.0, "unit": "tok/s", "met": True},
    ]
    assert content["machine"]["cpus"] >= 1
    assert "llmservice" in content["versions"]


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


def test_rows_that_differ_in_their_seed_alone_are_one() -> None:
    rows = [
        {"traffic": "step", "load": 2.0, "seed": 0, "kept": 90.0, "turns": 2},
        {"traffic": "step", "load": 2.0, "seed": 1, "kept": 95.0, "turns": 1},
        {"traffic": "trace", "load": None, "seed": 0, "kept": 99.0, "turns": 0},
    ]
    assert over_seeds(rows) == [{"traffic": "step", "load": 2.0, "seeds": 2, "kept": 92.5, "turns": 2}, rows[2]]
    assert over_seeds([{"a": 1}, {"a": 1}]) == [{"a": 1}, {"a": 1}]
