"""Driving transformers' manager when it is too slow or fails; a double generates a given number of tokens."""

import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import harness.gpu.triton_interpreter  # noqa: F401 - what is imported here is not compiled
from gpu_bench.throughput import drive_manager, pages_in_flight
from peers.workload import PeerRequest

IN_FLIGHT = 4
REQUESTS = [PeerRequest([5] * number, 2) for number in range(1, 21)]


@dataclass
class Request:
    name: str
    tokens: int
    drawn: int = 0


class Manager:
    """Generates `draws` tokens, for each request in turn; `runs` is whether its thread is alive after that."""

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


def test_each_finished_answer_starts_the_next_request() -> None:
    answers = drive_manager(Manager(draws=1000), REQUESTS, IN_FLIGHT, 600.0)
    assert [answer.token_ids for answer in answers] == [[7, 7]] * 20


def test_a_slow_manager_is_stopped_and_its_tokens_count() -> None:
    answers = drive_manager(Manager(draws=6), REQUESTS, IN_FLIGHT, 0.05)
    assert len(answers) == IN_FLIGHT + 2  # two were finished, and made room for two others
    assert [len(answer.token_ids) for answer in answers] == [2, 2, 1, 1, 0, 0]
    assert [len(answer.token_times_s) for answer in answers] == [2, 2, 1, 1, 0, 0]


def test_a_manager_whose_thread_has_ended_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended its thread"):
        drive_manager(Manager(draws=3, runs=False), REQUESTS, IN_FLIGHT, 600.0)


def test_cache_has_room_for_the_longest_requests_in_flight() -> None:
    requests = [PeerRequest([5] * 64, 64)] * 300 + [PeerRequest([5] * 640, 1)] * 56
    assert pages_in_flight(requests, 256) == 56 * 12 + 200 * 3
