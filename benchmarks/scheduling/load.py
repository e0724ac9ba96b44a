"""Open-loop load on an engine in this process, without HTTP: latencies, throughput and memory use."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmservice_bench.batch_scheduler import padding_tokens
from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report
from llmservice_bench.trace import Lengths, arrival_times
from llmservice_server.engine.engine import Engine
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams

HOPELESS = 0.1
"""A run is stopped when this share of the requests is late; a short stall of the machine delays fewer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_token_ids: list[int]
    output_tokens: int
    is_measured: bool = True
    """False: the request is part of the load, but not of the figures."""


@dataclass(frozen=True, slots=True)
class Step:
    took_s: float
    num_outputs: int
    """Sequences that generated a token."""
    num_waiting: int
    """Requests in the waiting queue."""


@dataclass(slots=True)
class Waste:
    """Sums over the steps of a run."""

    tokens: int = 0  # computed, padding included
    padding: int = 0
    block_tokens: int = 0  # capacity of the held blocks, in tokens
    cached_tokens: int = 0  # used slots of them

    def observe(self, engine: Engine, block_size: int) -> None:
        plan = engine.last_plan
        self.tokens += plan.num_tokens
        self.padding += padding_tokens(plan)
        self.block_tokens += engine.pool.num_held * block_size
        self.cached_tokens += sum(request.num_computed_tokens for request in engine.scheduler.running)

    @property
    def of_padding(self) -> float:
        """Share of padding among the computed tokens."""
        return self.padding / max(1, self.tokens)

    @property
    def of_kv_cache(self) -> float:
        """Share of unused slots in the held blocks."""
        return 1 - self.cached_tokens / max(1, self.block_tokens)


@dataclass(slots=True)
class Run:
    """Runs one engine with arrivals, in real time while it has work, until it is idle again."""

    engine: Engine
    arrivals: Sequence[Arrival]
    ttft_bound_s: float = math.inf
    """The run is stopped when more than a tenth of the requests have waited longer for their first token."""
    records: dict[str, RequestRecord] = field(default_factory=dict)
    waste: Waste = field(default_factory=Waste)
    steps: list[Step] = field(default_factory=list)
    _coming: deque[tuple[int, Arrival]] = field(init=False)
    _waiting: dict[str, float] = field(
        default_factory=dict
    )  # arrival times of requests without a first token, oldest first
    _num_late: int = 0  # of requests with a first token
    _started_s: float = 0.0
    _last_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._coming = deque(enumerate(self.arrivals))

    def complete(self) -> Report:
        """The report; raises ValueError if the run was stopped."""
        report = self.run()
        if report is None:
            raise ValueError(f"p99 TTFT went beyond {self.ttft_bound_s} s, expected a run without a bound")
        return report

    def run(self) -> Report | None:
        """The report, or None if the run was stopped."""
        self.begin()
        while not self.is_over:
            self.advance()
            if self._is_hopeless():
                self.engine.abort(list(self.records))
                self.engine.step()
                return None
        return self.report()

    def begin(self) -> None:
        """Start the clock of the run."""
        self._started_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return not self._coming and not self.engine.has_work

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def advance(self) -> None:
        """Add the requests that have arrived, then make a step of the engine.

        If the engine is idle, the clock is advanced to the next arrival.
        """
        if self._coming and not self.engine.has_work:
            self.stand_still(min(0.0, self.elapsed_s - self._coming[0][1].at_s))
        while self._coming and self._coming[0][1].at_s <= self.elapsed_s:
            self._send(*self._coming.popleft())
        wait_s = self.engine.wait_s()
        if self._coming:
            wait_s = min(wait_s, self._coming[0][1].at_s - self.elapsed_s)
        if wait_s > 0:
            time.sleep(wait_s)
        else:
            self._step()

    def stand_still(self, for_s: float) -> None:
        """Set the clock back by `seconds`, so that they count neither for the run nor for a request."""
        self._started_s += for_s

    def report(self) -> Report:
        """The report of a completed run."""
        pairs = zip(self.records.values(), self.arrivals, strict=True)
        return Report.of(record for record, arrival in pairs if arrival.is_measured)

    def _step(self) -> None:
        began_s = self.elapsed_s
        step = self.engine.step()
        now_s = self.elapsed_s
        self.steps.append(Step(now_s - began_s, len(step.outputs), sum(step.stats.num_waiting.values())))
        self.waste.observe(self.engine, self.engine.ready.block_size)
        for output in step.outputs:
            self._receive(output, now_s)

    def _is_hopeless(self) -> bool:
        late_since_s = self.elapsed_s - self.ttft_bound_s
        overdue = itertools.takewhile(lambda at_s: at_s < late_since_s, self._waiting.values())
        return self._num_late + sum(1 for _ in overdue) > HOPELESS * len(self.arrivals)

    def _send(self, number: int, arrival: Arrival) -> None:
        request_id = str(number)
        sampling = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=arrival.prompt_token_ids,
                sampling=sampling,
                arrival_s=time.monotonic() + arrival.at_s - self.elapsed_s,
            )
        )
        self.records[request_id] = RequestRecord(arrival.at_s, len(arrival.prompt_token_ids))
        self._last_s[request_id] = self._waiting[request_id] = arrival.at_s

    def _receive(self, output: Output, now_s: float) -> None:
        record = self.records[output.request_id]
        record.error = output.error
        gap_s, self._last_s[output.request_id] = now_s - self._last_s[output.request_id], now_s
        if record.output_tokens == 0:
            record.ttft_s = gap_s
            self._num_late += gap_s > self.ttft_bound_s
            self._waiting.pop(output.request_id, None)
        else:
            record.itl_s.append(gap_s)
        record.output_tokens += len(output.token_ids)
        record.e2e_s += gap_s


