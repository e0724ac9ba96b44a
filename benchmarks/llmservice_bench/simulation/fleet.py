"""All replicas of a service and its gateway, in simulated time: arrivals, starts, drains, failures, the autoscaler.

Events of one time are done in a fixed order, so that a seed gives one result: steps that end, replicas that become
ready or fail, arrivals, and last the autoscaler.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from llmservice_bench.simulation.gateway import HOLD_TIMEOUT_S, MOST_ATTEMPTS, MOST_HELD, MOST_LOST, Balancer, Ticket
from llmservice_bench.simulation.latencies import GapHistogram
from llmservice_bench.simulation.observation import Observation, Policy, Totals
from llmservice_bench.simulation.outcome import DecisionRecord, FleetSize, Outcome
from llmservice_bench.simulation.replica import PROMPT_BOUNDS, TTFT_BOUNDS_S, Replica, ReplicaConfig
from llmservice_bench.simulation.requests import Outcome as RequestOutcome
from llmservice_bench.simulation.requests import SimulatedRequest
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.load import Held, Scrape
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.admission_queue import Refusal
from llmservice_server.engine.scheduler import BATCH

_CREATION_S = 0.2
"""After so long the operator sees the pods that it has asked for, which wakes it."""
_HELD_READ_S = 1.0
"""The operator reads what gateways hold this often while a service is at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The service and what happens to it."""

    replica: ReplicaConfig
    initial: int
    """Replicas that are ready when the traffic begins; their caches are cold."""
    startup_s: tuple[float, ...] = (30.0,)
    """From a replica's creation until it is ready; of several, each start has one at random."""
    startups_in_order: bool = False
    """Each start has the next of `startup_s`, and the last one again, in place of one at random."""
    mtbf_s: float = math.inf
    """Mean time between failures of one replica."""
    failures_s: tuple[float, ...] = ()
    """Times at which one replica fails that is ready."""
    drain_s: float = 600.0
    """A replica that is removed finishes its requests for so long at most."""
    client_retries: int = 0
    """How often a client repeats a request that was refused, after the time that the refusal names."""
    gpus: int = 1
    """Of a replica."""
    by_prefix: bool = True
    """Whether the gateway sends requests to the replica that has the beginning of their prompt."""
    seed: int = 0


@dataclass(slots=True, eq=False)
class Pod:
    """A replica with what Kubernetes knows of it; the attributes are those that the operator's supply is read from."""

    uid: str
    created_s: float
    scheduled_s: float | None = None
    replica: Replica | None = None
    ready: bool = False
    ready_since_s: float | None = None
    terminating: bool = False
    ended_s: float | None = None
    slots: int = 0
    """Requests that it runs at once, as its last answer says."""
    restarts: int = 0
    trouble: None = None
    due: int = 0
    """Which of its events is the next one; earlier ones are void."""

    @property
    def serves(self) -> bool:
        return self.ready and not self.terminating


class Order(IntEnum):
    """What is done first of what happens at one time."""

    STEP, READY, FAILURE, ARRIVAL, TIMEOUT, TICK = range(6)


Action = Callable[[float], None]


