"""Which compositions are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.calibration.measure import Limits, phases


@given(st.integers(1, 1024), st.integers(256, 131072))
def test_every_phase_is_within_the_servers_limits(max_num_seqs: int, max_model_len: int) -> None:
    planned = phases(Limits(max_num_seqs, max_model_len, 2048))
    assert len(planned) == len(set(planned))
    for phase in planned:
        assert phase.num_seqs <= max_num_seqs
        assert max(phase.prompt_tokens, phase.joining_tokens) < max_model_len - 96


@pytest.mark.parametrize("max_num_seqs", [4, 64, 256])
def test_batches_contexts_prompts_and_both_at_once_are_measured(max_num_seqs: int) -> None:
    planned = phases(Limits(max_num_seqs, 4096, 2048))
    alone = {phase.joining_tokens for phase in planned if not phase.num_seqs}
    decode = {phase.num_seqs for phase in planned if phase.num_seqs and not phase.joining_tokens}
    contexts = {phase.prompt_tokens for phase in planned if phase.num_seqs}
    assert len(alone) >= 5
    assert {1, max_num_seqs} <= decode
    assert len(contexts) >= 3
    assert any(phase.num_seqs and phase.joining_tokens for phase in planned)
