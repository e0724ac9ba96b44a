"""Prompts of a given number of tokens for an unknown tokenizer."""

from __future__ import annotations

import numpy as np
import pytest

from llmservice_bench.client import PROBE_WORDS, WordRate, make_prompt


@pytest.mark.parametrize(("fixed", "per_word"), [(0, 1.0), (12, 1.3), (5, 2.5)])
def test_word_rate_recovers_the_tokenizers_line(fixed: int, per_word: float) -> None:
    few, many = (round(fixed + per_word * words) for words in PROBE_WORDS)
    rate = WordRate.fitted(few, many)
    for tokens in (50, 200, 1000):
        assert rate.fixed + rate.per_word * rate.words(tokens) == pytest.approx(tokens, abs=per_word)


def test_prompt_shorter_than_the_template_still_has_a_word() -> None:
    assert WordRate(fixed=20, per_word=1.5).words(3) == 1


def test_counts_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="counted 10 and 10 tokens"):
        WordRate.fitted(10, 10)


def test_prompts_have_their_length_and_differ() -> None:
    rng = np.random.default_rng(0)
    first, second = make_prompt(40, rng), make_prompt(40, rng)
    assert len(first.split()) == len(second.split()) == 40
    assert first != second