class Fleet:
    """One run of one trace under one policy."""

    def __init__(
        self,
        config: FleetConfig,
        trace: Sequence[TraceRequest],
        policy: Policy,
        duration_s: float | None = None,
        *,
        warmup_s: float = 0.0,
    ) -> None:
        """The traffic lasts `duration_s`, of which the first `warmup_s` are not measured: caches and history fill."""
        self.config = config
        self.policy = policy
        longest = config.replica.max_request_tokens
        self.requests = [SimulatedRequest.of(number, each, longest) for number, each in enumerate(trace)]
        for request in self.requests:
            request.is_measured = request.arrival_s >= warmup_s
        last_s = self.requests[-1].arrival_s if self.requests else 0.0
        self.duration_s = last_s if duration_s is None else duration_s
        self.warmup_s = warmup_s
        self.replicas = config.initial
        self.pods: list[Pod] = []
        self.totals = Totals()
        self._gone: list[Pod] = []
        self._rng = random.Random(config.seed)  # noqa: S311 - no secret
        self._gaps = GapHistogram()
        self._balancer = Balancer[Pod](by_prefix=config.by_prefix)
        self._tickets: dict[SimulatedRequest, Ticket[Pod]] = {}
        self._held: dict[SimulatedRequest, float] = {}
        """Since when."""
        self._events: list[tuple[float, int, int, Action]] = []
        self._order = itertools.count()
        self._touched: dict[Pod, None] = {}
        self._names, self._starts = itertools.count(), itertools.count()
        self._open = len(self.requests)
        self._tick = 0
        self._tick_due_s = math.inf
        self._sizes: list[FleetSize] = []
        self._decisions: list[DecisionRecord] = []
        self._num_steps = self._num_preemptions = 0

    def run(self) -> Outcome:
        """Until all requests have ended, and for the whole duration."""
        self._note(0.0)
        self._at(self.warmup_s, Order.STEP, self._begin_measuring)
        for _ in range(self.config.initial):
            pod = self._create(-self._startup_s())
            self._become_ready(pod, 0.0)
        for time_s in self.config.failures_s:
            self._at(time_s, Order.FAILURE, self._fail_any)
        if self.requests:
            self._at(self.requests[0].arrival_s, Order.ARRIVAL, lambda now: self._arrive(0, now))
        self._schedule_tick(0.0)
        while self._events and (self._open or self._events[0][0] <= self.duration_s):
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                heapq.heappop(self._events)[3](now)
            self._settle(now)
        return self._outcome()

    def _at(self, time_s: float, order: Order, action: Action) -> None:
        heapq.heappush(self._events, (time_s, order, next(self._order), action))

    # Requests

    def _arrive(self, number: int, now: float) -> None:
        request = self.requests[number]
        if number + 1 < len(self.requests):
            self._at(
                self.requests[number + 1].arrival_s, Order.ARRIVAL, lambda time_s: self._arrive(number + 1, time_s)
            )
        self.totals.arrive(request.prompt_tokens, now)
        self._send(request, now)

    def _send(self, request: SimulatedRequest, now: float) -> None:
        backends = self._serving()
        if self._held or not backends:
            self._hold(request, now)
        else:
            self._attempt(request, now, backends)

    def _attempt(self, request: SimulatedRequest, now: float, backends: Sequence[Pod]) -> None:
        """Offer it to one replica after another, as the gateway does."""
        tried: set[str] = set()
        refusal = None
        while request.attempts < MOST_ATTEMPTS and (pod := self._balancer.pick(backends, tried, request)) is not None:
            request.attempts += 1
            refusal = self._offer(request, pod, now)
            if refusal is None:
                return
            tried.add(pod.uid)
            if not refusal.retry_after_s:
                break
        message = "no replica could take it" if refusal is None else refusal.message
        if refusal is None or not refusal.retry_after_s or request.client_retries >= self.config.client_retries:
            self._end(request, "refused", now, message)
            return
        request.client_retries += 1
        request.attempts, request.is_counted = 0, False
        self._at(now + refusal.retry_after_s, Order.ARRIVAL, lambda time_s: self._send(request, time_s))

    def _offer(self, request: SimulatedRequest, pod: Pod, now: float) -> Refusal | None:
        assert pod.replica is not None  # noqa: S101 - it is ready
        refusal = pod.replica.offer(request, now)
        self._touched[pod] = None
        if refusal is None:
            self._tickets[request] = self._balancer.put(request, pod)
        return refusal

    def _hold(self, request: SimulatedRequest, now: float) -> None:
        if len(self._held) >= MOST_HELD:
            self._end(request, "refused", now, f"{MOST_HELD} requests are held already while no replica is ready")
            return
        self._held[request] = now
        timeout_s = request.arrival_s + HOLD_TIMEOUT_S
        self._at(max(now, timeout_s), Order.TIMEOUT, lambda time_s: self._expire_held(request, time_s))
        if self.replicas == 0:
            self._schedule_tick(math.ceil(now / _HELD_READ_S) * _HELD_READ_S, earlier=True)

    def _expire_held(self, request: SimulatedRequest, now: float) -> None:
        if self._held.pop(request, None) is not None:
            self._end(request, "timed_out", now, f"no replica became ready within {HOLD_TIMEOUT_S:g} s")

    def _release_held(self, now: float) -> None:
        backends = self._serving()
        while self._held and backends and self._balancer.has_room(backends):
            request = next(iter(self._held))
            del self._held[request]
            self._attempt(request, now, backends)

    def _end(self, request: SimulatedRequest, outcome: RequestOutcome, now: float, reason: str = "") -> None:
        request.end(outcome, now, reason)
        self._open -= 1
        self.totals.leave(now)

    # Steps

    def _settle(self, now: float) -> None:
        """Plan the next steps of the replicas that something has happened to, and take what they have done."""
        while self._touched:
            touched, self._touched = list(self._touched), {}
            for pod in touched:
                if pod.replica is not None:
                    pod.replica.begin(now)
                    self._collect(pod, now)
                    self._schedule_step(pod)

    def _schedule_step(self, pod: Pod) -> None:
        assert pod.replica is not None  # noqa: S101 - the caller has checked
        pod.due += 1
        due, time_s = pod.due, pod.replica.next_event_s

        def advance(now: float) -> None:
            if pod.due == due and pod.replica is not None:
                pod.replica.advance(now)
                self._collect(pod, now)
                self._touched[pod] = None

        if time_s < math.inf:
            self._at(time_s, Order.STEP, advance)

    def _collect(self, pod: Pod, now: float) -> None:
        replica = pod.replica
        assert replica is not None  # noqa: S101 - the callers have checked
        if not replica.first_tokens and not replica.ended:
            return
        if replica.first_tokens:  # answers name them as they begin
            pod.slots = replica.scheduler.num_admissible
        for request in replica.first_tokens:
            if ticket := self._tickets.get(request):
                ticket.has_begun = True
        ended = list(replica.ended)
        replica.first_tokens.clear()
        replica.ended.clear()
        for request in ended:
            ticket = self._tickets.pop(request)
            self._balancer.remove(ticket)
            self._open -= 1
            self.totals.leave(now)
            if request.outcome == "finished":
                self._balancer.learn(ticket)
                self.totals.finish(request.num_tokens)
        if ended:
            self._rebalance(now)
            self._release_held(now)
            if pod.terminating and not len(replica):
                self._remove(pod, now)

    def _rebalance(self, now: float) -> None:
        backends = self._serving()
        while backends and (move := self._balancer.movable(backends)) is not None:
            ticket, target = move
            source, request = ticket.backend, ticket.request
            assert source.replica is not None  # noqa: S101 - the request is in flight there
            source.replica.withdraw(request, now)
            self._touched[source] = None
            self._balancer.remove(ticket)
            del self._tickets[request]
            if self._offer(request, target, now) is not None:
                self._attempt(request, now, backends)

    # Replicas

    def _serving(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.serves]

    def _startup_s(self) -> float:
        times_s = self.config.startup_s
        if self.config.startups_in_order:
            return times_s[min(next(self._starts), len(times_s) - 1)]
        return self._rng.choice(times_s)

    def _create(self, created_s: float) -> Pod:
        pod = Pod(f"replica-{next(self._names)}", created_s)
        self.pods.append(pod)
        return pod

    def _start(self, now: float) -> None:
        pod = self._create(now)
        self._at(now + self._startup_s(), Order.READY, lambda time_s: self._become_ready(pod, time_s))

    def _become_ready(self, pod: Pod, now: float) -> None:
        if pod.ended_s is not None:
            return
        pod.ready, pod.ready_since_s = True, now
        pod.replica = Replica(self.config.replica, now, self._gaps)
        pod.slots = self.config.replica.scheduler.max_num_seqs  # what the gateway assumes before the first answer
        if self.config.mtbf_s < math.inf:
            self._at(now + self._rng.expovariate(1 / self.config.mtbf_s), Order.FAILURE, lambda at: self._fail(pod, at))
        self._release_held(now)
        self._rebalance(now)
        self._changed(now)

    def _scale(self, replicas: int, now: float) -> None:
        """Set the number of replicas; Kubernetes removes those first that are not ready, then the least loaded."""
        self.replicas = replicas
        live = [pod for pod in self.pods if not pod.terminating]
        for _ in range(replicas - len(live)):
            self._start(now)
        if len(live) > replicas:
            live.sort(key=lambda pod: (pod.ready, self._balancer.in_flight(pod), -pod.created_s))
            for pod in live[: len(live) - replicas]:
                self._terminate(pod, now)
        self._note(now)

    def _terminate(self, pod: Pod, now: float) -> None:
        pod.terminating = True
        if pod.replica is None or not len(pod.replica):
            self._remove(pod, now)
        else:
            self._at(now + self.config.drain_s, Order.FAILURE, lambda time_s: self._fail(pod, time_s))

    def _remove(self, pod: Pod, now: float) -> None:
        self._count_work(pod)
        pod.ended_s, pod.replica, pod.ready = now, None, False
        pod.due += 1
        self.pods.remove(pod)
        self._gone.append(pod)
        self._balancer.forget(pod)
        self._changed(now)

    def _fail_any(self, now: float) -> None:
        if serving := self._serving():
            self._fail(self._rng.choice(serving), now)

    def _fail(self, pod: Pod, now: float) -> None:
        """It is lost with all that it has; another takes its place."""
        if pod.ended_s is not None or pod.replica is None:
            return
        pod.replica.advance(now)
        self._collect(pod, now)
        if pod not in self.pods:  # its last request has just ended
            return
        lost = pod.replica.in_flight
        tickets = [self._tickets.pop(request) for request in lost]
        for ticket in tickets:
            self._balancer.remove(ticket)
        self._remove(pod, now)
        if not pod.terminating:
            self._start(now)
        for ticket in tickets:
            request = ticket.request
            request.lost += 1
            if ticket.has_begun:
                self._end(request, "failed", now, f"its replica was lost after {request.num_tokens} tokens")
            elif request.lost >= MOST_LOST:
                self._end(request, "failed", now, f"{request.lost} replicas were lost while it waited there")
            else:
                self._send(request, now)
        self._note(now)

    def _changed(self, now: float) -> None:
        """A replica became ready or is gone."""
        self._note(now)
        if self.policy.wakes:
            self._schedule_tick(now, earlier=True)

    def _note(self, now: float) -> None:
        ready = sum(pod.serves for pod in self.pods)
        terminating = sum(pod.terminating for pod in self.pods)
        size = FleetSize(now, self.replicas, ready, len(self.pods) - ready - terminating, terminating)
        if self._sizes and self._sizes[-1].time_s == now:
            self._sizes.pop()
        self._sizes.append(size)

    # The autoscaler

    def _schedule_tick(self, time_s: float, *, earlier: bool = False) -> None:
        """`earlier`: only if the next one is due later, which is void then."""
        if earlier and time_s >= self._tick_due_s:
            return
        self._tick += 1
        tick, self._tick_due_s = self._tick, time_s

        def decide(now: float) -> None:
            if tick == self._tick:
                self._decide(now)

        self._at(time_s, Order.TICK, decide)

    def _decide(self, now: float) -> None:
        self._tick_due_s = math.inf
        decision = self.policy.decide(self._observe(now))
        before = self.replicas
        self._decisions.append(DecisionRecord(now, before, decision))
        if decision.replicas != before:
            self._scale(decision.replicas, now)
        if self.policy.wakes and decision.replicas > before:
            self._schedule_tick(now + _CREATION_S)
            return
        jitter = self.policy.jitter
        self._schedule_tick(now + self.policy.interval_s * self._rng.uniform(1 - jitter, 1 + jitter))

    def _observe(self, now: float) -> Observation:
        scrapes = {}
        for pod in self._serving():
            assert pod.replica is not None  # noqa: S101 - it serves
            pod.replica.advance(now)
            self._touched[pod] = None
            self._collect(pod, now)
            scrapes[pod.uid] = scrape(pod.replica, now)
        tokens = sum(each.prompt_tokens for each in self._held) + round(self._balancer.output_tokens) * len(self._held)
        oldest_s = now - min(self._held.values(), default=now)
        return Observation(
            now_s=now,
            replicas=self.replicas,
            pods=tuple(self.pods),
            scrapes=scrapes,
            held=Held(len(self._held), tokens, oldest_s),
            totals=self.totals.at(now),
        )

    def _outcome(self) -> Outcome:
        for pod in self.pods:
            self._count_work(pod)
        return Outcome(
            policy=self.policy.name,
            requests=[each for each in self.requests if each.is_measured],
            gaps=self._gaps,
            sizes=self._sizes,
            decisions=self._decisions,
            warmup_s=self.warmup_s,
            duration_s=self.duration_s,
            gpu_s=self.config.gpus * sum(map(self._held_s, [*self._gone, *self.pods])),
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
        )

    def _held_s(self, pod: Pod) -> float:
        """Of the time that is measured, from its creation to its end."""
        ended_s = self.duration_s if pod.ended_s is None else min(pod.ended_s, self.duration_s)
        return max(0.0, ended_s - max(self.warmup_s, pod.created_s))

    def _begin_measuring(self, _now: float) -> None:
        """The preemptions of the warm-up do not count."""
        self._num_preemptions = -sum(_preemptions(pod.replica) for pod in self.pods if pod.replica is not None)

    def _count_work(self, pod: Pod) -> None:
        if pod.replica is not None:
            self._num_steps += pod.replica.num_steps
            self._num_preemptions += _preemptions(pod.replica)


