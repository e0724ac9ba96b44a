"""What the demo sends."""

from __future__ import annotations

import pytest

from llmservice_local.demo.traffic import trace_lengths
from llmservice_planner.command import CommandError


def test_every_request_fits_the_models_context() -> None:
    lengths = trace_lengths(0.25, 1024)
    assert len(lengths) > 800, "the shape of the trace is kept"
    assert all(each.prompt_tokens + each.output_tokens < 1024 for each in lengths)


def test_scale_that_fits_nothing_is_refused() -> None:
    with pytest.raises(CommandError, match="lower it"):
        trace_lengths(100.0, 128)
