"""One replica: the real scheduler and block pool, with steps that take the time of the latency model.

While a step runs, nothing is planned; what arrives meanwhile is in the queue when the next one is planned. Steps that
only decode, and are followed by equal ones, are advanced in one go: until a request ends, the blocks run out, a
deadline passes or a batch request ages, and as long as nothing arrives.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmservice_bench.simulation.latencies import GapHistogram
from llmservice_bench.simulation.requests import SimulatedRequest, block_hashes
from llmservice_operator.scaling.demand import Demand
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.traffic.output_lengths import DEFAULT_SHARE, OutputLengths
from llmservice_server.engine.admission_queue import AdmissionQueue, QueueBound, Refusal
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import LANES
from llmservice_server.engine.interfaces import Plan, Scheduled
from llmservice_server.engine.request import Request
from llmservice_server.engine.scheduler import ASK_AGAIN_STEPS, BATCH, INTERACTIVE, ContinuousScheduler, SchedulerConfig
from llmservice_server.engine.step_timer import step_batch
from llmservice_server.types.messages import GenerateRequest, SamplingParams

TTFT_BOUNDS_S: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4)
TTFT_BOUNDS_S += (0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
TTFT_BOUNDS_S += (480.0, 960.0, math.inf)
PROMPT_BOUNDS = (*(float(2**power) for power in range(18)), math.inf)
"""Of the server's histograms."""
MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS = 512, 2**20
REQUEST_TIMEOUT_S = 600.0
"""Defaults of `llmservice serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What every replica of a service is started with."""

    latency: LatencyModel
    scheduler: SchedulerConfig
    groups: BlockGroups
    num_blocks: int
    """The null block included."""
    max_model_len: int
    itl_target_s: float = math.inf
    queue: QueueBound = field(default_factory=lambda: QueueBound(MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS))
    request_timeout_s: float = REQUEST_TIMEOUT_S
    jumps: bool = True
    """Whether equal steps are advanced in one go."""

    @property
    def max_request_tokens(self) -> int:
        return self.groups.longest(self.num_blocks - 1, self.max_model_len)


@dataclass(slots=True)
class Run:
    """Steps that decode the same sequences, or one step of any kind."""

    plan: Plan
    start_s: float
    batch: StepBatch
    steps: int = 1


