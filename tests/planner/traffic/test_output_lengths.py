import csv
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.traffic.output_lengths import OutputLengths

SAMPLE = Path(__file__).parents[3] / "benchmarks" / "llmservice_bench" / "azure_conv_2023_sample.csv"
LENGTHS = st.tuples(st.integers(1, 2**20), st.integers(1, 2**16))


def ordered_share(scores: list[float], answers: list[int]) -> float:
    """Of the pairs with different answers, how many `scores` order as the answers; ties count half."""
    pairs = [(a, b) for a, b in combinations(range(len(answers)), 2) if answers[a] != answers[b]]
    signs = [(scores[a] - scores[b]) * (answers[a] - answers[b]) for a, b in pairs]
    return sum(1.0 if sign > 0 else 0.5 if sign == 0 else 0.0 for sign in signs) / len(pairs)


def test_real_conversations_are_ordered_better_than_by_the_length_of_the_prompt() -> None:
    with SAMPLE.open() as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    lengths, predicted = OutputLengths(default_tokens=400), []
    for prompt, output in rows:
        predicted.append(lengths.predict(prompt))
        lengths.observe(prompt, output)
    answers = [output for _, output in rows]
    assert ordered_share(predicted, answers) > 0.74
    assert ordered_share([float(prompt) for prompt, _ in rows], answers) < 0.55


def test_without_answers_the_default_is_predicted() -> None:
    assert OutputLengths(default_tokens=123.5).predict(1000) == 123.5


@pytest.mark.parametrize(("prompt", "expected"), [(1000, 50.0), (1100, 50.0), (100, 200.0), (110, 200.0)])
def test_prompts_of_other_lengths_have_other_answers(prompt: int, expected: float) -> None:
    lengths = OutputLengths(default_tokens=1)
    for _ in range(10):
        lengths.observe(1000, 50)
        lengths.observe(100, 200)
    assert lengths.predict(prompt) == pytest.approx(expected)


def test_a_length_without_answers_takes_those_of_its_nearest_neighbours() -> None:
    lengths = OutputLengths(default_tokens=1)
    for _ in range(10):
        lengths.observe(1000, 50)
        lengths.observe(2, 4000)
    assert lengths.predict(700) == pytest.approx(50)


def test_a_few_answers_are_not_enough_by_themselves() -> None:
    lengths = OutputLengths(default_tokens=1)
    for _ in range(20):
        lengths.observe(500, 100)
    lengths.observe(1000, 4000)
    assert lengths.predict(1000) < 1000


def test_a_change_of_the_traffic_is_followed_within_a_thousand_answers() -> None:
    lengths = OutputLengths(default_tokens=1)
    for _ in range(100_000):
        lengths.observe(1000, 50)
    for _ in range(1000):
        lengths.observe(1000, 500)
    assert lengths.predict(1000) > 450


@given(st.lists(LENGTHS, min_size=1, max_size=50), st.integers(1, 2**40))
def test_a_prediction_lies_among_the_answers_and_the_default(answers: list[tuple[int, int]], prompt: int) -> None:
    lengths = OutputLengths(default_tokens=100)
    for prompt_tokens, output_tokens in answers:
        lengths.observe(prompt_tokens, output_tokens)
    seen = [100, *(output for _, output in answers)]
    assert min(seen) - 1e-6 <= lengths.predict(prompt) <= max(seen) * (1 + 1e-9)
