"""A load as sent, over real sockets."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from llmservice_bench.client import Target, TargetError, WordRate, measure_word_rate
from llmservice_bench.drive import Load, Progress, drive, figures, open_session, progress_bar
from llmservice_bench.trace import Lengths

LENGTHS = [Lengths(20, 4), Lengths(50, 1), Lengths(9, 12)]
ONE_A_WORD = WordRate(fixed=3.0, per_word=1.0)


async def run(server: Any, load: Load, chat: bool = False, progress: Progress | None = None) -> list[Any]:
    async with open_session(timeout_s=30) as session:
        return await drive(session, Target(server.url, "m", chat=chat), load, ONE_A_WORD, progress)


@pytest.mark.parametrize("output", ["text", "content", "reasoning_content", "reasoning"])
async def test_each_request_asks_for_and_gets_its_lengths(server: Any, output: str) -> None:
    server.output = output
    records = await run(server, Load(LENGTHS, num_requests=30), chat=output != "text")
    sizes = {(lengths.prompt_tokens, lengths.output_tokens) for lengths in LENGTHS}
    assert len(records) == len(server.bodies) == 30
    assert {(record.prompt_tokens, record.output_tokens) for record in records} == sizes
    for record in records:
        assert record.error is None
        assert len(record.itl_s) == record.output_tokens - 1, "the role of a chat is no token"
        assert 0 < record.ttft_s <= record.e2e_s


async def test_requests_are_sent_at_their_planned_times_with_slow_responses(server: Any) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    load = Load(LENGTHS, rate=5.0, num_requests=40, seed=3)
    planned = [request.at_s for request in load.plan(ONE_A_WORD)]
    started: list[float] = []
    async with open_session(timeout_s=30) as session:
        await drive(
            session,
            Target(server.url, "m"),
            load,
            ONE_A_WORD,
            on_record=lambda record: started.append(record.started_s - record.late_s),
            clock=lambda: now,
            sleep=sleep,
        )
    assert sorted(started) == pytest.approx(planned)
    assert planned[-1] == pytest.approx(39 / 5.0, rel=0.5)


async def test_concurrency_is_never_exceeded(server: Any) -> None:
    await run(server, Load(LENGTHS, max_concurrency=3, num_requests=40))
    assert server.most_in_flight == 3


async def test_duration_ends_the_load(server: Any) -> None:
    started = time.monotonic()
    records = await run(server, Load(LENGTHS, rate=100.0, duration_s=0.2))
    assert 0 < len(records) < 60
    assert all(record.started_s < 0.25 for record in records)
    assert time.monotonic() - started < 10


async def test_closed_loop_for_a_duration_ends(server: Any) -> None:
    records = await run(server, Load(LENGTHS, max_concurrency=2, duration_s=0.1))
    assert records
    assert server.most_in_flight <= 2


@pytest.mark.parametrize(
    ("misbehave", "error"),
    [
        ({"status": 503}, "HTTP 503"),
        ({"cut_after": 0}, "the stream ended before [DONE]"),
        ({"garbage": b"{not json"}, "an answer that cannot be read"),
        ({"garbage": b'{"nothing": "known"}'}, "an answer that cannot be read"),
        ({"garbage": b'{"error": {"message": "no", "code": "engine_dead"}}'}, "error in the stream: engine_dead"),
        ({"garbage": b'{"error": "no"}'}, "an answer that cannot be read"),
        ({"usage": {"total_tokens": 9}}, "a usage that cannot be read"),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": None}}, "a usage that cannot be read"),
    ],
    ids=[
        "refused",
        "cut off",
        "no JSON",
        "no choices",
        "error in the stream",
        "error of another form",
        "no counts",
        "a count that is null",
    ],
)
async def test_failures_are_recorded_and_do_not_end_the_run(server: Any, misbehave: dict[str, Any], error: str) -> None:
    for name, value in misbehave.items():
        setattr(server, name, value)
    progress = Progress()
    records = await run(server, Load(LENGTHS, num_requests=5), progress=progress)
    assert [record.error for record in records] == [error] * 5
    assert (progress.completed, progress.failed, progress.in_flight) == (0, 5, 0)


async def test_unreachable_server_is_a_failed_request(server: Any) -> None:
    async with open_session(timeout_s=5) as session:
        target = Target("http://127.0.0.1:1", "m")
        (record,) = await drive(session, target, Load(LENGTHS, num_requests=1), ONE_A_WORD)
        assert record.error == "ClientConnectorError"
        with pytest.raises(TargetError, match="cannot reach"):
            await measure_word_rate(session, target, np.random.default_rng(0))


async def test_word_rate_is_learnt_from_the_servers_usage(server: Any) -> None:
    async with open_session() as session:
        rate = await measure_word_rate(session, Target(server.url, "m"), np.random.default_rng(0))
        assert (rate.fixed, rate.per_word) == (3.0, 1.0)
        for server.usage in ({}, {"prompt_tokens": None}):
            with pytest.raises(TargetError, match=r"usage\.prompt_tokens"):
                await measure_word_rate(session, Target(server.url, "m"), np.random.default_rng(0))
        with pytest.raises(TargetError, match=r"/v1/completions does not report usage\.prompt_tokens"):
            await measure_word_rate(session, Target(f"{server.url}/page", "m"), np.random.default_rng(0))


def test_replayed_trace_keeps_its_times_and_the_length_that_came_at_each() -> None:
    load = Load(LENGTHS, arrivals=[0.0, 2.0, 7.0], duration_s=5.0)
    assert [(request.at_s, request.lengths) for request in load.plan(ONE_A_WORD)] == [
        (0.0, LENGTHS[0]),
        (2.0, LENGTHS[1]),
    ]
    assert load.is_open
    assert Load(LENGTHS, arrivals=[0.0, 2.0, 7.0], num_requests=2).total == 2


async def test_replayed_requests_that_are_sent_late_record_it(server: Any) -> None:
    now = 0.0

    async def oversleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.5

    load = Load(LENGTHS, arrivals=[0.0, 2.0, 7.0])
    async with open_session(timeout_s=30) as session:
        target = Target(server.url, "m")
        records = await drive(session, target, load, ONE_A_WORD, clock=lambda: now, sleep=oversleep)
    assert all(record.late_s >= 0.5 for record in records)


def test_same_seed_gives_the_same_requests() -> None:
    def plan(seed: int) -> list[Any]:
        return list(Load(LENGTHS, rate=9.0, num_requests=20, seed=seed).plan(ONE_A_WORD))

    assert plan(1) == plan(1) != plan(2)


def test_runs_of_one_seed_differ_in_their_prompts_alone() -> None:
    def plan(run: int) -> list[Any]:
        return list(Load(LENGTHS, rate=9.0, num_requests=20, run=run).plan(ONE_A_WORD))

    for first, second in zip(plan(1), plan(2), strict=True):
        assert (first.at_s, first.lengths) == (second.at_s, second.lengths)
        assert first.prompt != second.prompt


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "needs an end"),
        ({"duration_s": 1.0}, "needs max_concurrency"),
        ({"arrivals": [0.0, 1.0, 2.0], "rate": 5.0}, "not both"),
        ({"arrivals": [0.0]}, "1 arrivals need as many lengths, found 3"),
    ],
)
def test_load_that_contradicts_itself_or_has_no_end_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Load(LENGTHS, **fields)


LOAD = Load([Lengths(8, 4)], num_requests=5)


def test_progress_line_has_requests_rate_and_failures() -> None:
    assert figures(Progress(in_flight=3, pieces=5000), 2.5) == "3 in flight, 2,000 tok/s"
    assert figures(Progress(failed=2), 0.0) == "0 in flight, 0 tok/s, 2 failed"


async def test_progress_bar_is_shown_on_terminals_only(
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
