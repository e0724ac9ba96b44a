from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmservice_bench.results import Check, Results


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
