"""The mirror is compared with the gateway's own balancer, which tests may import and the simulator may not."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_bench.simulation import gateway as simulated
from llmservice_bench.simulation.requests import SimulatedRequest
from llmservice_gateway.requests import holding, proxy
from llmservice_gateway.routing import balancer, demand
from llmservice_gateway.routing.routes import Backend
from llmservice_planner.traffic.traces import TraceRequest


@dataclass(frozen=True)
class Replica:
    uid: str
    slots: int


def request_of(number: int, prompt_tokens: int) -> SimulatedRequest:
    return SimulatedRequest.of(number, TraceRequest(0.0, prompt_tokens, 10), 10_000)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["send", "end", "begin"]), st.integers(1, 900)), max_size=60),
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    by_prefix=st.booleans(),
)
def test_replicas_are_picked_and_requests_moved_as_the_gateway_does(
    steps: list[tuple[str, int]], slots: list[int], by_prefix: bool
) -> None:
    replicas = [Replica(f"pod-{number}", count) for number, count in enumerate(slots)]
    pods = [Backend(each.uid, each.uid, "http://pod", slots=each.slots) for each in replicas]
    mirror, real = simulated.Balancer[Replica](by_prefix=by_prefix), balancer.Balancer()
    tickets: list[tuple[simulated.Ticket[Replica], balancer.Ticket]] = []
    for number, (step, value) in enumerate(steps):
        if step == "send":
            most = 50 + 7 * number
            trace = TraceRequest(0.0, value, 10, max_tokens=most)
            request = SimulatedRequest.of(number, trace, 10_000)
            affinity = simulated.affinity_of(request).to_bytes(8, "little")
            asked = demand.Demand(value, min(round(mirror.output_tokens), most), affinity=affinity)
            mine = mirror.pick(replicas, (), request)
            theirs = real.pick(pods, (), 0.0, asked, by_prefix=by_prefix)
            assert mine is not None
            assert theirs is not None
            assert mine.uid == theirs.uid
            ticket = balancer.Ticket(theirs, balancer._cost(asked, 0), leave=lambda: True)
            real._put(ticket)
            tickets.append((mirror.put(request, mine), ticket))
        elif tickets:
            own, ticket = tickets[value % len(tickets)]
            if step == "begin":
                own.has_begun, ticket.leave = True, None
                continue
            tickets.remove((own, ticket))
            mirror.remove(own)
            real._remove(ticket)
        real.rebalance(pods, 0.0)
        while (move := mirror.movable(replicas)) is not None:
            own, target = move
            mirror.remove(own)
            moved = mirror.put(own.request, target)
            tickets = [(moved if mine is own else mine, ticket) for mine, ticket in tickets]
        assert [own.backend.uid for own, _ in tickets] == [ticket.backend.uid for _, ticket in tickets]


def test_the_limits_are_the_gateways() -> None:
    assert simulated.BOUND == balancer.BOUND
    assert simulated.AHEAD == holding.AHEAD
    assert (simulated.MOST_ATTEMPTS, simulated.MOST_LOST) == (proxy.MOST_ATTEMPTS, proxy.MOST_LOST)
    assert (
        holding.HoldLimits().requests,
        holding.HoldLimits().timeout_s,
    ) == (simulated.MOST_HELD, simulated.HOLD_TIMEOUT_S)
    assert demand.Estimator()._output_tokens.value == simulated.FIRST_ESTIMATE
    assert demand._MEMORY == simulated.MEMORY


def test_a_conversation_stays_on_the_replica_that_has_its_prompt() -> None:
    replicas = [Replica(f"pod-{number}", 8) for number in range(3)]
    mirror = simulated.Balancer[Replica]()
    picked = []
    for number in range(4):
        trace = TraceRequest(0.0, 512 * (number + 1), 10, tuple(range(7, 8 + number)))
        request = SimulatedRequest.of(number, trace, 10_000)
        backend = mirror.pick(replicas, (), request)
        assert backend is not None
        ticket = mirror.put(request, backend)
        mirror.remove(ticket)
        mirror.learn(ticket)
        picked.append(backend.uid)
        other = mirror.pick(replicas, (), request_of(100 + number, 50))
        assert other is not None
        mirror.put(request_of(100 + number, 50), other)
    assert len(set(picked)) == 1
