"""Drives a server with batches of known composition and measures the time of their steps.

Prompts are random words, so that no prefix of theirs is in a cache. A step's time is measured as clients see it: the
gap between tokens of the requests that run, and the time to the first token of a prompt that is alone. A server of ours
reports the sums of its own steps as well (`GET /sizing`), from which the same follows without the way through HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from llmservice_bench.calibration.fit import Sample
from llmservice_bench.calibration.server_steps import StepSums, fetch_step_sums, samples_between
from llmservice_bench.client import Target, TargetError, WordRate, make_prompt, measure_word_rate, send
from llmservice_bench.record import RequestRecord
from llmservice_planner.sizing.latency import StepBatch, attention_pairs

_LEAST_DECODE_S = 0.6
"""A decode phase lasts about so long, within the bounds on its steps."""
_LEAST_STEPS, _MOST_STEPS = 12, 96
_WINDOWS = 3
"""A decode phase is divided into so many samples, so that an interruption spoils one of them."""
_SPARE_TOKENS = 8
_ROUNDS = 3
_MOST_SHARE = 0.2
"""Of the time, for one phase: on a slow server, 16 prompts of 1536 tokens would leave too little for the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes."""

    max_num_seqs: int
    max_model_len: int
    step_tokens: int
    """Prompt tokens of a step at most, for prompts whose steps the server does not report."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_seqs` requests decode with prompts of `prompt_tokens`; then, if any, a prompt of `joining_tokens` joins.

    Without sequences, the prompt is alone.
    """

    num_seqs: int
    prompt_tokens: int
    joining_tokens: int = 0

    def __str__(self) -> str:
        if not self.num_seqs:
            return f"a prompt of {self.joining_tokens} tokens"
        decoding = f"{self.num_seqs} decoding after {self.prompt_tokens} tokens"
        return f"{decoding}, and a prompt of {self.joining_tokens}" if self.joining_tokens else decoding


def phases(limits: Limits) -> list[Phase]:
    """The compositions to measure, the most informative ones first."""
    longest = limits.max_model_len - _MOST_STEPS - 4 * _SPARE_TOKENS
    lengths = [length for length in (32, 128, 512, 1024, 2048, 4096) if length <= longest]
    if 64 < longest < 2048:
        lengths.append(longest)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= limits.max_num_seqs]
    if sizes[-1] < limits.max_num_seqs <= 256:
        sizes.append(limits.max_num_seqs)
    short, medium, long = (min(length, longest) for length in (64, 512, 1536))
    alone = [Phase(0, 0, length) for length in lengths]
    decode = [Phase(size, short) for size in sizes]
    contexts = [Phase(size, length) for size in sizes[2::2] or sizes for length in (medium, long)]
    mixed = [Phase(size, short, length) for size in sizes[2::2] or sizes for length in lengths[1:3]]
    return list(dict.fromkeys(_interleaved(alone, decode, mixed, contexts)))


def _interleaved(*groups: Sequence[Phase]) -> Iterator[Phase]:
    """From small to large in all groups at once, so that a slow server has been measured in each of them."""
    for index in range(max(map(len, groups))):
        for group in groups:
            if index < len(group):
                yield group[index]


@dataclass(slots=True)
class _Stream:
    """One request: its record, and when its chunks of output came."""

    record: RequestRecord = field(default_factory=lambda: RequestRecord(0.0, 0))
    started_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    _ended: bool = False
    _reached: dict[int, asyncio.Event] = field(default_factory=dict)

    def on_piece(self) -> None:
        self.times_s.append(time.perf_counter())
        if event := self._reached.get(len(self.times_s)):
            event.set()

    async def has(self, pieces: int) -> None:
        """Returns when so many chunks have come, or the request has ended."""
        if len(self.times_s) < pieces and not self._ended:
            await self._reached.setdefault(pieces, asyncio.Event()).wait()

    def end(self) -> None:
        self._ended = True
        for event in self._reached.values():
            event.set()

    @property
    def tokens_per_piece(self) -> float:
        return self.record.output_tokens / max(1, len(self.times_s))


@dataclass(slots=True)
class Measurement:
    """Of one run. `skipped`: phases that the time did not suffice for."""

    samples: list[Sample] = field(default_factory=list)
    done: list[Phase] = field(default_factory=list)
    skipped: list[Phase] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    from_server: bool = False
    """Whether the server reports its steps."""


@dataclass(slots=True)
class Driver:
    """Sends the requests of phases to one server."""

    session: aiohttp.ClientSession
    target: Target
    rate: WordRate
    limits: Limits
    rng: np.random.Generator
    steps_url: str | None
    """Of the steps' sums; None: the server has none."""
    on_phase: Callable[[Phase], None]
    measured: Measurement = field(default_factory=Measurement)
    prompt_s: dict[int, float] = field(default_factory=dict)
    """The time to the first token by the length of the prompt."""
    step_s: dict[int, float] = field(default_factory=dict)
    """The time of a decode step by the number of sequences."""

    async def run(self, wanted: Sequence[Phase], seconds: float) -> Measurement:
        """All phases of no more than a fifth of the time, then again for as long as it lasts, at most three times."""
        ends_at = time.perf_counter() + seconds
        await self._warm_up()
        for count, phase in enumerate(cycle(wanted)):
            if count >= _ROUNDS * len(wanted):
                break
            estimate_s = self._estimate_s(phase)
            if estimate_s > _MOST_SHARE * seconds or time.perf_counter() + estimate_s > ends_at:
                if count < len(wanted):
                    self.measured.skipped.append(phase)
                elif time.perf_counter() > ends_at:
                    break
                continue
            self.on_phase(phase)
            await self._measure(phase)
            if count < len(wanted):
                self.measured.done.append(phase)
        return self.measured

    async def _warm_up(self) -> None:
        """Two decoding requests and a prompt, for connections, kernels and the estimates of the phases' time."""
        for phase in (Phase(2, 32), Phase(0, 0, 64)):
            await self._measure(phase)
        self.measured.samples.clear()

    def _estimate_s(self, phase: Phase) -> float:
        """From the longest prompt so far, whose overhead per token is the least, and the decode steps so far."""
        prompts = phase.num_seqs * phase.prompt_tokens + phase.joining_tokens
        longest = max(self.prompt_s, default=1)
        token_s = self.prompt_s.get(longest, 0.0) / longest
        return prompts * token_s + self._steps(phase) * self._step_s(phase.num_seqs)

    def _step_s(self, num_seqs: int) -> float:
        """Of the closest smaller batch, and growing with the sequences, which overestimates."""
        known = [size for size, seconds in self.step_s.items() if size <= num_seqs and seconds]
        return self.step_s[max(known)] * num_seqs / max(known) if known else 0.0

    def _steps(self, phase: Phase) -> int:
        if not phase.num_seqs:
            return 1
        steps = round(_LEAST_DECODE_S / max(1e-4, self._step_s(phase.num_seqs)))
        return min(_MOST_STEPS, max(_LEAST_STEPS, steps))

    async def _measure(self, phase: Phase) -> None:
        if phase.num_seqs == 0:
            await self._measure_prompt(phase)
        else:
            await self._measure_decode(phase)

    async def _measure_prompt(self, phase: Phase) -> None:
        before, stream = await self._sums(), _Stream()
        await self._send(stream, phase.joining_tokens, 1)
        if not self._succeeded(stream):
            return
        tokens, seconds = stream.record.prompt_tokens, stream.record.ttft_s
        self.prompt_s[tokens] = seconds
        reported = samples_between(before, await self._sums(), str(phase))
        steps = [sample.batches[0] for sample in reported if sample.kind == "prefill"]
        if steps:
            batches = (steps[0],) * max(1, round(tokens / steps[0].prompt_tokens))
        else:
            chunks = self.limits.step_tokens
            batches = tuple(
                StepBatch(0, 0, size, 1, attention_pairs(start, size))
                for start in range(0, tokens, chunks)
                for size in (min(chunks, tokens - start),)
            )
        self.measured.samples += [Sample("prefill", batches, seconds, 1, str(phase)), *reported]

    async def _measure_decode(self, phase: Phase) -> None:
        """All requests decode between the last one's first token and the first one's end."""
        steps = self._steps(phase)
        streams = [_Stream() for _ in range(phase.num_seqs)]
        joined, sums = _Stream(), []
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(self._send(stream, phase.prompt_tokens, steps + _SPARE_TOKENS))
            await asyncio.gather(*(stream.has(1) for stream in streams))
            sums.append(await self._sums())
            if phase.joining_tokens:
                await self._send(joined, phase.joining_tokens, 1)
                sums.append(await self._sums())
            else:
                for part in range(1, _WINDOWS):
                    await streams[-1].has(1 + part * steps // _WINDOWS)
                    sums.append(await self._sums())
        if not phase.joining_tokens:
            sums.append(await self._sums())
        failed = [stream for stream in (*streams, joined) if not self._succeeded(stream)]
        if failed:
            return
        reported = [sample for pair in pairwise(sums) for sample in samples_between(*pair, str(phase))]
        self.measured.samples += reported
        decode = self._decode_samples(streams, str(phase))
        self.step_s[phase.num_seqs] = median(sample.seconds for sample in decode) if decode else 0.0
        if not reported:
            self.measured.samples += (
                self._mixed_samples(streams, joined, str(phase)) if phase.joining_tokens else decode
            )

    def _decode_samples(self, streams: Sequence[_Stream], phase: str) -> list[Sample]:
        """Of the time in which all requests decode, in windows."""
        begin, end = max(s.times_s[0] for s in streams), min(s.times_s[-1] for s in streams)
        samples = []
        for low, high in pairwise(np.linspace(begin, end, _WINDOWS + 1)):
            tokens = sum(sum(low < at <= high for at in s.times_s) * s.tokens_per_piece for s in streams)
            steps = tokens / len(streams)
            if steps >= _LEAST_STEPS / _WINDOWS / 2:
                batch = StepBatch(len(streams), self._context(streams, (low + high) / 2))
                samples.append(Sample("decode", (batch,), (high - low) / steps, phase=phase))
        return samples

    def _mixed_samples(self, streams: Sequence[_Stream], joined: _Stream, phase: str) -> list[Sample]:
        """The step that computes the prompt delays the token of every request that decodes."""
        tokens = joined.record.prompt_tokens
        arrived, first = joined.started_s, joined.started_s + joined.record.ttft_s
        gaps = []
        for stream in streams:
            until = first + median([high - low for low, high in pairwise(stream.times_s)] or [0.0])
            near = [high - low for low, high in pairwise(stream.times_s) if arrived <= high <= until]
            gaps.append(max(near, default=0.0))
        if tokens > self.limits.step_tokens or not all(gaps):
            return []
        context = self._context(streams, (arrived + first) / 2)
        batch = StepBatch(len(streams), context, tokens, 1, attention_pairs(0, tokens))
        return [Sample("mixed", (batch,), median(gaps), phase=phase)]

    def _context(self, streams: Sequence[_Stream], at: float) -> float:
        """The tokens of all requests at that time."""
        return sum(s.record.prompt_tokens + sum(each <= at for each in s.times_s) * s.tokens_per_piece for s in streams)

    async def _sums(self) -> StepSums:
        if self.steps_url is None:
            return {}
        sums = await fetch_step_sums(self.session, self.steps_url)
        self.measured.from_server = self.measured.from_server or bool(sums)
        return sums

    async def _send(self, stream: _Stream, prompt_tokens: int, max_tokens: int) -> None:
        prompt = make_prompt(self.rate.words(prompt_tokens), self.rng)
        stream.record.prompt_tokens = prompt_tokens
        stream.started_s = time.perf_counter()
        await send(self.session, self.target, prompt, max_tokens, stream.record, stream.on_piece)
        stream.end()

    def _succeeded(self, stream: _Stream) -> bool:
        error = stream.record.error
        if error is not None:
            self.measured.failures[error] = self.measured.failures.get(error, 0) + 1
        return error is None


async def measure(
    session: aiohttp.ClientSession,
    target: Target,
    limits: Limits,
    *,
    seconds: float,
    steps_url: str | None,
    seed: int,
    on_phase: Callable[[Phase], None],
) -> Measurement:
    """Measures for about `seconds`, and calls `on_phase` before each phase. Raises `TargetError`."""
    rng = np.random.default_rng(seed)
    rate = await measure_word_rate(session, target, rng)
    driver = Driver(session, target, rate, limits, rng, steps_url, on_phase)
    measured = await driver.run(phases(limits), seconds)
    if not measured.samples:
        reasons: Any = ", ".join(f"{count} x {reason}" for reason, count in measured.failures.items())
        raise TargetError(f"no request was served ({reasons or 'no time'}): is the model's name right?")
    return measured
