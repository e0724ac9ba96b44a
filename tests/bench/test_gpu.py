"""What of the GPU benchmark needs no GPU: one part's failure does not cost the others, and the report says so."""

from card.section import Findings, run_in_turn
from gpu import table
from llmservice_bench.results import Check


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_that_fails_is_told_and_the_next_one_runs() -> None:
    def fails() -> Findings:
        raise ValueError("no such kernel")

    found = run_in_turn({"first": fails, "second": lambda: Findings(rows=[{"part": "second"}])}, 60, Clock())
    assert found.rows == [{"part": "second"}]
    assert found.notes == ["first failed: ValueError: no such kernel"]
    assert [(check.what, check.met) for check in found.checks] == [("first ran to its end", False)]


def test_nothing_begins_once_the_time_is_over() -> None:
    clock = Clock()

    def takes_long() -> Findings:
        clock.now += 100
        return Findings()

    found = run_in_turn({"long": takes_long, "late": takes_long}, 60, clock)
    assert found.notes == ["late was not run: the time was over"]
    assert clock.now == 100


def test_the_report_names_the_card_and_what_was_missed() -> None:
    found = Findings([{"part": "step", "ms": 1.23456}], [Check("share", ">= 0.75", 0.5)], ["late was not run"])
    text = table("NVIDIA H200", found)
    assert text.startswith("# On NVIDIA H200\n")
    assert "| share | >= 0.75  | 0.5 | **MISSED** |" in text
    assert "- late was not run" in text
    assert "- part step, ms 1.235" in text
