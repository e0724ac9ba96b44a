"""What waits, as the HTTP process counts it: eight may run at once, ten may wait in each lane."""

import pytest

from llmservice_server.engine.admission_queue import AdmissionQueue, DrainRate, QueueBound, limit_of


@pytest.mark.parametrize("seconds", [1, 10, 100])
def test_a_steady_rate_is_seen_as_what_it_is_however_young(seconds: int) -> None:
    rate = DrainRate(0.0)
    for step in range(seconds * 10):
        rate.add(0.5, step / 10)
    assert rate.per_s(seconds) == pytest.approx(5.0, rel=0.05)


def test_a_queue_that_stands_still_drains_ever_more_slowly() -> None:
    rate = DrainRate(0.0)
    for second in range(100):
        rate.add(3, second)
    assert rate.per_s(100) > 2.5
    assert rate.per_s(110) == pytest.approx(rate.per_s(100) / 2.718, rel=0.01)


def test_a_rate_of_no_time_at_all_is_none() -> None:
    rate = DrainRate(0.0)
    rate.add(1, 0.0)
    assert rate.per_s(5e-324) == 0.0


def test_a_new_queue_has_no_rate() -> None:
    assert DrainRate(5.0).per_s(5.0) == 0


BOUND = QueueBound(max_requests=10, max_prompt_tokens=1000)


def queue_of(interactive: int = 0, batch: int = 0, tokens: int = 10) -> AdmissionQueue:
    queue = AdmissionQueue({"interactive": BOUND, "batch": BOUND}, now=0.0)
    for lane, number in (("interactive", interactive), ("batch", batch)):
        for index in range(number):
            queue.enter(f"{lane}{index}", lane, tokens)
    return queue


def refusal(
    queue: AdmissionQueue, *tokens: int, waits: bool, lane: str = "interactive", now: float = 10.0
) -> str | None:
    refused = queue.why_refused(lane, list(tokens), max_num_seqs=8, engine_lets_wait=waits, now=now)
    return None if refused is None else refused.message


@pytest.mark.parametrize(
    ("in_flight", "asked", "waits", "refused"),
    [
        (0, 8, False, False),
        (0, 16, False, False),  # eight run, eight wait: 80 % of ten
        (0, 17, False, True),  # one more
        (15, 1, False, False),
        (16, 1, False, True),  # a burst between two steps: the engine has not said yet that they wait
        (7, 1, True, False),  # the KV cache holds fewer than eight: all who have no token yet wait
        (8, 1, True, True),
    ],
)
def test_from_four_fifths_of_the_bound_on_more_are_refused(
    in_flight: int, asked: int, waits: bool, refused: bool
) -> None:
    assert (refusal(queue_of(in_flight), *[10] * asked, waits=waits) is not None) is refused


def test_who_has_started_or_ended_waits_no_longer() -> None:
    queue = queue_of(8)
    assert refusal(queue, 10, waits=True) == (
        "the interactive queue is full: 8 sequences are waiting, 1 more are refused from 8 on, of at most 10"
    )
    queue.start("interactive0", 1.0)
    queue.start("interactive0", 2.0)  # its second token
    assert refusal(queue, 10, waits=True) is None
    assert refusal(queue, 10, 10, waits=True) is not None
    queue.leave(["interactive0", "interactive1", "never seen"], 3.0)
    assert refusal(queue, 10, 10, waits=True) is None


def test_a_queue_is_bounded_in_prompt_tokens_too_but_takes_one_of_any_size() -> None:
    assert refusal(queue_of(), 5000, waits=True) is None
    assert refusal(queue_of(2, tokens=300), 200, waits=True) is None
    message = refusal(queue_of(2, tokens=300), 201, waits=True)
    assert message is not None
    assert "600 prompt tokens are waiting, 201 more are refused from 800 on, of at most 1000" in message


def test_what_can_run_at_once_needs_no_queue_however_long_its_prompts_are() -> None:
    assert refusal(queue_of(4, tokens=900), 900, waits=False) is None


def test_each_lane_has_its_own_bound() -> None:
    full = queue_of(batch=8)
    assert refusal(full, 10, waits=True, lane="batch") is not None
    assert refusal(full, 10, waits=True) is None


def retry_after(drained: int, asked: int) -> int:
    """Of a lane with eight waiting, ten seconds after the start, in which `drained` have been served."""
    queue = queue_of(8 + drained)
    for index in range(drained):
        queue.start(f"interactive{index}", 10.0 * index / max(1, drained))
    refused = queue.why_refused("interactive", [10] * asked, max_num_seqs=8, engine_lets_wait=True, now=10.0)
    assert refused is not None
    return refused.retry_after_s


def test_when_to_come_again_is_estimated_from_how_fast_the_queue_drains() -> None:
    assert retry_after(drained=20, asked=1) == 1
    assert 4 <= retry_after(drained=20, asked=10) <= 6  # ten too many, two a second
    assert retry_after(drained=0, asked=1) == 60


def test_when_to_come_again_depends_on_how_long_the_waiting_answers_will_be() -> None:
    def retry_after_s(predicted_tokens: float) -> int:
        queue = AdmissionQueue({"interactive": BOUND}, now=0.0)
        for index in range(20):
            queue.enter(f"short{index}", "interactive", 10, predicted_tokens=90)
            queue.start(f"short{index}", index / 2)
        for index in range(8):
            queue.enter(f"waiting{index}", "interactive", 10, predicted_tokens=predicted_tokens)
        refused = queue.why_refused(
            "interactive",
            [10] * 10,
            predicted_tokens=10 * predicted_tokens,
            max_num_seqs=8,
            engine_lets_wait=True,
            now=10.0,
        )
        assert refused is not None
        return refused.retry_after_s

    assert 4 <= retry_after_s(90) <= 6  # ten too many, two a second
    assert retry_after_s(9 * 100 + 90) == pytest.approx(10 * retry_after_s(90), abs=10)


@pytest.mark.parametrize("tokens", [10, 100])  # the queue is full of requests, or of tokens as well
def test_a_client_that_fills_the_queue_keeps_none_out_that_uses_less_of_it(tokens: int) -> None:
    queue = AdmissionQueue({"interactive": BOUND}, now=0.0)

    def admits(client: str, number: int) -> int:
        """How many of its requests are let in."""
        admitted = 0
        for index in range(number):
            refused = queue.why_refused(
                "interactive", [tokens], client=client, max_num_seqs=0, engine_lets_wait=True, now=0.0
            )
            if refused is None:
                queue.enter(f"{client}{index}", "interactive", tokens, client)
                admitted += 1
        return admitted

    assert admits("greedy", 100) == 8
    assert admits("modest", 1) == 1
    assert admits("greedy", 100) == 0
    assert admits("other", 100) == 1  # then the queue is full
    queue.leave([f"greedy{index}" for index in range(8)], 1.0)
    assert admits("greedy", 100) == 6


@pytest.mark.parametrize(
    ("own", "num_clients", "limit"),
    [(10, 1, 80), (50, 2, 100), (51, 2, 80), (33, 3, 100), (34, 3, 80)],
)
def test_the_last_fifth_is_for_clients_with_at_most_an_equal_share(own: int, num_clients: int, limit: int) -> None:
    assert limit_of(100, own, num_clients) == limit
