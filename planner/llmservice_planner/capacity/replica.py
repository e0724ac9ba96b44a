"""The requests per second that a replica sustains, what limits them, and the latencies at a rate; pure.

Steady state of continuous batching. While B sequences decode, a step with P prompt tokens takes T(B, P). A request is
decoded in `decoded_tokens` steps, and as many prompts begin as end, so that by Little's law

    rate(B) = B / (decoded_tokens x E[T(B, P)])

A step carries at most `max_num_batched_tokens` less B prompt tokens, and of one prompt at most `prefill_chunk_tokens`
unless it is alone. Prompts arrive at random, so that P is none, one or several chunks.

- ITL p99: a token's gap is a step. Where more than 1 % of the steps carry prompt tokens, the 99th percentile of the
  gaps is a step with a chunk, whose size is a percentile of the chunks', or of their sum where several share a step. It
  is held at the full rate: at `UTILISATION` of that, the batch fluctuates as a Poisson variable does, and its 99th
  percentile is close to the mean at the full rate.
- TTFT p99: the steps of the prompt itself, one step that is under way, the wait for prompts before it (M/G/1 with the
  mean of Pollaczek and Khinchine and an exponential tail), and the wait for a sequence's place (M/M/c, Erlang C); see
  Kleinrock, "Queueing Systems", volumes I (sections 3.5, 5.6) and II (section 2.1). It is held at `UTILISATION` of the
  rate, as waits have no bound at the full one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from llmservice_planner.sizing.latency import LatencyModel, StepBatch

UTILISATION = 0.8
"""The share of a replica's capacity to plan for: above it waits grow without bound."""
CapacityLimit = Literal["maxNumSeqs", "kvMemory", "tokenBudget", "compute", "itlTarget", "ttftTarget"]
"""What bounds the rate of a replica:

- `maxNumSeqs`, `kvMemory`: the sequences that decode at once
- `tokenBudget`: every step is full of prompt tokens
- `compute`: the time of the steps; none of the three above would add 5 % if it were doubled
- `itlTarget`, `ttftTarget`: the targets
"""
_TAIL = 0.01
_Z99 = 2.326  # of the normal distribution
_WORTH = 1.05
_MOST_POINTS = 100


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of a replica on average. Raises `ValueError` for a negative number."""

    prompt_tokens: float
    """That are computed: those not in the prefix cache."""
    output_tokens: float
    context_tokens: float
    """In the KV cache of a request that decodes."""
    cached_tokens: float = 0.0
    """Of a prompt, in the prefix cache."""
    prompts: tuple[float, ...] = ()
    """Computed tokens of equally likely prompts, for the percentiles; empty: all are as the mean."""
    peakedness: float = 1.0
    """E[c²] / E[c]² of the contexts c that are in the KV cache at a time; 1: all are as the mean."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "context_tokens", "cached_tokens"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, expected a number that is not negative")

    @classmethod
    def of(cls, lengths: Sequence[tuple[float, float]], prefix_hit_rate: float = 0.0) -> Work:
        """Of requests by their prompt and output tokens, with a share of every prompt in the cache.

        A request with a long output is decoded for longer and weighs more in `context_tokens`.
        """
        count = len(lengths)
        if not count:
            raise ValueError("no lengths are given")
        prompts = sorted(prompt for prompt, _ in lengths)
        points = min(count, _MOST_POINTS)
        output_tokens = sum(output for _, output in lengths)
        context, square = (sum(output * (prompt + output / 2) ** k for prompt, output in lengths) for k in (1, 2))
        mean = sum(prompts) / count
        return cls(
            prompt_tokens=mean * (1 - prefix_hit_rate),
            output_tokens=output_tokens / count,
            context_tokens=context / output_tokens if output_tokens else mean,
            cached_tokens=mean * prefix_hit_rate,
            prompts=tuple(prompts[int((i + 0.5) * count / points)] * (1 - prefix_hit_rate) for i in range(points)),
            peakedness=square * output_tokens / context**2 if context else 1.0,
        )


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Of a replica's engine."""

    max_num_seqs: int
    kv_tokens: float
    """That the KV pool holds."""
    max_num_batched_tokens: int
    """Of a step."""
    prefill_chunk_tokens: int
    """Of one prompt in a step, unless it is alone."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A replica at a rate."""

    num_seqs: float
    """Sequences that decode at once, on average."""
    itl_p99_s: float
    ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """The full rate of a replica; plan for `UTILISATION` of it. All zero where no request meets the targets."""

    requests_per_s: float
    num_seqs: float
    """Sequences that decode at once, at the full rate."""
    itl_s: float
    """p99 at the full rate."""
    ttft_s: float
    """p99 at `UTILISATION` of the full rate; without load where no request meets the targets."""
    limited_by: CapacityLimit


