"""Stop strings across the borders of pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.text.stop_strings import StopStrings


def _run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.append(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        ([], ["one", " two"], ["one", " two", ""], None),
        (["STOP"], ["one STOP two"], ["one "], "STOP"),
        (["STOP"], ["one S", "TO", "P two"], ["one ", "", ""], "STOP"),
        (["STOP"], ["one S", "TO", "RM"], ["one ", "", "STORM", ""], None),
        (["STOP"], ["one ST"], ["one ", "ST"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["two", "one"], ["one two"], [""], "one"),
        (["\n\n", "END"], ["a\n", "b\n", "\n", "c"], ["a", "\nb", ""], "\n\n"),
        (["abcd", "bc"], ["abc"], ["a"], "bc"),
        (["a"], ["a"], [""], "a"),
    ],
)
def test_text_is_shown_as_soon_as_it_can_no_longer_be_part_of_a_stop_string(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    assert _run(stops, pieces) == (shown, matched)


def test_a_stop_string_that_is_kept_is_shown_and_nothing_behind_it() -> None:
    matcher = StopStrings(["STOP", "x"], keep=True)
    assert [matcher.append(piece) for piece in ("one S", "TOP two x")] == ["one ", "STOP"]
    assert matcher.matched == "STOP"


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopStrings(["x"])
    assert matcher.append("axb") == "a"
    assert matcher.append("c") == ""
    assert matcher.flush() == ""


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_what_is_shown_is_the_text_up_to_the_first_stop_string(stops: list[str], pieces: list[str]) -> None:
    text, (shown, matched) = "".join(pieces), _run(stops, pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if matched is None:
        assert not ends
        assert "".join(shown) == text
    else:
        assert text.startswith("".join(shown) + matched)
        assert not any(stop in "".join(shown) for stop in stops)
        assert len("".join(shown)) + len(matched) <= max(ends)
