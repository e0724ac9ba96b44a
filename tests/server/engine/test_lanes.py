import pytest

from llmservice_server.engine.lanes import Lane, LaneConfig
from llmservice_server.engine.request import Request
from llmservice_server.types.messages import GenerateRequest, SamplingParams


def request_of(order: int, prompt: int = 1, max_tokens: int = 1, arrival_s: float = 0.0, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    message = GenerateRequest(
        request_id=f"r{order}",
        prompt_token_ids=[1] * prompt,
        sampling=sampling,
        arrival_s=arrival_s,
        priority=priority,
    )
    return Request.of(message, order, seed=0, eos_token_ids=frozenset())


def lane_of(*requests: Request, **config: object) -> Lane:
    lane = Lane(LaneConfig(**config), max_num_seqs=64, max_num_batched_tokens=2048)  # type: ignore[arg-type]
    for request in requests:
        lane.enter(request)
    return lane


def test_fcfs_serves_in_order_of_arrival_and_a_preempted_request_comes_back_to_its_place() -> None:
    first, second, third = (request_of(order, prompt=50 - order) for order in range(3))
    lane = lane_of(first, second, third)
    lane.remove(first)
    lane.remove(second)
    lane.enqueue(second)
    assert lane.waiting == [second, third]


def test_sjf_serves_the_shortest_first_and_equals_in_order_of_arrival() -> None:
    long, short, equal = request_of(0, 90, 10), request_of(1, 5, 10), request_of(2, 10, 5)
    assert lane_of(long, short, equal, policy="sjf").waiting == [short, equal, long]


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_the_smallest_priority_is_served_first_whatever_the_policy(policy: str) -> None:
    usual, last, first = request_of(0), request_of(1, priority=7), request_of(2, prompt=90, priority=-1)
    assert lane_of(usual, last, first, policy=policy).waiting == [first, usual, last]


@pytest.mark.parametrize(("later_s", "overtaken"), [(8.9, True), (9.1, False)])
def test_under_sjf_nobody_is_overtaken_beyond_the_ageing_bound(later_s: float, overtaken: bool) -> None:
    long, late = request_of(0, 90, 10), request_of(1, 5, 5, arrival_s=later_s)  # 90 tokens more, 10 a second
    lane = lane_of(long, late, policy="sjf", ageing_tokens_per_s=10.0)
    assert (lane.waiting[0] is late) is overtaken


def test_the_share_is_of_sequences_and_of_tokens() -> None:
    lane = lane_of(share=0.1)
    assert (lane.own_seqs, lane.own_tokens) == (6, 204)


def test_removing_who_does_not_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="request r7 is not in the queue"):
        lane_of(request_of(1)).remove(request_of(7))
