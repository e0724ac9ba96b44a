from __future__ import annotations

import pytest

from llmservice_bench.drive import Load, Progress
from llmservice_bench.lengths import Lengths
from llmservice_bench.progress_bar import figures, progress_bar

LOAD = Load([Lengths(8, 4)], num_requests=5)


def test_figures_tell_of_the_present_the_pace_and_the_failures() -> None:
    assert figures(Progress(in_flight=3, pieces=5000), 2.5) == "3 in flight, 2,000 tok/s"
    assert figures(Progress(failed=2), 0.0) == "0 in flight, 0 tok/s, 2 failed"


async def test_terminal_sees_a_bar_and_anything_else_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with progress_bar(LOAD, "m"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    async with progress_bar(LOAD, "m"):
        pass
    captured = capsys.readouterr()
    assert "0/5" in captured.err
    assert captured.out == ""
