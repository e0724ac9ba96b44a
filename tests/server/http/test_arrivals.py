"""What arrives is counted, whether or not it is admitted; answers are predicted from those before them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

PROMPT = [5] * 8
FULL = ("--max-num-seqs", "1", "--max-queued-requests", "2", "--max-queued-batch-requests", "2")


def post(server: Any, **fields: Any) -> int:
    headers = fields.pop("headers", {})
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True} | fields
    status: int = server.send("POST", "/v1/completions", body, headers).status
    return status


def arrived(server: Any, lane: str) -> tuple[float, float, float]:
    """Sequences, prompt tokens and predicted output tokens."""
    figures = (server.metric(f"llmservice_arrived_{what}_total", lane=lane) for what in KINDS)
    requests, prompt_tokens, output_tokens = figures
    return requests, prompt_tokens, output_tokens


KINDS = ("requests", "prompt_tokens", "output_tokens")


def change(server: Any, lane: str, action: Callable[[], object]) -> tuple[float, ...]:
    before = arrived(server, lane)
    action()
    return tuple(after - earlier for after, earlier in zip(arrived(server, lane), before, strict=True))


@pytest.mark.parametrize(
    ("fields", "lane", "expected"),
    [
        ({}, "interactive", (1, 8, 6)),
        ({"priority": "batch"}, "batch", (1, 8, 6)),
        ({"prompt": [PROMPT, PROMPT[:3]]}, "interactive", (2, 11, 12)),
        ({"n": 3}, "interactive", (3, 24, 18)),
        ({"prompt": []}, "interactive", (0, 0, 0)),  # invalid: no demand
        ({"headers": {"x-llmservice-counted": "1"}}, "interactive", (0, 0, 0)),
    ],
)
def test_each_sequence_is_counted_with_its_prompt_and_the_answer_that_it_may_have(
    server: Any, fields: dict[str, Any], lane: str, expected: tuple[float, ...]
) -> None:
    assert change(server, lane, lambda: post(server, **fields)) == expected


def test_refused_requests_are_counted_too(shared_server: Callable[..., Any]) -> None:
    server = shared_server(*FULL)
    number = 12
    with ThreadPoolExecutor(number) as pool:

        def flood() -> None:
            statuses = list(pool.map(lambda _: post(server, max_tokens=400), range(number)))
            assert 429 in statuses

        requests, prompt_tokens, output_tokens = change(server, "interactive", flood)
    server.wait_until_idle()
    assert (requests, prompt_tokens) == (number, number * len(PROMPT))
    assert output_tokens > number  # at least a token each


def test_answers_are_predicted_from_those_that_ended_by_themselves(shared_server: Callable[..., Any]) -> None:
    server = shared_server("--expected-tokens", "400")
    (first,) = change(server, "interactive", lambda: post(server, max_tokens=300))[2:]
    assert first == 50  # an eighth of what a request is expected to have
    for _ in range(12):
        assert post(server, max_tokens=300, allowed_token_ids=[7], stop_token_ids=[7]) == 200
    (later,) = change(server, "interactive", lambda: post(server, max_tokens=300))[2:]
    assert later < 30


def test_an_answer_that_is_cut_off_is_not_taken_for_a_short_one(shared_server: Callable[..., Any]) -> None:
    server = shared_server("--expected-tokens", "404")
    for _ in range(12):
        post(server, max_tokens=1)
    (predicted,) = change(server, "interactive", lambda: post(server, max_tokens=300))[2:]
    assert predicted == pytest.approx(50.5)


def test_sizing_shows_the_times_of_steps_by_what_they_computed(shared_server: Callable[..., Any]) -> None:
    server = shared_server("--expected-tokens", "408")
    post(server, max_tokens=11)
    steps = {(each["kind"], each["sequences"]): each for each in json.loads(server.get("/sizing")[1])["steps"]}
    prompt, decode = steps["mixed", 1], steps["decode", 1]
    assert (prompt["steps"], prompt["prompt_tokens"], prompt["attention_pairs"]) == (1, 8, 36)
    assert (decode["steps"], decode["num_seqs"]) == (10, 10)
    assert decode["context_tokens"] == sum(range(9, 19))
    assert 0 < decode["seconds"] < 10
    assert server.metric("llmservice_step_seconds_count", kind="decode") == 10
