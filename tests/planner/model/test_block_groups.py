import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.model.block_groups import BlockGroups

WINDOW = 512


def groups_of(num_layers: int, num_sliding: int, step_tokens: int = 2048) -> BlockGroups:
    return BlockGroups.of(16, num_layers, num_sliding, WINDOW if num_sliding else None, step_tokens)


@pytest.mark.parametrize(
    ("num_layers", "num_sliding", "size", "num_full", "num_windowed"),
    [
        (32, 0, 32, 1, 0),  # Llama
        (32, 32, 32, 0, 1),  # Mistral 7B v0.1
        (24, 12, 12, 1, 1),  # gpt-oss-20b
        (42, 21, 21, 1, 1),  # Gemma 2 9B
        (26, 22, 4, 1, 6),  # Gemma 3 1B
        (62, 52, 11, 1, 5),  # Gemma 3 27B
        (28, 8, 4, 5, 2),
        (55, 50, 5, 1, 10),  # Gemma 4 31B: two of its ten full layers take the place of one
        (60, 59, 6, 1, 10),  # no more than twelve groups
    ],
)
def test_groups_of_known_models(num_layers: int, num_sliding: int, size: int, num_full: int, num_windowed: int) -> None:
    groups = groups_of(num_layers, num_sliding)
    assert groups.num_layers == size
    assert groups.windows == (None,) * num_full + (WINDOW,) * num_windowed


@given(st.integers(1, 100), st.data())
def test_every_layer_has_a_place_and_there_are_few_groups(num_layers: int, data: st.DataObject) -> None:
    num_sliding = data.draw(st.integers(0, num_layers))
    groups = groups_of(num_layers, num_sliding)
    num_full = groups.windows.count(None)
    assert len(groups) <= 12
    assert num_full * groups.num_layers >= num_layers - num_sliding
    assert (len(groups) - num_full) * groups.num_layers >= num_sliding


@given(st.integers(1, 100), st.data(), st.integers(0, 5000), st.integers(1, 4096))
def test_the_longest_sequence_is_the_longest_that_fits(
    num_layers: int, data: st.DataObject, num_blocks: int, step_tokens: int
) -> None:
    groups = groups_of(num_layers, data.draw(st.integers(0, num_layers)), step_tokens)
    longest = groups.longest(num_blocks, 10_000)
    assert longest == 0 or groups.blocks(longest) <= num_blocks
    assert longest == 10_000 or groups.blocks(longest + 1) > num_blocks


@given(st.integers(1, 2000), st.integers(1, 2048))
def test_no_more_blocks_are_held_than_is_said(start: int, num_tokens: int) -> None:
    """A step computes the tokens from `start` on, after the blocks behind the window were given back."""
    groups = groups_of(26, 22)
    held = -(-(start + num_tokens) // 16) - groups.first_seen(1, start)
    assert held <= groups.of_window(WINDOW, num_tokens)
    assert groups.first_seen(0, start) == 0
