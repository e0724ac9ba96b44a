"""The samples between two reports of a server's steps."""

from __future__ import annotations

from typing import Any

import pytest

from llmservice_bench.calibration.fit import Sample
from llmservice_bench.calibration.server_steps import parse, samples_between
from llmservice_planner.sizing.latency import StepBatch


def _group(kind: str, sequences: int, steps: int, seconds: float, *work: int) -> dict[str, Any]:
    names = ("num_seqs", "context_tokens", "prompt_tokens", "prompt_chunks", "attention_pairs")
    return {
        "kind": kind,
        "sequences": sequences,
        "steps": steps,
        "seconds": seconds,
        **dict(zip(names, work, strict=True)),
    }


def test_each_group_with_steps_in_between_gives_their_mean() -> None:
    before = parse(
        {"steps": [_group("decode", 4, 10, 1.0, 40, 1000, 0, 0, 0), _group("mixed", 1, 5, 1, 0, 0, 5, 5, 5)]}
    )
    after = parse(
        {
            "steps": [
                _group("decode", 4, 14, 1.2, 56, 1480, 0, 0, 0),
                _group("mixed", 1, 7, 1.5, 0, 0, 205, 7, 5 + 2 * 5050),
                _group("mixed", 8, 2, 0.6, 10, 300, 64, 2, 2 * 528),
            ]
        }
    )
    decode, prefill, mixed = samples_between(before, after, "four")
    assert decode == Sample("decode", (StepBatch(4, 120),), pytest.approx(0.05), phase="four")
    assert prefill == Sample("prefill", (StepBatch(0, 0, 100, 1, 5050),), pytest.approx(0.25), phase="four")
    assert mixed == Sample("mixed", (StepBatch(5, 150, 32, 1, 528),), pytest.approx(0.3), phase="four")
    assert samples_between(after, after, "four") == []


@pytest.mark.parametrize("report", [None, {}, {"steps": 3}, {"steps": [{"kind": "decode"}]}])
def test_a_report_without_sums_has_none(report: Any) -> None:
    assert parse(report) == {}
