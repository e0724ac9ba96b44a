"""transformers' manager as somebody who draws so many tokens and then no more: it may be too slow, or broken."""

import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import harness.triton_interpreter  # noqa: F401 - what is imported here is not compiled
from card.transformers_peer import closed_loop, pages_in_flight
from peers.workload import Ask

IN_FLIGHT = 4
ASKS = [Ask([5] * number, 2) for number in range(1, 21)]


@dataclass
class Request:
    name: str
    tokens: int
    drawn: int = 0


class Manager:
    """Draws a token for each request in turn, as many as it `draws`; with `runs`, its thread is alive after that."""

    def __init__(self, draws: int, runs: bool = True) -> None:
        self.draws, self.runs, self.requests = draws, runs, deque[Request]()

    def add_request(self, prompt: list[int], max_new_tokens: int, record_timestamps: bool, streaming: bool) -> str:
        assert record_timestamps
        assert streaming
        self.requests.append(Request(f"request {len(prompt)}", max_new_tokens))
        return self.requests[-1].name

    def is_running(self) -> bool:
        return self.runs

    def get_result(self, timeout: float) -> SimpleNamespace | None:
        if not self.draws:
            time.sleep(min(timeout, 0.01))
            return None
        self.draws -= 1
        request = self.requests.popleft()
        request.drawn += 1
        finished = request.drawn == request.tokens
        if not finished:
            self.requests.append(request)
        now = time.perf_counter()
        return SimpleNamespace(
            request_id=request.name, error=None, generated_tokens=[7] * request.drawn,
            timestamps=[now + place for place in range(request.drawn)], is_finished=lambda: finished,
        )  # fmt: skip


def test_each_answer_makes_room_for_the_next_request() -> None:
    answers = closed_loop(Manager(draws=1000), ASKS, IN_FLIGHT, 600.0)
    assert [answer.token_ids for answer in answers] == [[7, 7]] * 20


def test_a_peer_that_is_too_slow_is_stopped_and_every_token_that_it_has_drawn_counts() -> None:
    answers = closed_loop(Manager(draws=6), ASKS, IN_FLIGHT, 0.05)
    assert len(answers) == IN_FLIGHT + 2  # two were finished, and made room for two others
    assert [len(answer.token_ids) for answer in answers] == [2, 2, 1, 1, 0, 0]
    assert [len(answer.token_times_s) for answer in answers] == [2, 2, 1, 1, 0, 0]


def test_a_peer_whose_thread_has_ended_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="ended its thread"):
        closed_loop(Manager(draws=3, runs=False), ASKS, IN_FLIGHT, 600.0)


def test_a_peers_cache_holds_the_longest_that_may_be_in_flight() -> None:
    asks = [Ask([5] * 64, 64)] * 300 + [Ask([5] * 640, 1)] * 56
    assert pages_in_flight(asks, 256) == 56 * 12 + 200 * 3