class Replica:
    """The caller passes time in order, and calls `begin` once it has done all that happens at a time.

    `first_tokens` and `ended` are what happened since the caller last took them.
    """

    def __init__(self, config: ReplicaConfig, now: float, gaps: GapHistogram | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.groups)
        self.scheduler = ContinuousScheduler(self.pool, config.scheduler)
        self.gaps = GapHistogram() if gaps is None else gaps
        self.first_tokens: list[SimulatedRequest] = []
        self.ended: list[SimulatedRequest] = []
        self.num_finished = self.num_answered = 0
        self.num_rejected = 0
        self.num_steps = self.num_plans = 0
        self.ttft_counts = [0] * len(TTFT_BOUNDS_S)
        self.prompt_counts = [0] * len(PROMPT_BOUNDS)
        self.arrived = {lane: Demand() for lane in LANES}
        self.num_begun = self.num_prompt_tokens = self.num_tokens = 0
        """Requests with a first token, the tokens of their prompts, and those generated."""
        self._lengths = OutputLengths(config.scheduler.expected_tokens * DEFAULT_SHARE)
        self._queue = AdmissionQueue(dict.fromkeys(LANES, config.queue), now)
        self._requests: dict[SimulatedRequest, Request] = {}
        self._simulated: dict[Request, SimulatedRequest] = {}
        self._deadlines: list[tuple[float, int, SimulatedRequest]] = []
        self._run: Run | None = None
        self._max_request_tokens = config.max_request_tokens
        self._arrived = 0
        self._lets_wait = False  # as the HTTP process knows it: after the last step was planned

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    @property
    def in_flight(self) -> Sequence[SimulatedRequest]:
        return list(self._requests)

    @property
    def next_event_s(self) -> float:
        """When a request ends or another step is to be planned, unless a request arrives; infinite without work."""
        if self._run is not None:
            return self._ends_s(self._run, self._run.steps)
        return self._deadlines[0][0] if self._deadlines and self._requests else math.inf

    def offer(self, request: SimulatedRequest, now: float) -> Refusal | None:
        """Queue a request, or return why it is refused. `now` is not before the last `advance`.

        The rules are those of the HTTP process, of which an idle engine's queue needs no bound.
        """
        self.advance(now)
        predicted_tokens = min(self._max_tokens(request), self._lengths.predict(request.prompt_tokens))
        if not request.is_counted:
            request.is_counted = True
            self.arrived[request.trace.lane] += Demand(1, request.prompt_tokens, predicted_tokens)
        refusal = self._why_refused(request, predicted_tokens, now)
        if refusal is not None:
            self.num_rejected += 1
            return refusal
        self._enter(request, predicted_tokens, now)
        self._cut()
        return None

    def _max_tokens(self, request: SimulatedRequest) -> int:
        """Of its answer, by the client's limit or the context's."""
        longest = max(1, self._max_request_tokens - request.prompt_tokens)
        return longest if request.trace.max_tokens is None else min(longest, request.trace.max_tokens)

    def _learn(self, request: SimulatedRequest) -> None:
        """How long answers are, as the HTTP process learns it: one at its limit was cut off, and would be longer."""
        prompt_tokens, tokens = request.prompt_tokens, float(request.num_tokens)
        if request.num_tokens >= self._max_tokens(request):
            tokens = max(tokens, self._lengths.predict(prompt_tokens))
        self._lengths.observe(prompt_tokens, tokens)

    def withdraw(self, request: SimulatedRequest, now: float) -> None:
        """The client left, or the gateway moves the request to another replica."""
        self.advance(now)
        self._leave(request, now)
        self._cut()

    def advance(self, to_s: float) -> None:
        """Do all steps that end by `to_s`, and plan those that begin before it."""
        while (run := self._run) is not None:
            done = self._steps_by(run, to_s)
            if done == 0:
                return
            now = self._complete(run, done)
            if now >= to_s:
                return
            self.begin(now)

    def begin(self, now: float) -> None:
        """Plan the next step, where none runs and there is work."""
        if self._run is not None:
            return
        self._expire(now)
        scheduler = self.scheduler
        while scheduler.wait_s(now) == 0:
            plan = scheduler.schedule(now)
            self.num_plans += 1
            self._lets_wait = any(scheduler.num_waiting.values())
            if plan.scheduled:
                self._note_begun(plan, now)
                self._run = Run(plan, now, step_batch(plan))
                if self.config.jumps and _only_decodes(plan, scheduler.running):
                    self._run.steps = self._equal_steps(self._run)
                return
            if not plan.preempted:  # nothing fits until a deadline
                return

    def _note_begun(self, plan: Plan, now: float) -> None:
        if plan.num_decodes == len(plan.scheduled):
            return
        for share in plan.scheduled:
            request = self._simulated[share.request]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now

    def _why_refused(self, request: SimulatedRequest, predicted_tokens: float, now: float) -> Refusal | None:
        if request.prompt_tokens >= self._max_request_tokens:
            return Refusal(
                f"{request.prompt_tokens} prompt tokens, and a request may have {self._max_request_tokens} with its "
                "answer",
                0,
            )
        return self._queue.why_refused(
            request.trace.lane,
            [request.prompt_tokens],
            predicted_tokens=predicted_tokens,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            engine_lets_wait=self._lets_wait,
            now=now,
        )

    def _enter(self, request: SimulatedRequest, predicted_tokens: float, now: float) -> None:
        trace, prompt_tokens = request.trace, request.prompt_tokens
        deadline_s = request.arrival_s + self.config.request_timeout_s
        message = GenerateRequest(
            request_id=str(request.number),
            prompt_token_ids=[request.number] * prompt_tokens,
            sampling=SamplingParams(max_tokens=self._max_tokens(request)),
            arrival_s=now,
            lane=trace.lane,
            deadline_s=deadline_s,
            predicted_tokens=predicted_tokens,
            block_hashes=block_hashes(trace, request.number, self.config.groups.block_size),
        )
        engine_request = Request.of(message, self._arrived, 0, frozenset())
        self._arrived += 1
        self._requests[request], self._simulated[engine_request] = engine_request, request
        self._queue.enter(message.request_id, trace.lane, prompt_tokens, predicted_tokens=predicted_tokens)
        heapq.heappush(self._deadlines, (deadline_s, request.number, request))
        self.scheduler.add(engine_request)

    def _leave(self, request: SimulatedRequest, now: float) -> None:
        engine_request = self._requests.pop(request)
        del self._simulated[engine_request]
        self.scheduler.finish(engine_request)
        self._queue.leave([engine_request.request_id], now)
        self.num_finished += 1

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if request in self._requests:
                waited = f"after {request.num_tokens} tokens" if request.num_tokens else "while it waited"
                self._end(request, now)
                request.end("timed_out", now, f"its deadline passed {waited}")

    def _end(self, request: SimulatedRequest, now: float) -> None:
        self._leave(request, now)
        self.ended.append(request)

    def _cut(self) -> None:
        """The queue has changed, so that the steps after the one that runs may be others."""
        if self._run is not None:
            self._run.steps = 1

    def _ends_s(self, run: Run, steps: int) -> float:
        if steps == 1:
            return run.start_s + self.config.latency.seconds(run.batch)
        batch = run.batch
        return run.start_s + self.config.latency.decode_run_s(int(batch.num_seqs), int(batch.context_tokens), steps)

    def _steps_by(self, run: Run, time_s: float) -> int:
        """How many steps of the run have ended by then."""
        if self._ends_s(run, 1) > time_s:
            return 0
        if run.steps == 1 or self._ends_s(run, run.steps) <= time_s:
            return run.steps
        return 1 + bisect_right(range(2, run.steps), time_s, key=lambda steps: self._ends_s(run, steps))

    def _equal_steps(self, run: Run) -> int:
        """How many steps, this one included, are the same but for their place in the sequences."""
        scheduler = self.scheduler
        interactive, batch = scheduler.lanes[INTERACTIVE], scheduler.lanes[BATCH]
        if interactive.num_waiting and batch.num_running > batch.own_seqs:
            return 1  # batch requests are preempted as soon as there is room for what waits
        requests = [share.request for share in run.plan.scheduled]
        steps = min(self._simulated[each].output_tokens - each.num_output_tokens for each in requests)
        steps = self._fitting(requests, steps)
        if self._lets_wait:
            steps = min(steps, ASK_AGAIN_STEPS - scheduler.num_steps % ASK_AGAIN_STEPS)
            if self.config.groups.slides:  # blocks come free where a new one begins
                block_size = self.config.groups.block_size
                rooms = (len(each.block_table) * block_size - each.num_computed_tokens for each in requests)
                steps = min(steps, 1 + min(rooms))
        until_s = self._deadlines[0][0]
        if batch.head is not None:
            ages_s = batch.head.arrival_s + scheduler.config.ageing_s
            until_s = min(until_s, ages_s if ages_s > run.start_s else math.inf)
        if steps > 1 and self._ends_s(run, steps - 1) >= until_s:  # a step that begins later is planned anew
            steps = 1 + bisect_left(range(1, steps), until_s, key=lambda before: self._ends_s(run, before))
        return steps

    def _fitting(self, requests: Sequence[Request], steps: int) -> int:
        """Of `steps` those that the pool surely has blocks for."""
        block_size, num_groups = self.config.groups.block_size, len(self.config.groups)
        room = self.pool.num_available // num_groups
        if len(requests) * (steps // block_size + 1) <= room:
            return steps
        lengths = [(each.num_computed_tokens - 1, len(each.block_table)) for each in requests]

        def missing(count: int) -> int:
            return sum(max(0, -(-(start + count) // block_size) - length) for start, length in lengths)

        return bisect_right(range(2, steps + 1), room, key=missing) + 1

    def _complete(self, run: Run, steps: int) -> float:
        """The first `steps` of the run have ended; returns when the last of them has."""
        self._run = None
        self.num_steps += steps
        now = self._ends_s(run, 1)
        ends = steps == 1 and self._take(run.plan, now)
        if steps > 1:
            self._take(run.plan, now)
            now = self._decode_on(run, steps, now)
            self.scheduler.num_steps += steps - 1
            ends = True
        if ends:
            for share in run.plan.scheduled:
                request = self._simulated.get(share.request)
                if request is not None and share.request.num_output_tokens == request.output_tokens:
                    self._end(request, now)
                    self.num_answered += 1
                    self.prompt_counts[bisect_left(PROMPT_BOUNDS, request.prompt_tokens)] += 1
                    self._learn(request)
                    request.end("finished", now)
        return now

    def _take(self, plan: Plan, now: float) -> bool:
        """A step has ended: the tokens that it sampled. Returns whether some may be a request's last."""
        self.scheduler.commit(plan)
        target_s, add_gap = self.config.itl_target_s, self.gaps.add
        ends = False
        for share in plan.scheduled:
            if not share.samples:
                continue
            self.num_tokens += 1
            engine_request = share.request
            request = self._simulated.get(engine_request)
            if request is None:  # it was withdrawn while the step ran
                continue
            engine_request.token_ids.append(request.number)
            count = len(engine_request.token_ids) - engine_request.num_prompt_tokens
            if count == 1 and request.first_token_s is None:
                self._begin_answer(request, engine_request, now)
            else:
                gap_s = now - request.last_token_s
                if request.is_measured:
                    add_gap(gap_s)
                request.late_gaps += gap_s > target_s
            request.num_tokens = count
            request.last_token_s = now
            ends = ends or count >= request.output_tokens
        return ends

    def _begin_answer(self, request: SimulatedRequest, engine_request: Request, now: float) -> None:
        request.first_token_s = now
        self.first_tokens.append(request)
        self.num_begun += 1
        self.num_prompt_tokens += engine_request.num_prompt_tokens
        self._queue.start(engine_request.request_id, now)
        self.ttft_counts[bisect_left(TTFT_BOUNDS_S, now - engine_request.arrival_s)] += 1

    def _decode_on(self, run: Run, steps: int, now: float) -> float:
        """Steps 2 to `steps` of a run, as if one by one: the same blocks in the same order. Returns their end."""
        requests = [share.request for share in run.plan.scheduled]
        more = steps - 1
        self.num_tokens += more * len(requests)
        for engine_request in requests:
            engine_request.token_ids.extend([engine_request.token_ids[-1]] * more)
        self._extend_blocks(requests, more)
        ends_s = [self._ends_s(run, count) for count in (2, steps - 1, steps)]
        first_gap_s, last_gap_s = ends_s[0] - now, ends_s[2] - (ends_s[1] if more > 1 else now)
        measured = sum(self._simulated[each].is_measured for each in requests)
        if measured:
            self.gaps.add_ramp(first_gap_s, last_gap_s, more, measured)
        late = self._late(run, first_gap_s, last_gap_s, more)
        for engine_request in requests:
            request = self._simulated[engine_request]
            request.num_tokens += more
            request.late_gaps += late
            request.last_token_s = ends_s[2]
        return ends_s[2]

    def _late(self, run: Run, first_gap_s: float, last_gap_s: float, more: int) -> int:
        """How many of the later steps take longer than the target; each takes at least as long as the one before."""
        target_s = self.config.itl_target_s
        if last_gap_s <= target_s:
            return 0
        if first_gap_s > target_s:
            return more
        return more - bisect_right(
            range(2, more + 2), target_s, key=lambda step: self._ends_s(run, step) - self._ends_s(run, step - 1)
        )

    def _extend_blocks(self, requests: Sequence[Request], steps: int) -> None:
        """Step by step, but only where a block begins or ends: first all that begin, then all that are full."""
        block_size = self.config.groups.block_size
        starts = [request.num_computed_tokens for request in requests]
        events = []
        for position, start in enumerate(starts):
            events += [(step, 0, position) for step in range(-start % block_size, steps, block_size)]
            events += [(step, 1, position) for step in range((-start - 1) % block_size, steps, block_size)]
        events.sort()
        blocks, commit = self.scheduler.blocks, self.scheduler.commit
        for step, is_full, position in events:
            request, start = requests[position], starts[position] + step
            if is_full:
                request.num_computed_tokens = start + 1
                commit(Plan(scheduled=[Scheduled(request, start, 1, True)]))
            elif start == len(request.block_table) * block_size:
                request.num_computed_tokens = start
                blocks.slide(request)
                if not blocks.extend(request, start + 1):
                    raise RuntimeError("a run of steps was planned that the pool has no blocks for")
        for request, start in zip(requests, starts, strict=True):
            request.num_computed_tokens = start + steps


def _only_decodes(plan: Plan, running: Sequence[Request]) -> bool:
    """Whether each running request computes its one token."""
    moves = plan.preempted or plan.swap_in or plan.swap_out
    return plan.num_decodes == len(plan.scheduled) == len(running) and not moves
