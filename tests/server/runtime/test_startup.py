from __future__ import annotations

import pytest

from llmservice_server.runtime.startup import StartPhases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_phase_is_reported_with_its_seconds_and_all_with_their_sum() -> None:
    clock = Clock()
    phases = StartPhases(clock)
    with phases.phase("weights"):
        clock.now += 4.2
    clock.now += 100  # in no phase
    with phases.phase("KV cache"):
        clock.now += 0.5
    with phases.phase("weights"):
        clock.now += 1
    assert str(phases) == "5.7 s (weights 5.2, KV cache 0.5)"


def test_a_phase_that_fails_is_counted() -> None:
    clock = Clock()
    phases = StartPhases(clock)

    def fail() -> None:
        with phases.phase("weights"):
            clock.now += 3
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert phases.seconds == {"weights": 3}