def replica_capacity(
    model: LatencyModel,
    limits: ReplicaLimits,
    work: Work,
    ttft_p99_s: float | None = None,
    itl_p99_s: float | None = None,
) -> ReplicaCapacity:
    """The largest rate within the limits and targets."""
    replica = _Replica(model, limits, work)
    found, limited_by = _largest(replica, ttft_p99_s, itl_p99_s)
    if limited_by in _RELAXED and found and _gains_little(replica, found, limited_by, ttft_p99_s, itl_p99_s):
        limited_by = "compute"
    rate = replica.rate(found)
    point = operating_point(model, limits, work, UTILISATION * rate)
    return ReplicaCapacity(
        requests_per_s=rate,
        num_seqs=found if rate else 0.0,
        itl_s=replica.itl_p99_s(found),
        ttft_s=point.ttft_p99_s if point else math.inf,
        limited_by=limited_by,
    )


def operating_point(
    model: LatencyModel, limits: ReplicaLimits, work: Work, requests_per_s: float
) -> OperatingPoint | None:
    """A replica at a rate, 0 for a request alone; None if it does not sustain the rate within its limits."""
    replica = _Replica(model, limits, work)
    num_seqs = replica.num_seqs_at(requests_per_s)
    if num_seqs is None:
        return None
    return OperatingPoint(
        num_seqs=num_seqs,
        itl_p99_s=replica.itl_p99_s(num_seqs),
        ttft_p99_s=replica.ttft_p99_s(num_seqs, requests_per_s),
    )


def rate_of(model: LatencyModel, limits: ReplicaLimits, work: Work, num_seqs: float) -> float:
    """Requests per second of a replica that decodes so many sequences at once on average, within its limits."""
    replica = _Replica(model, limits, work)
    return replica.rate(min(num_seqs, replica.most))


def _largest(replica: _Replica, ttft_p99_s: float | None, itl_p99_s: float | None) -> tuple[float, CapacityLimit]:
    """The sequences that decode at once at the largest rate, and what bounds them."""
    limited_by, bound = min(replica.bounds.items(), key=lambda item: item[1])
    if itl_p99_s is not None and replica.work.output_tokens > 1:  # a single token has no time between tokens
        most = _last(lambda num_seqs: replica.itl_p99_s(num_seqs) <= itl_p99_s, bound)
        if most < bound:
            limited_by, bound = "itlTarget", most
    if ttft_p99_s is not None and not replica.meets_ttft(0, 0, ttft_p99_s):
        return 0.0, "ttftTarget"
    if ttft_p99_s is not None and bound:
        planned = UTILISATION * replica.rate(bound)
        most = _last(lambda num_seqs: replica.meets_ttft(num_seqs, replica.rate(num_seqs), ttft_p99_s), bound)
        if replica.rate(most) < planned * (1 - 1e-6):
            limited_by, bound = "ttftTarget", _inverse(replica, replica.rate(most) / UTILISATION, bound)
    return bound, limited_by


_RELAXED = ("maxNumSeqs", "kvMemory", "tokenBudget")