def complete_by_turns(runs: Sequence[Run], turn_s: float = 0.0) -> list[float]:
    """Complete several runs alternately, next the one with the least time so far; returns the seconds of each.

    Temporary slowness of the machine thus affects all of them. The clock of a run stops during the turns of the others.
    A turn is one step, or all steps that start within `turn_s` and find their weights in the CPU cache.
    """
    spent_s = [0.0] * len(runs)
    for run in runs:
        run.begin()
    while going := [number for number, run in enumerate(runs) if not run.is_over]:
        turn = min(going, key=spent_s.__getitem__)
        began_s = time.monotonic()
        runs[turn].advance()
        while time.monotonic() - began_s < turn_s and not runs[turn].is_over:
            runs[turn].advance()
        took_s = time.monotonic() - began_s
        spent_s[turn] += took_s
        for other in going:
            if other != turn:
                runs[other].stand_still(took_s)
    return spent_s


def arrivals_of(lengths: Sequence[Lengths], rate: float, vocab_size: int, seed: int = 0) -> list[Arrival]:
    """The same requests at every rate; at an infinite rate all arrive at once."""
    rng, times = np.random.default_rng(seed), arrival_times(rate, 1.0, np.random.default_rng(seed + 1))
    return [
        Arrival(at_s, rng.integers(0, vocab_size, each.prompt_tokens).tolist(), each.output_tokens)
        for each, at_s in zip(lengths, times, strict=False)
    ]


def with_long_prompts(arrivals: Sequence[Arrival], long: Lengths, every_s: float, vocab_size: int) -> list[Arrival]:
    """The arrivals with an additional long prompt at regular times, which does not count in the figures."""
    rng = np.random.default_rng(len(arrivals))
    times = np.arange(every_s / 2, arrivals[-1].at_s, every_s).tolist()
    extra = [
        Arrival(at_s, rng.integers(0, vocab_size, long.prompt_tokens).tolist(), long.output_tokens, is_measured=False)
        for at_s in times
    ]
    return sorted([*arrivals, *extra], key=lambda arrival: arrival.at_s)
