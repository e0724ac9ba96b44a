"""Lengths come from a trace, as it is or scaled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmservice_bench.lengths import Lengths, read_trace, scaled_to
from llmservice_bench.trace import TraceError


def test_bundled_sample_has_the_shape_of_the_whole_trace() -> None:
    lengths = read_trace()
    assert len(lengths) == 1000
    # The whole trace: p50/p95/p99 of 1020/4083/4142 prompt and 129/451/601 generated tokens.
    prompt = np.percentile([each.prompt_tokens for each in lengths], (50, 95, 99))
    output = np.percentile([each.output_tokens for each in lengths], (50, 95, 99))
    assert prompt == pytest.approx([1020, 4083, 4142], rel=0.05)
    assert output == pytest.approx([129, 451, 601], rel=0.05)


def test_scaling_keeps_at_least_one_token_on_either_side() -> None:
    assert Lengths(1000, 100).scaled(0.05) == Lengths(50, 5)
    assert Lengths(3, 2).scaled(0.01) == Lengths(1, 1)


def test_trace_scaled_to_a_model_fits_it_and_keeps_its_tail() -> None:
    lengths = read_trace()
    scaled = scaled_to(lengths, Lengths(200, 256))
    assert max(each.prompt_tokens for each in scaled) == 200
    assert max(each.output_tokens for each in scaled) == 256
    assert min(min(each.prompt_tokens, each.output_tokens) for each in scaled) >= 1
    whole, small = (np.percentile([each.output_tokens for each in some], (50, 99)) for some in (lengths, scaled))
    assert small[1] / small[0] == pytest.approx(whole[1] / whole[0], rel=0.05)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n1,x\n", "line 2: lengths must be whole numbers"),
        ("ContextTokens,GeneratedTokens\n1,2\n3\n", "line 3: lengths must be whole numbers"),
        ("ContextTokens,GeneratedTokens\n0,2\n", "line 2: lengths must be at least 1"),
        ("ContextTokens,GeneratedTokens\n", "holds no request"),
        ("", "no column"),
    ],
)
def test_unusable_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        read_trace(trace)


def test_absent_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "absent.csv")
