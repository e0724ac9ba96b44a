"""Open-loop load on an engine in this process, without HTTP: what its users see, and what its memory holds."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmservice_bench.arrivals import arrival_times
from llmservice_bench.lengths import Lengths
from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from llmservice_server.messages import Generate, Output, SamplingParams

HOPELESS = 0.1
"""Share of the requests that are late when a run is given up: a stalled machine delays fewer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_token_ids: list[int]
    output_tokens: int
    is_measured: bool = True
    """False: it is part of the load, and of no figure."""


@dataclass(frozen=True, slots=True)
class Step:
    took_s: float
    num_outputs: int
    """Sequences that got a token."""
    num_waiting: int
    """Requests that had no place in it."""


@dataclass(slots=True)
class Waste:
    """Sums over the steps of a run."""

    tokens: int = 0
    padding: int = 0
    block_tokens: int = 0  # what the held blocks have room for
    cached_tokens: int = 0  # and what of it holds keys and values

    def observe(self, engine: Engine, block_size: int) -> None:
        plan = engine.last_plan
        self.tokens += plan.num_tokens
        self.padding += plan.num_padding
        self.block_tokens += engine.pool.num_held * block_size
        self.cached_tokens += sum(request.num_computed_tokens for request in engine.scheduler.running)

    @property
    def of_padding(self) -> float:
        """Share of the computed tokens that meant nothing."""
        return self.padding / max(1, self.tokens + self.padding)

    @property
    def of_kv_cache(self) -> float:
        """Share of the held memory that held nothing of use."""
        return 1 - self.cached_tokens / max(1, self.block_tokens)


@dataclass(slots=True)
class Run:
    """Drives one engine through arrivals, in real time while it has work; it has none again afterwards."""

    engine: Engine
    arrivals: Sequence[Arrival]
    ttft_bound_s: float = math.inf
    """The run is given up once more than a tenth of the requests have waited longer for their first token."""
    records: dict[str, RequestRecord] = field(default_factory=dict)
    waste: Waste = field(default_factory=Waste)
    steps: list[Step] = field(default_factory=list)
    _coming: deque[tuple[int, Arrival]] = field(init=False)
    _waiting: dict[str, float] = field(default_factory=dict)  # for their first token, since when; oldest first
    _num_late: int = 0  # of those who have it
    _started_s: float = 0.0
    _last_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._coming = deque(enumerate(self.arrivals))

    def complete(self) -> Report:
        """Raises ValueError where the run was given up."""
        report = self.run()
        if report is None:
            raise ValueError(f"p99 TTFT went beyond {self.ttft_bound_s} s, expected a run without a bound")
        return report

    def run(self) -> Report | None:
        """None where it was given up."""
        self.begin()
        while not self.is_over:
            self.advance()
            if self._is_hopeless():
                self.engine.abort(list(self.records))
                self.engine.step()
                return None
        return self.report()

    def begin(self) -> None:
        """From now on its time counts."""
        self._started_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return not self._coming and not self.engine.has_work

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def advance(self) -> None:
        """Send what has come by now; then a step of the engine, or a rest until there is something to do.

        Nobody waits while the engine has nothing at all to do: its clock is put forward to the next arrival.
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
        """Put the clock back by so many seconds: they count neither as the run's nor as any request's."""
        self._started_s += for_s

    def report(self) -> Report:
        """Of a run that is over."""
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
            Generate(
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
    """Complete several runs, always with a turn of the one that has had the least time; the seconds of each.

    What slows the machine down for a while so slows all of them down. Each one's clock stands still while another
    steps. A turn is one step, or as many as begin within `turn_s`: those find their weights in the cache again.
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
    """The same requests at every rate; an infinite one brings all at once."""
    rng, times = np.random.default_rng(seed), arrival_times(rate, 1.0, np.random.default_rng(seed + 1))
    return [
        Arrival(at_s, rng.integers(0, vocab_size, each.prompt_tokens).tolist(), each.output_tokens)
        for each, at_s in zip(lengths, times, strict=False)
    ]


def with_long_prompts(arrivals: Sequence[Arrival], long: Lengths, every_s: float, vocab_size: int) -> list[Arrival]:
    """A long prompt every so often as well, as long as others arrive; the figures stay those of the others."""
    rng = np.random.default_rng(len(arrivals))
    times = np.arange(every_s / 2, arrivals[-1].at_s, every_s).tolist()
    extra = [
        Arrival(at_s, rng.integers(0, vocab_size, long.prompt_tokens).tolist(), long.output_tokens, is_measured=False)
        for at_s in times
    ]
    return sorted([*arrivals, *extra], key=lambda arrival: arrival.at_s)
