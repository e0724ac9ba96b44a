import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_bench.simulation.replica import TTFT_BOUNDS_S, Replica, ReplicaConfig
from llmservice_bench.simulation.requests import SimulatedRequest
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.admission_queue import QueueBound
from llmservice_server.engine.scheduler import SchedulerConfig
from llmservice_server.ipc.metrics import _WAIT_BUCKETS

LATENCY = LatencyModel(
    step_s=0.0011, sequence_s=0.00013, weights_s=0.0107, token_s=0.00071, kv_token_s=0.0000313, pair_s=0.0000017
)


def config_of(
    num_blocks: int = 64, window: int | None = None, max_num_seqs: int = 8, ageing_s: float = 0.4, block_size: int = 4
) -> ReplicaConfig:
    windows = (None,) if window is None else (None, window)
    return ReplicaConfig(
        latency=LATENCY,
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=32,
            prefill_chunk_tokens=16,
            expected_tokens=40,
            ageing_s=ageing_s,
        ),
        groups=BlockGroups(block_size, 1, windows, 32),
        num_blocks=num_blocks,
        max_model_len=400,
        itl_target_s=0.0145,
        queue=QueueBound(6, 400),
        request_timeout_s=2.5,
    )


def sent(number: int, arrival_s: float, trace: TraceRequest) -> SimulatedRequest:
    return SimulatedRequest(number, trace, arrival_s, trace.output_tokens)


class Driver:
    """One replica and its requests; times are those of arrivals, of the replica and of probes."""

    def __init__(self, config: ReplicaConfig, requests: list[SimulatedRequest], probes: list[float]) -> None:
        self.replica = Replica(config, 0.0)
        self.requests = requests
        self.states: list[object] = []
        arrivals = sorted(requests, key=lambda request: request.arrival_s)
        times = sorted(probes)
        while True:
            arrival_s = arrivals[0].arrival_s if arrivals else math.inf
            now = min(arrival_s, times[0] if times else math.inf, self.replica.next_event_s)
            if now == math.inf:
                return
            self.replica.advance(now)
            if now == arrival_s:
                request = arrivals.pop(0)
                refusal = self.replica.offer(request, now)
                if refusal is not None:
                    request.end("refused", now, refusal.message)
            self.replica.begin(now)
            if times and now == times[0]:
                times.pop(0)
                self.states.append(self.state())

    def state(self) -> object:
        scheduler, pool = self.replica.scheduler, self.replica.pool
        requests = [*scheduler.running, *scheduler.waiting]
        return (
            [
                (each.request_id, each.token_ids, each.num_computed_tokens, [list(one) for one in each.block_tables])
                for each in requests
            ],
            len(scheduler.running),
            pool.free_blocks(),
            pool.cached_blocks(),
            [[pool.num_holders[block] for block in range(1, pool.num_blocks)]],
            pool._by_hash,
            dict(scheduler.num_preemptions),
            scheduler.prefix_hits,
        )

    @property
    def decisions(self) -> object:
        return [
            (each.number, each.outcome, each.reason, each.num_tokens, each.late_gaps, each.first_token_s is None)
            for each in self.requests
        ]

    @property
    def times(self) -> list[float]:
        return [
            time
            for each in self.requests
            for time in (each.first_token_s or 0.0, each.ended_s, each.last_token_s)
            if not math.isnan(time)
        ]


traces = st.lists(
    st.tuples(
        st.integers(0, 1500),  # arrival, in steps of 2.39 ms, so that it is at no step's end
        st.integers(1, 90),
        st.integers(1, 70),
        st.sampled_from(["interactive", "interactive", "batch"]),
        st.sampled_from([(), (), (7,), (8,)]),
    ),
    min_size=1,
    max_size=14,
)


def requests_of(drawn: list[tuple[int, int, int, str, tuple[int, ...]]]) -> list[SimulatedRequest]:
    return [
        sent(number, step * 0.00239 + 0.000017, TraceRequest(0.0, prompt, output, hash_ids, lane))
        for number, (step, prompt, output, lane, hash_ids) in enumerate(sorted(drawn))
    ]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    drawn=traces,
    num_blocks=st.sampled_from([40, 60, 130]),
    window=st.sampled_from([None, 12]),
    max_num_seqs=st.sampled_from([2, 8, 20]),
    probes=st.lists(st.integers(1, 4000), max_size=6),
)
def test_a_jump_leaves_what_single_steps_leave(
    drawn: list[tuple[int, int, int, str, tuple[int, ...]]],
    num_blocks: int,
    window: int | None,
    max_num_seqs: int,
    probes: list[int],
) -> None:
    config = config_of(num_blocks, window, max_num_seqs)
    times = [probe * 0.00131 + 0.0000053 for probe in set(probes)]
    jumped = Driver(config, requests_of(drawn), times)
    stepped = Driver(replace(config, jumps=False), requests_of(drawn), times)
    assert jumped.decisions == stepped.decisions
    assert jumped.states == stepped.states
    assert jumped.state() == stepped.state()
    assert jumped.replica.num_steps == stepped.replica.num_steps
    assert jumped.times == pytest.approx(stepped.times, rel=1e-9)
    assert jumped.replica.gaps.total == stepped.replica.gaps.total
    assert jumped.replica.ttft_counts == stepped.replica.ttft_counts