def _gains_little(
    replica: _Replica,
    found: float,
    limited_by: CapacityLimit,
    ttft_p99_s: float | None,
    itl_p99_s: float | None,
) -> bool:
    """Whether twice of what limits the rate would add less than 5 % to it."""
    limits = replica.limits
    relaxed = {
        "maxNumSeqs": replace(limits, max_num_seqs=2 * limits.max_num_seqs),
        "kvMemory": replace(limits, kv_tokens=2 * limits.kv_tokens),
        "tokenBudget": replace(
            limits,
            max_num_batched_tokens=2 * limits.max_num_batched_tokens,
            prefill_chunk_tokens=2 * limits.prefill_chunk_tokens,
        ),
    }[limited_by]
    other = _Replica(replica.model, relaxed, replica.work)
    more, _ = _largest(other, ttft_p99_s, itl_p99_s)
    return other.rate(more) < _WORTH * replica.rate(found)


def _last(holds: Callable[[float], bool], most: float) -> float:
    """The largest number of sequences up to `most` for which `holds`, which is true below it; 0 if for none."""
    if holds(most):
        return most
    low, high = 0.0, most
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low > most * 1e-9 else 0.0


def _inverse(replica: _Replica, rate: float, most: float) -> float:
    return _last(lambda num_seqs: replica.rate(num_seqs) <= rate, most)


def _late_share(own_s: list[float], tails: list[tuple[float, float]], target_s: float) -> float:
    """The share of prompts whose first token is later than the target."""
    if any(tail_s == math.inf for _, tail_s in tails):
        return 1.0
    late = 0.0
    for own in own_s:
        slack_s = target_s - own
        late += 1.0 if slack_s < 0 else min(1.0, sum(share * math.exp(-slack_s / tail_s) for share, tail_s in tails))
    return late / len(own_s)


