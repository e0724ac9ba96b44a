"""Which pod gets the next request."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_gateway.balancer import FAILURE_PENALTY_S, Balancer
from llmservice_gateway.routes import Backend

A, B, C = (Backend(f"uid-{name}", name, f"http://{name}:8000") for name in "abc")


def test_least_in_flight_is_picked_first() -> None:
    balancer = Balancer()
    with balancer.hold(A), balancer.hold(A), balancer.hold(B):
        assert balancer.pick((A, B, C), (), now=0) == C
        assert balancer.pick((A, B), (), now=0) == B


def test_equals_take_turns() -> None:
    balancer = Balancer()
    picked = []
    for _ in range(6):
        backend = balancer.pick((A, B, C), (), now=0)
        assert backend is not None
        picked.append(backend.name)
        with balancer.hold(backend):
            pass
    assert picked == ["a", "b", "c"] * 2


def test_tried_pods_are_not_asked_twice() -> None:
    balancer = Balancer()
    assert balancer.pick((A, B), {A.uid}, now=0) == B
    assert balancer.pick((A, B), {A.uid, B.uid}, now=0) is None


def test_pod_that_refused_a_connection_is_asked_last_for_a_while() -> None:
    balancer = Balancer()
    balancer.mark_failed(A, now=100)
    with balancer.hold(B):
        assert balancer.pick((A, B), (), now=100) == B
        assert balancer.pick((A,), (), now=100) == A, "the only pod is asked all the same"
        assert balancer.pick((A, B), (), now=100 + FAILURE_PENALTY_S) == A


def test_hold_counts_down_when_the_request_fails() -> None:
    balancer = Balancer()

    def fail() -> None:
        assert balancer.in_flight(A) == 1
        raise ConnectionError

    with pytest.raises(ConnectionError), balancer.hold(A):
        fail()
    assert balancer.in_flight(A) == 0


def test_pod_with_requests_in_flight_is_remembered_after_it_left_the_table() -> None:
    balancer = Balancer()
    with balancer.hold(A), balancer.hold(B):
        balancer.forget_all_but({B.uid})
        assert balancer.in_flight(A) == 1
    balancer.forget_all_but({B.uid})
    assert balancer.in_flight(A) == 0


@given(requests=st.integers(1, 60), pods=st.integers(1, 8))
def test_requests_that_all_stay_in_flight_spread_evenly(requests: int, pods: int) -> None:
    backends = [Backend(str(i), str(i), "") for i in range(pods)]
    balancer = Balancer()
    spread: Counter[str] = Counter({backend.uid: 0 for backend in backends})
    with ExitStack() as held:
        for _ in range(requests):
            backend = balancer.pick(backends, (), now=0)
            assert backend is not None
            held.enter_context(balancer.hold(backend))
            spread[backend.uid] += 1
    assert max(spread.values()) - min(spread.values()) <= 1