def _preemptions(replica: Replica) -> int:
    return sum(replica.scheduler.num_preemptions.values())


def scrape(replica: Replica, now: float) -> Scrape:
    """What its `/metrics` shows."""
    scheduler, pool = replica.scheduler, replica.pool
    batch = scheduler.lanes[BATCH]
    return Scrape(
        time_s=now,
        running=float(len(scheduler.running)),
        waiting=float(sum(scheduler.num_waiting.values())),
        kv_usage=pool.num_held / pool.num_usable,
        admissible=float(scheduler.num_admissible),
        finished=float(replica.num_finished),
        answered=float(replica.num_answered),
        rejected=float(replica.num_rejected),
        ttft_buckets=_cumulative(TTFT_BOUNDS_S, replica.ttft_counts),
        prompt_buckets=_cumulative(PROMPT_BOUNDS, replica.prompt_counts),
        arrived=sum(replica.arrived.values(), start=Demand()),
        batch_arrived=replica.arrived[BATCH],
        cache_hits=float(scheduler.prefix_hits),
        cache_queries=float(scheduler.prefix_queries),
        kv_blocks=pool.num_usable,
        model_code="own",
        batch_waiting=float(batch.num_waiting),
        batch_running=float(batch.num_running),
        served=Demand(replica.num_begun, replica.num_prompt_tokens, replica.num_tokens),
    )


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> tuple[tuple[float, float], ...]:
    return tuple(zip(bounds, itertools.accumulate(map(float, counts)), strict=True))
