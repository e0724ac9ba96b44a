from __future__ import annotations

import pytest

from llmservice_operator.monitoring import promql


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("llama3-8b", '"llama3-8b"'),
        ('a"} or vector(1) #', r'"a\"} or vector(1) #"'),
        ("back\\slash", r'"back\\slash"'),
        ("two\nlines", r'"two\nlines"'),
    ],
)
def test_a_name_stays_inside_its_quotes(text: str, literal: str) -> None:
    assert promql.string(text) == literal


def test_a_selector_without_matchers_is_the_bare_metric() -> None:
    assert promql.selector("up") == "up"
    assert promql.selector("up", "", promql.matchers(job="a", pod="b")) == 'up{job="a",pod="b"}'
