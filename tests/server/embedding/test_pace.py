"""How much of a batch fits between two steps, with times that are passed in."""

from __future__ import annotations

import pytest

from llmservice_server.embedding.pace import Pace


def test_without_a_measured_step_the_tokens_alone_bound_a_piece() -> None:
    pace = Pace()
    assert pace.rows(200) == 200
    assert pace.allows(10_000)


@pytest.mark.parametrize(("step_s", "row_s"), [(0.04, 0.0001), (0.04, 0.00002), (0.4, 0.0001)])
def test_a_piece_comes_to_take_less_than_a_fifth_of_a_step(step_s: float, row_s: float) -> None:
    """Of a layer whose weights take half a millisecond to read, however few tokens there are."""
    pace, spent = Pace(), []
    for _ in range(500):
        pace.add_step(step_s)
        rows = pace.rows(200)
        if pace.allows(rows):
            spent.append(0.0005 + rows * row_s)
            pace.add_piece(rows, spent[-1])
        else:
            spent.append(0.0)

    late = spent[100:]
    assert max(late) < 0.2 * step_s
    assert sum(late) <= 0.2 * step_s * len(late)
    assert rows == 200 or sum(late) > 0.08 * step_s * len(late), "the share is used"


def test_a_piece_that_costs_more_than_a_share_waits_for_the_credit_of_several_steps() -> None:
    pace = Pace()
    pace.add_step(0.04)
    pace.add_piece(16, 0.04)  # as much as a whole step

    waited = 0
    while not pace.allows(16):
        pace.add_step(0.04)
        waited += 1

    assert 10 < waited < 40