@settings(max_examples=100, deadline=None)
@given(drawn=traces, num_blocks=st.sampled_from([40, 130]))
def test_every_request_ends_once_and_its_tokens_are_counted(
    drawn: list[tuple[int, int, int, str, tuple[int, ...]]], num_blocks: int
) -> None:
    driver = Driver(config_of(num_blocks), requests_of(drawn), [])
    replica = driver.replica
    assert len(replica) == 0
    assert replica.pool.num_held == 0
    for request in driver.requests:
        assert request.outcome is not None
        assert (request.num_tokens == request.output_tokens) == (request.outcome == "finished")
    ended = [each for each in driver.requests if each.outcome != "refused"]
    assert replica.num_finished == len(ended)
    assert replica.num_answered == sum(replica.prompt_counts) == sum(each.outcome == "finished" for each in ended)
    assert replica.num_rejected == len(driver.requests) - len(ended)
    assert replica.gaps.total == sum(max(0, each.num_tokens - 1) for each in ended)


def test_a_jump_saves_steps_of_the_scheduler_and_not_steps_of_the_engine() -> None:
    plans = []
    for jumps in (True, False):
        driver = Driver(replace(config_of(), jumps=jumps), [sent(0, 0.0, TraceRequest(0.0, 8, 60))], probes=[])
        plans.append(driver.replica.num_plans)
        assert driver.replica.num_steps == 60
    assert plans == [2, 60]


def test_an_arrival_waits_for_the_step_that_runs_and_joins_the_next() -> None:
    replica = Replica(config_of(), 0.0)
    first, second = sent(0, 0.0, TraceRequest(0.0, 8, 40)), sent(1, 0.2, TraceRequest(0.2, 8, 40))
    assert replica.offer(first, 0.0) is None
    replica.begin(0.0)
    replica.advance(0.2)
    assert replica.offer(second, 0.2) is None
    ends_s = replica.next_event_s
    assert 0.2 < ends_s < 0.2 + 0.02
    replica.advance(ends_s)
    replica.begin(ends_s)
    assert len(replica.scheduler.running) == 2


def test_a_withdrawn_request_has_ended_without_an_answer() -> None:
    replica = Replica(config_of(), 0.0)
    request = sent(0, 0.0, TraceRequest(0.0, 8, 40))
    assert replica.offer(request, 0.0) is None

    replica.withdraw(request, 0.0)

    assert (replica.num_finished, replica.num_answered) == (1, 0)


def test_the_histogram_of_first_tokens_is_the_servers() -> None:
    assert (*_WAIT_BUCKETS, math.inf) == TTFT_BOUNDS_S


def test_prompts_with_equal_hash_ids_share_their_blocks() -> None:
    replica = Replica(config_of(num_blocks=200), 0.0)
    for number, hash_ids in enumerate([(5,), (5,), (6,)]):
        now = float(number)
        assert replica.offer(sent(number, now, TraceRequest(now, 33, 2, hash_ids)), now) is None
        replica.begin(now)
        while replica.next_event_s < math.inf:
            ends_s = replica.next_event_s
            replica.advance(ends_s)
            replica.begin(ends_s)
    assert replica.scheduler.prefix_hits == 32


def test_a_clients_limit_bounds_what_is_predicted_and_an_answer_at_it_counts_as_cut_off() -> None:
    def predicted(max_tokens: int | None, last_max_tokens: int) -> float:
        """Of a request after nineteen with answers of three tokens."""
        trace = TraceRequest(0.0, 20, 3, max_tokens=max_tokens)
        replica = Driver(config_of(), [sent(number, 2.0 * number, trace) for number in range(19)], []).replica
        before = replica.arrived["interactive"].output_tokens
        assert replica.offer(sent(19, 50.0, replace(trace, max_tokens=last_max_tokens)), 50.0) is None
        return replica.arrived["interactive"].output_tokens - before

    assert predicted(None, 200) == pytest.approx(3.0)  # as those before were
    assert predicted(3, 200) == pytest.approx(40 / 8)  # what is assumed, which no answer has contradicted
    assert predicted(3, 4) == pytest.approx(4.0)
