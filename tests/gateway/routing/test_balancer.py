"""Which pod gets the next request."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_gateway.routing.balancer import BOUND, FAILURE_PENALTY_S, Balancer, Ticket
from llmservice_gateway.routing.demand import Demand, Usage
from llmservice_gateway.routing.routes import Backend

A, B, C = (Backend(f"uid-{name}", name, f"http://{name}:8000") for name in "abc")


def test_least_in_flight_is_picked_first() -> None:
    balancer = Balancer()
    with balancer.hold(A), balancer.hold(A), balancer.hold(B):
        assert balancer.pick((A, B, C), (), now=0) == C
        assert balancer.pick((A, B), (), now=0) == B


def test_equally_loaded_pods_are_picked_round_robin() -> None:
    balancer = Balancer()
    picked = []
    for _ in range(6):
        backend = balancer.pick((A, B, C), (), now=0)
        assert backend is not None
        picked.append(backend.name)
        with balancer.hold(backend):
            pass
    assert picked == ["a", "b", "c"] * 2


def test_tried_pods_are_not_picked_twice() -> None:
    balancer = Balancer()
    assert balancer.pick((A, B), {A.uid}, now=0) == B
    assert balancer.pick((A, B), {A.uid, B.uid}, now=0) is None


def test_pod_that_refused_a_connection_is_picked_last_for_a_while() -> None:
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


def affine(key: bytes, prompt: int = 100, output: int = 20) -> Demand:
    return Demand(prompt, output, None, key)


def picked(balancer: Balancer, demand: Demand, backends: tuple[Backend, ...] = (A, B, C)) -> Backend:
    backend = balancer.pick(backends, (), now=0, demand=demand, by_prefix=True)
    assert backend is not None
    return backend


def test_load_is_tokens_and_not_requests() -> None:
    balancer = Balancer()
    with balancer.hold(A, Demand(1000, 100)), balancer.hold(B, Demand(10, 5)), balancer.hold(B, Demand(10, 5)):
        assert balancer.pick((A, B), (), now=0) == B
        assert (balancer.load(A), balancer.load(B)) == (1100, 30)
    assert (balancer.load(A), balancer.load(B)) == (0, 0)


def test_requests_with_one_beginning_go_to_one_pod_and_others_to_all() -> None:
    balancer = Balancer()
    homes = {number: picked(balancer, affine(b"%d" % number)) for number in range(60)}
    assert set(homes.values()) == {A, B, C}
    for number, home in homes.items():
        assert picked(balancer, affine(b"%d" % number)) == home


def test_a_pod_that_leaves_or_comes_moves_only_its_own_part_of_the_keys() -> None:
    balancer = Balancer()
    keys = [b"%d" % number for number in range(300)]
    before = {key: picked(balancer, affine(key)) for key in keys}
    after = {key: picked(balancer, affine(key), (A, B)) for key in keys}
    assert all(after[key] == home for key, home in before.items() if home != C)
    moved = [after[key] for key, home in before.items() if home == C]
    assert 60 < len(moved) < 140
    assert 0.3 < moved.count(A) / len(moved) < 0.7, "spread over all others"


def test_what_a_pod_has_cached_is_no_load() -> None:
    balancer = Balancer()
    demand = affine(b"conversation", prompt=1000, output=20)
    home = picked(balancer, demand)
    assert balancer.has_prefix(home, demand) is None
    with balancer.hold(home, demand):
        assert balancer.load(home) == 1020
    balancer.learn(home, demand, Usage(prompt=900, cached=0, completion=50))
    other = next(backend for backend in (A, B, C) if backend != home)
    assert (balancer.has_prefix(home, demand), balancer.has_prefix(other, demand)) == (True, False)
    with balancer.hold(home, demand), balancer.hold(other, demand):
        assert (balancer.load(home), balancer.load(other)) == (70, 1020)


def test_a_conversation_that_had_to_leave_its_pod_stays_where_it_went() -> None:
    balancer = Balancer()
    demand = affine(b"conversation")
    home = picked(balancer, demand)
    with balancer.hold(home, Demand(5000, 0)):
        other = picked(balancer, demand)
        assert other != home
        with balancer.hold(other, demand):
            pass
        balancer.learn(other, demand, Usage(prompt=100, cached=0, completion=20))
    assert picked(balancer, demand) == other


def test_a_pod_takes_what_it_has_not_cached_only_up_to_the_mean() -> None:
    balancer = Balancer()
    demand = affine(b"k", prompt=10, output=0)
    home = picked(balancer, demand, (A, B))
    with ExitStack() as stack:
        for backend in (A, B):
            for _ in range(12 if backend == home else 10):
                stack.enter_context(balancer.hold(backend, Demand(10, 0)))
        assert picked(balancer, demand, (A, B)) != home
        balancer.learn(home, demand, Usage(prompt=10, cached=0, completion=0))
        assert picked(balancer, demand, (A, B)) == home


def test_a_free_slot_goes_before_a_cached_prompt() -> None:
    balancer = Balancer()
    pods = tuple(Backend(f"uid-{name}", name, "", slots=1) for name in "xyz")
    home = picked(balancer, affine(b"k"), pods)
    with balancer.hold(home, Demand(1, 1)):
        assert picked(balancer, affine(b"k"), pods) != home
    assert picked(balancer, affine(b"k"), pods) == home


def test_a_pod_that_refused_a_connection_gets_no_requests_for_what_it_has_cached() -> None:
    balancer = Balancer()
    home = picked(balancer, affine(b"k"))
    balancer.mark_failed(home, now=0)
    assert picked(balancer, affine(b"k")) != home


requests = st.tuples(st.integers(0, 9), st.integers(0, 5000), st.integers(0, 500), st.booleans())


@given(pods=st.integers(1, 6), arriving=st.lists(requests, max_size=60), slots=st.none() | st.integers(1, 4))
def test_no_assignment_exceeds_the_bound(
    pods: int, arriving: list[tuple[int, int, int, bool]], slots: int | None
) -> None:
    backends = tuple(Backend(str(number), str(number), "", slots) for number in range(pods))
    balancer = Balancer()
    running: list[tuple[ExitStack, Ticket]] = []
    for key, prompt, output, ends in arriving:
        demand = affine(b"%d" % key, prompt, output)
        backend = picked(balancer, demand, backends)
        factor = BOUND if balancer.has_prefix(backend, demand) else 1
        stack = ExitStack()
        running.append((stack, stack.enter_context(balancer.hold(backend, demand))))
        loads = [balancer.load(each) for each in backends]
        assert sum(loads) == sum(ticket.tokens for _, ticket in running)
        bound = math.ceil(factor * sum(loads) / pods) + max(ticket.tokens for _, ticket in running)
        assert balancer.load(backend) <= bound
        if ends:
            done, ticket = running.pop(0)
            done.close()
            balancer.learn(ticket.backend, demand, Usage(prompt, 0, output))


TWO, ONE, NEW = (
    Backend(f"uid-{name}", name, f"http://{name}:8000", slots) for name, slots in (("d", 2), ("e", 1), ("f", 2))
)


@dataclass
class Line:
    """Requests at pods, none of which has an answer yet."""

    balancer: Balancer = field(default_factory=Balancer)
    held: ExitStack = field(default_factory=ExitStack)

    def wait(self, backend: Backend, number: int, leaves: bool = True) -> list[Ticket]:
        tickets = [self.held.enter_context(self.balancer.hold(backend)) for _ in range(number)]
        for ticket in tickets:
            ticket.leave = lambda: leaves
        return tickets


def test_new_pod_gets_the_longest_waiting_requests_up_to_its_slots() -> None:
    line = Line()
    tickets = line.wait(TWO, 6)
    line.balancer.rebalance((TWO, NEW), now=0)
    assert [ticket.backend for ticket in tickets] == [TWO, TWO, NEW, NEW, TWO, TWO]
    assert (line.balancer.in_flight(TWO), line.balancer.in_flight(NEW)) == (4, 2)


def test_longest_queue_is_rebalanced_first() -> None:
    line = Line()
    short, long = line.wait(TWO, 3), line.wait(ONE, 4)
    line.balancer.rebalance((TWO, ONE, NEW), now=0)
    assert [ticket.backend for ticket in short] == [TWO] * 3
    assert [ticket.backend for ticket in long] == [ONE, NEW, NEW, ONE]


def test_request_whose_answer_has_begun_stays() -> None:
    line = Line()
    running, begun, waiting = line.wait(TWO, 2), line.wait(TWO, 2, leaves=False), line.wait(TWO, 1)
    running[0].leave = begun[0].leave = None
    line.balancer.rebalance((TWO, NEW), now=0)
    assert [ticket.backend for ticket in (*running, *begun, *waiting)] == [TWO, TWO, TWO, TWO, NEW]


def test_slots_that_a_pod_reports_replace_those_of_its_service() -> None:
    line = Line()
    tickets = line.wait(TWO, 6)
    line.balancer.set_slots(TWO, 5)
    line.balancer.rebalance((TWO, NEW), now=0)
    assert [ticket.backend for ticket in tickets] == [TWO] * 5 + [NEW]


@pytest.mark.parametrize("pods", [(A, NEW), (TWO, A)], ids=["of the full pod", "of the free pod"])
def test_nothing_moves_where_slots_are_unknown(pods: tuple[Backend, Backend]) -> None:
    line = Line()
    tickets = line.wait(pods[0], 5)
    line.balancer.rebalance(pods, now=0)
    assert [ticket.backend for ticket in tickets] == [pods[0]] * 5


def test_pod_that_refused_a_connection_gets_no_waiting_requests() -> None:
    line = Line()
    tickets = line.wait(ONE, 2)
    line.balancer.mark_failed(NEW, now=100)
    line.balancer.rebalance((ONE, NEW), now=100)
    assert tickets[1].backend == ONE
    line.balancer.rebalance((ONE, NEW), now=100 + FAILURE_PENALTY_S)
    assert tickets[1].backend == NEW


def test_moved_request_counts_where_it_went_and_nowhere_once_it_ended() -> None:
    line = Line()
    line.wait(ONE, 3)
    line.balancer.rebalance((ONE, NEW), now=0)
    assert (line.balancer.in_flight(ONE), line.balancer.in_flight(NEW)) == (1, 2)
    line.held.close()
    assert (line.balancer.in_flight(ONE), line.balancer.in_flight(NEW)) == (0, 0)


def test_rebalancing_a_long_queue_overtakes_no_request() -> None:
    line = Line()
    other = Backend("uid-g", "g", "http://g:8000", 2)
    tickets = line.wait(TWO, 14)
    line.balancer.rebalance((TWO, NEW, other), now=0)
    numbers = {each: [i for i, ticket in enumerate(tickets) if ticket.backend == each] for each in (TWO, NEW, other)}
    assert sorted(len(at) for at in numbers.values()) == [4, 4, 6]
    for at in (numbers[NEW], numbers[other]):
        assert all(position <= number - 2 for position, number in enumerate(at))
        assert at == sorted(at)
    assert {2, 3} & set(numbers[NEW])
    assert {2, 3} & set(numbers[other])


def test_queues_of_similar_length_are_not_rebalanced() -> None:
    line = Line()
    tickets = line.wait(TWO, 5) + line.wait(NEW, 3)
    line.balancer.rebalance((TWO, NEW), now=0)
    assert [ticket.backend for ticket in tickets] == [TWO] * 5 + [NEW] * 3


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=6))
def test_after_rebalancing_no_request_waits_beside_a_free_slot(
    pods: list[tuple[int, int]],
) -> None:
    line = Line()
    backends = [Backend(str(number), str(number), "", slots) for number, (slots, _) in enumerate(pods)]
    for backend, (_, requests) in zip(backends, pods, strict=True):
        line.wait(backend, requests)
    line.balancer.rebalance(backends, now=0)
    free = [(each.slots or 0) - line.balancer.in_flight(each) for each in backends]
    assert sum(line.balancer.in_flight(each) for each in backends) == sum(requests for _, requests in pods)
    assert min(free) >= 0 or max(free) <= 0
    assert all(max(free) - least <= max(each.slots or 0 for each in backends) for least in free if least < 0)