class _Replica:
    """The terms of the formulas above; `num_seqs` is the mean number of sequences that decode at once."""

    def __init__(self, model: LatencyModel, limits: ReplicaLimits, work: Work) -> None:
        self.model = model
        self.limits = limits
        self.work = work
        prompts = [max(1.0, prompt) for prompt in work.prompts or (work.prompt_tokens,)]
        self._prompts = prompts
        size = -(-len(prompts) // _MEAN_POINTS)
        self._few = [sum(group) / len(group) for group in (prompts[i : i + size] for i in range(0, len(prompts), size))]
        self._mean = sum(prompts) / len(prompts)
        self._squares = sum(prompt * prompt for prompt in prompts) / len(prompts)
        self._decoded = max(work.output_tokens - 1, _NO_DECODE)  # the prompt's last step gives the first token

    @cached_property
    def bounds(self) -> dict[CapacityLimit, float]:
        """Of the sequences that decode at once."""
        budget = self.limits.max_num_batched_tokens
        return {
            "maxNumSeqs": self.limits.max_num_seqs,
            "kvMemory": self._kv_places,
            "tokenBudget": budget * self._decoded / (self._decoded + self._mean),
        }

    @property
    def _kv_places(self) -> float:
        """Contexts that the KV cache holds beside the room in which the next prompt does not fit.

        Most of the time that is a long one, so that about half of E[L²] / E[L] tokens is free.
        """
        kv_tokens = self.limits.kv_tokens
        unused = min(self._squares / (2 * self._mean), kv_tokens / 2)
        return (kv_tokens - unused) / max(1.0, self.work.context_tokens)

    @property
    def most(self) -> float:
        return min(self.bounds.values())

    def rate(self, num_seqs: float) -> float:
        return num_seqs / (self._decoded * self.mean_step_s(num_seqs)) if num_seqs else 0.0

    def num_seqs_at(self, rate: float) -> float | None:
        """The sequences that decode at once at a rate; None if it is not sustained."""
        if rate > self.rate(self.most) * (1 + 1e-9):
            return None
        return 0.0 if not rate else _inverse(self, rate, self.most)

    def mean_step_s(self, num_seqs: float) -> float:
        """The mean time between a request's tokens.

        A step has as many prompts' chunks as a Poisson variable; the fuller the steps are, the less they differ.
        """
        if not num_seqs:
            return self._step_s(1)
        mixed, arriving = self._mixed_share(num_seqs, self._chunk(num_seqs)), self._arriving(num_seqs)
        full = min(1.0, arriving / self._room(num_seqs))
        mean_s = full * self._step_s(num_seqs, arriving, self._mean)
        fewest = max(0, math.floor(mixed - 6 * math.sqrt(mixed)))
        share = math.exp(fewest * math.log(mixed) - mixed - math.lgamma(fewest + 1))
        for chunks in range(fewest, math.ceil(mixed + 6 * math.sqrt(mixed)) + 2):
            mean_s += (1 - full) * share * self._step_s(num_seqs, chunks * arriving / mixed, self._mean)
            share *= mixed / (chunks + 1)
        return mean_s

    def itl_p99_s(self, num_seqs: float) -> float:
        """Of steps in which a sequence decodes, so that no prompt is alone."""
        chunk = min(self._room(num_seqs), self.limits.prefill_chunk_tokens)
        mixed = self._mixed_share(num_seqs, chunk)
        if mixed <= _TAIL:
            return self._step_s(max(1.0, num_seqs))
        added = self._step_s(num_seqs, chunk, self._mean) / self._step_s(num_seqs) - 1
        longer = added * self._arriving(num_seqs) / chunk
        tokens = min(self._room(num_seqs), self._chunk_percentile(chunk, mixed, longer))
        return self._step_s(max(1.0, num_seqs), tokens, max(tokens, self._mean))

    def ttft_p99_s(self, num_seqs: float, rate: float) -> float:
        """Solves P(own steps + waits > t) = 1 % over the prompts, with exponential tails of both waits."""
        own_s, tails = self._ttft_terms(num_seqs, rate)
        low, high = 0.0, max(own_s) + 10 * sum(tail_s for _, tail_s in tails)
        if high == math.inf:
            return high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if _late_share(own_s, tails, middle) <= _TAIL else (middle, high)
        return high

    def meets_ttft(self, num_seqs: float, rate: float, target_s: float) -> bool:
        """Whether `ttft_p99_s` is at most the target."""
        return _late_share(*self._ttft_terms(num_seqs, rate), target_s) <= _TAIL

    def _ttft_terms(self, num_seqs: float, rate: float) -> tuple[list[float], list[tuple[float, float]]]:
        """The time of each prompt's own steps, and for each wait the share of requests that wait and their mean."""
        chunk = self._chunk(num_seqs)
        under_way_s = self._step_s(num_seqs)
        own_s = [under_way_s + self._prompt_s(num_seqs, prompt, math.ceil(prompt / chunk)) for prompt in self._prompts]
        if not rate:
            return own_s, []
        return own_s, [*self._place_waits(num_seqs, rate, sum(own_s) / len(own_s)), self._prefill_wait(num_seqs, rate)]

    def _prefill_wait(self, num_seqs: float, rate: float) -> tuple[float, float]:
        """The share of prompts that wait for others, and the mean time that these wait: M/G/1 (Pollaczek, Khinchine).

        A prompt's service is its share of full steps.
        """
        room = self._room(num_seqs)
        token_s = self._step_s(num_seqs, room, max(room, self._mean)) / room
        busy = rate * self._mean * token_s
        if busy >= 1:
            return 1.0, math.inf
        return busy, self._squares * token_s / (2 * self._mean * (1 - busy))

    def _place_waits(self, num_seqs: float, rate: float, own_s: float) -> Iterator[tuple[float, float]]:
        """The share of requests that wait for a place among the sequences or in the KV cache, and the mean of these.

        M/M/c (Erlang C). A place is taken from the first step of the prompt on, which takes `own_s`. Contexts differ:
        the cache has fewer places, taken by fewer requests, by the peakedness of the contexts (Hayward's approximation;
        Fredericks, Bell System Technical Journal 59(6), 1980).
        """
        taken = num_seqs + rate * own_s
        held_s = self._decoded * self.mean_step_s(num_seqs) + own_s
        peakedness = self.work.peakedness
        for places, load in (
            (self.bounds["maxNumSeqs"], taken),
            (self.bounds["kvMemory"] / peakedness, taken / peakedness),
        ):
            servers = max(1, math.floor(min(places, 4 * load + 100)))  # with more, practically none waits
            if load >= servers:
                yield 1.0, math.inf
                continue
            blocked = 1.0
            for count in range(1, servers + 1):
                blocked = load * blocked / (count + load * blocked)
            waits = blocked / (1 - load / servers * (1 - blocked))
            if waits > _NEGLIGIBLE:
                yield waits, held_s / (servers - load)

    def _room(self, num_seqs: float) -> float:
        """Prompt tokens of a step at most."""
        return max(1.0, self.limits.max_num_batched_tokens - num_seqs)

    def _chunk(self, num_seqs: float) -> float:
        """Tokens of one prompt in a step at most, by the mean number of its steps.

        It is alone, and takes whole steps, with the chance that no other sequence is there (Poisson).
        """
        room, alone = self._room(num_seqs), math.exp(-num_seqs)
        chunk = min(room, self.limits.prefill_chunk_tokens)
        return 1 / (alone / room + (1 - alone) / chunk)

    def _arriving(self, num_seqs: float) -> float:
        """Prompt tokens of a step on average."""
        return num_seqs * self._mean / self._decoded

    def _mixed_share(self, num_seqs: float, chunk: float) -> float:
        """Steps with prompt tokens, as a share; above 1 if each prompt had its own."""
        return num_seqs / self._decoded * sum(max(1.0, prompt / chunk) for prompt in self._few) / len(self._few)

    def _chunk_percentile(self, most: float, mixed: float, longer: float) -> float:
        """Prompt tokens of a step that 1 % of the steps exceed, of `mixed` chunks in each on average, `most` in one.

        While hardly any step has two chunks (Poisson), a percentile of the chunks. Otherwise that of their sum, by the
        first terms of an expansion (Cornish & Fisher, "Moments and cumulants in the specification of distributions",
        Revue de l'Institut International de Statistique 5(4), 1938). Prompts lengthen a step by the ratio `longer`, in
        which more of them arrive: so the number of chunks is that of a linear birth and death process with immigration,
        a negative binomial variable (Kendall, "On the generalized birth-and-death process", Annals of Mathematical
        Statistics 19(1), 1948).
        """
        chunks = sorted((prompt / max(1.0, prompt / most), max(1.0, prompt / most)) for prompt in self._prompts)
        passed = list(accumulate(steps for _, steps in chunks))
        share = 1 - _TAIL / min(1.0, mixed)
        single: float = chunks[min(bisect_left(passed, share * passed[-1]), len(chunks) - 1)][0]
        if 1 - math.exp(-mixed) * (1 + mixed) <= _TAIL:
            return single
        size, squares, cubes = (sum(steps * pow(size, k) for size, steps in chunks) / passed[-1] for k in (1, 2, 3))
        deviation = math.sqrt(mixed * (squares + longer * size * size))
        third = mixed * (cubes + longer * size * (3 * squares + 2 * longer * size * size))
        skewness = third / pow(deviation, 3)
        return max(single, mixed * size + deviation * (_Z99 + (_Z99 * _Z99 - 1) / 6 * skewness))

    def _prompt_s(self, num_seqs: float, prompt: float, steps: float) -> float:
        """Of the steps that compute a prompt."""
        return steps * self._step_s(num_seqs, prompt / steps, prompt)

    def _step_s(self, num_seqs: float, chunk: float = 0.0, prompt: float = 0.0) -> float:
        """Of a step with `chunk` tokens of prompts of `prompt` tokens."""
        if not chunk:
            return self.model.seconds(StepBatch(num_seqs, num_seqs * self.work.context_tokens))
        cached = self.work.cached_tokens * prompt / self._mean
        return self.model.seconds(
            StepBatch(
                num_seqs,
                num_seqs * self.work.context_tokens,
                prompt_tokens=chunk,
                prompt_chunks=max(1.0, chunk / prompt),
                attention_pairs=chunk * (cached + (prompt + 1) / 2),
            )
        )


_MEAN_POINTS = 20
_NEGLIGIBLE = 1e-9
_NO_DECODE = 1e-3  # decode steps of a request whose answer is one token, as formulas divide by them
