"""Who wins, and what is said of the others; the ways raced here are numbers."""

import math

import pytest

from llmservice_server.backend.cuda.chunk_race import Candidate, race


def way(name: str, seconds: float, problem: str | None = None) -> Candidate:
    return Candidate(name, lambda: problem, lambda: seconds)


@pytest.mark.parametrize(
    ("ours", "theirs", "winner"),
    [
        (1.0, 0.5, "theirs"),
        (1.0, 0.94, "theirs"),
        (1.0, 0.96, "ours"),  # a measurement may be off by as much
        (1.0, 2.0, "ours"),
    ],
)
def test_another_way_must_be_faster_by_a_twentieth(ours: float, theirs: float, winner: str) -> None:
    assert race([way("ours", ours), way("theirs", theirs)]).name == winner


def test_of_several_faster_ways_the_fastest_wins() -> None:
    assert race([way("ours", 3.0), way("good", 2.0), way("best", 1.0)]).name == "best"


def test_the_verdict_shows_every_time() -> None:
    verdict = race([way("ours", 1.5e-3), way("theirs", 0.25e-3)])
    assert verdict.reason == "ours 1.5 ms, theirs 0.25 ms"


def test_a_way_that_is_unusable_is_not_timed_and_the_verdict_says_why() -> None:
    untimed = Candidate("theirs", lambda: "there is none in this build", lambda: math.nan)
    verdict = race([way("ours", 1e-3), untimed])
    assert verdict.name == "ours"
    assert verdict.reason == "ours 1 ms, theirs is unusable: there is none in this build"


def test_a_way_that_raises_is_unusable() -> None:
    def raises() -> float:
        raise RuntimeError("CUDA out of memory\nand a long story")

    verdict = race([way("ours", 1e-3), Candidate("theirs", lambda: None, raises)])
    assert (verdict.name, verdict.reason) == ("ours", "ours 1 ms, theirs is unusable: RuntimeError: CUDA out of memory")


def test_where_ours_cannot_be_timed_whoever_can_wins_and_nobody_else_is_ours() -> None:
    assert race([way("ours", 1.0, "broken"), way("theirs", 9.0)]).name == "theirs"
    assert race([way("ours", 1.0, "broken"), way("theirs", 9.0, "broken")]).name == "ours"
