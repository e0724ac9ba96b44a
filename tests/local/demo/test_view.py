"""The demo's table, on a terminal and off it."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from llmservice_local.demo.observation import Observation
from llmservice_local.demo.view import LiveTable, cells

FIRST = Observation(
    time_s=10.0,
    replicas=1,
    ready=1,
    desired=1,
    waiting=12.0,
    kv_usage=0.5,
    ttft_p99_s=1.25,
    pieces=1000,
    in_flight=16,
    completed=40,
    failed=0,
)
SECOND = replace(FIRST, time_s=14.0, pieces=3000, replicas=3, desired=4, ttft_p99_s=None)


def test_row_shows_actual_and_desired_replicas() -> None:
    assert cells("load", FIRST, None) == ("10s", "load", "1 ready", "12", "1250 ms", "50%", "0", "40", "0")
    assert cells("load", SECOND, FIRST) == ("14s", "load", "1/3→4", "12", "–", "50%", "500", "40", "0")


def test_without_a_terminal_each_row_is_one_plain_line() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, width=120)) as table:
        table.show("load", FIRST)
        table.show("load", replace(FIRST, time_s=11.0))
        table.show("load", SECOND)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3, "the row a second later is left out"
    assert lines[0].split() == [
        "time",
        "phase",
        "replicas",
        "queue",
        "p99",
        "TTFT",
        "KV",
        "use",
        "tokens/s",
        "done",
        "failed",
    ]
    assert lines[2].split() == ["14s", "load", "1/3→4", "12", "–", "50%", "500", "40", "0"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_last_rows_stay() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, force_terminal=True, width=120)) as table:
        table.show("load", FIRST)
        table.show("load", SECOND)
    assert "1/3→4" in out.getvalue()
    assert "\x1b" in out.getvalue()
