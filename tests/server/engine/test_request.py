import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.engine.lane import Lane, LaneConfig
from llmservice_server.engine.request import Request, TokenHistory, why_refused
from llmservice_server.types.messages import GenerateRequest, SamplingParams

TOKENS = st.lists(st.integers(0, 30), max_size=40)


@given(prompt=TOKENS, answer=TOKENS)
def test_the_prompts_tokens_stand_there_once_and_the_answers_as_often_as_they_came(
    prompt: list[int], answer: list[int]
) -> None:
    history = TokenHistory(prompt, max_tokens=len(answer))
    for token in answer:
        history.append(token)
    counted = dict(zip(history.ids[: history.num_places].tolist(), history.counts.tolist(), strict=False))
    assert counted == {token: answer.count(token) for token in [*prompt, *answer]}


def refusal(prompt: list[int], **sampling: Any) -> str | None:
    settings = {"max_tokens": 10} | sampling
    message = GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**settings), arrival_s=0.0, lane="interactive"
    )
    return why_refused(message, vocab_size=50, max_request_tokens=20)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([0, 49], {}),
        ([1] * 10, {"max_tokens": 10}),
        ([1], {"temperature": 0.0, "top_p": 0.0, "top_k": 0}),
        ([1], {"temperature": 2.0, "top_p": 1.0, "top_k": 10_000}),
        ([1], {"allowed_token_ids": (0, 49), "bad_words": ((3,), (4, 5))}),
        ([1], {"allowed_token_ids": (7, 8), "stop_token_ids": (7,), "min_tokens": 1}),
    ],
)
def test_what_can_be_served_is_admitted(prompt: list[int], sampling: dict[str, Any]) -> None:
    assert refusal(prompt, **sampling) is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "no tokens, expected at least one"),
        ([50], {}, "expected 0 to 49"),
        ([-1], {}, "expected 0 to 49"),
        ([1] * 11, {}, "11 prompt tokens and max_tokens 10 make 21, expected at most 20: shorten"),
        ([1], {"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ([1], {"temperature": -0.1}, "temperature is -0.1"),
        ([1], {"temperature": math.nan}, "temperature is nan"),
        ([1], {"temperature": math.inf}, "temperature is inf"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"top_p": math.nan}, "top_p is nan"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"min_p": 1.1}, "min_p is 1.1"),
        ([1], {"min_p": math.nan}, "min_p is nan"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias names a token id outside"),
        ([1], {"logit_bias": {5: math.inf}}, "expected -100 to 100"),
        ([1], {"presence_penalty": math.nan}, "presence_penalty is nan"),
        ([1], {"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ([1], {"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ([1], {"min_tokens": -1}, "min_tokens is -1"),
        ([1], {"min_tokens": 2, "grammar": "{}"}, "0 beside a grammar"),
        ([1], {"allowed_token_ids": (1, 50)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((1, -1),)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((),)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((1,),), "grammar": "{}"}, "cannot be combined with a grammar"),
        ([1], {"allowed_token_ids": (7, 8), "stop_token_ids": (7, 8, 9), "min_tokens": 1}, "that min_tokens forbids"),
        ([1], {"logprobs": 21}, "expected 0 to 20"),
        ([1], {"prompt_logprobs": -1}, "expected 0 to 20"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    assert message in str(refusal(prompt, **sampling))


def request_of(
    order: int,
    prompt: int = 1,
    max_tokens: int = 1,
    arrival_s: float = 0.0,
    priority: int = 0,
    client: str | None = None,
    predicted_tokens: float | None = None,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    message = GenerateRequest(
        request_id=f"r{order}",
        prompt_token_ids=[1] * prompt,
        sampling=sampling,
        arrival_s=arrival_s,
        priority=priority,
        client=client,
        predicted_tokens=predicted_tokens,
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
    assert list(lane.in_order()) == [second, third]


def test_sjf_serves_those_predicted_to_be_shortest_first_and_equals_in_order_of_arrival() -> None:
    first, long, short, equal = (
        request_of(0, 10, 90),
        request_of(1, 10, 900, predicted_tokens=500),
        request_of(2, 10, 90, predicted_tokens=20),
        request_of(3, 90, 90, predicted_tokens=10),
    )
    assert list(lane_of(first, long, short, equal, order="sjf").in_order()) == [first, short, equal, long]


def test_under_sjf_what_the_prefix_cache_has_of_a_prompt_does_not_count() -> None:
    lane = lane_of(request_of(0, 100), request_of(1, 50), order="sjf")
    cached = request_of(2, 100)
    lane.enter(cached, num_cached_tokens=80)
    assert [request.request_id for request in lane.in_order()] == ["r0", "r2", "r1"]


@pytest.mark.parametrize("order", ["fcfs", "sjf"])
def test_the_smallest_priority_is_served_first_whatever_the_order(order: str) -> None:
    usual, last, first = request_of(0), request_of(1, priority=7), request_of(2, prompt=90, priority=-1)
    assert list(lane_of(usual, last, first, order=order).in_order()) == [first, usual, last]


@given(
    events=st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 50), st.integers(1, 400))), max_size=80),
    patience=st.sampled_from([0.5, 1.5, 3.0]),
)
def test_under_sjf_no_request_goes_before_one_that_came_a_bounded_amount_of_work_earlier(
    events: list[tuple[int, int] | None], patience: float
) -> None:
    """`None` serves a request, lengths add one. The work begun is the clock: so nothing starves, whatever comes."""
    lane = lane_of(order="sjf", patience=patience)
    begun, waiting = 0.0, dict[str, float]()
    came: dict[str, float] = {}  # when, by the work begun
    latest: dict[str, float] = {}  # when one may come that still goes before it
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            request = request_of(len(came), *event)
            came[request.request_id] = begun
            latest[request.request_id] = begun + patience * sum(waiting.values())
            lane.enter(request)
            waiting[request.request_id] = request.work
        elif waiting:
            served = serve(lane)
            begun += waiting.pop(served)
            earlier = [name for name in waiting if int(name.removeprefix("r")) < int(served.removeprefix("r"))]
            assert all(came[served] <= latest[name] + 1e-6 for name in earlier)


def serve(lane: Lane) -> str:
    """Serve the next request to its end; returns its id."""
    request = lane.head
    assert request is not None
    lane.remove(request)
    request.first_scheduled_s = 0.0
    lane.serve_prompt(request, request.num_prompt_tokens)
    request.token_ids += [1] * request.sampling.max_tokens
    lane.serve_answer(request)
    return request.request_id


def test_one_clients_thousand_requests_delay_another_by_one_request() -> None:
    lane = lane_of(*(request_of(order, client="greedy") for order in range(1000)))
    serve(lane)
    for order in (1000, 1001):
        lane.enter(request_of(order, client="modest"))
    assert [serve(lane) for _ in range(5)] == ["r1000", "r1", "r1001", "r2", "r3"]


def test_clients_are_served_in_proportion_to_tokens_not_to_requests() -> None:
    requests = [request_of(order, prompt=30, max_tokens=60, client="long") for order in range(50)]
    requests += [request_of(50 + order, prompt=5, max_tokens=5, client="short") for order in range(200)]
    lane = lane_of(*requests)
    served = [int(serve(lane).removeprefix("r")) >= 50 for _ in range(100)]
    assert served.count(True) == 90


def test_a_client_saves_nothing_up_while_it_sends_nothing() -> None:
    lane = lane_of(request_of(0, client="late"))
    serve(lane)
    for order in range(1, 50):
        lane.enter(request_of(order, client="busy"))
    for _ in range(40):
        serve(lane)
    for order in range(50, 60):
        lane.enter(request_of(order, client="late"))
    assert [serve(lane) for _ in range(6)] == ["r50", "r41", "r51", "r42", "r52", "r43"]


def test_a_preempted_request_goes_before_those_of_clients_that_were_served_less() -> None:
    lane = lane_of(request_of(0, prompt=50, client="greedy"), request_of(1, client="modest"))
    preempted = lane.head
    assert preempted is not None
    lane.remove(preempted)
    preempted.first_scheduled_s = 0.0
    lane.serve_prompt(preempted, 50)
    lane.enqueue(preempted)
    lane.enter(request_of(2, client="new"))
    assert lane.head is preempted
    assert [request.request_id for request in lane.in_order()] == ["r0", "r1", "r2"]


def test_a_priority_orders_the_requests_of_its_own_client_alone() -> None:
    lane = lane_of(
        request_of(0, client="a"), request_of(1, client="b", priority=-9), request_of(2, client="b", priority=-10)
    )
    assert [serve(lane) for _ in range(3)] == ["r0", "r2", "r1"]


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60
    )
)
def test_clients_with_waiting_requests_are_served_alike_up_to_one_request(
    requests: list[tuple[str | None, int, int]],
) -> None:
    lane = lane_of()
    tokens = dict.fromkeys((client for client, _, _ in requests), 0)
    left = [request_of(order, prompt, answer, client=name) for order, (name, prompt, answer) in enumerate(requests)]
    for request in left:
        lane.enter(request)
    assert sorted(map(id, lane.in_order())) == sorted(map(id, left))
    while left and {request.client for request in left} == tokens.keys():
        assert lane.head is next(lane.in_order())
        served = serve(lane)
        request = next(each for each in left if each.request_id == served)
        left.remove(request)
        tokens[request.client] += request.num_tokens
        assert max(tokens.values()) - min(tokens.values()) <= 80
    assert lane.num_waiting == len(left) == len(list(lane.in_order()))


def test_the_share_is_of_sequences_and_of_tokens() -> None:
    lane = lane_of(share=0.1)
    assert (lane.own_seqs, lane.own_tokens) == (6, 204)


def test_removing_a_request_that_does_not_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="request r7 is not in the queue"):
        lane_of(request_of(1)).remove(request_of(7))
