"""The load of one service, from the scrapes of its pods within a window, and what gateways hold for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from llmservice_operator.scaling.demand import NO_DEMAND, SAMPLE_S, Demand

_CERTAIN = 2.0
"""Standard deviations of the share of requests beyond a quantile, which is binomial."""
_EVENLY = 0.8
"""The running requests of a pod that stays full in one half of the window, as a share of those in the other."""
ENOUGH_FULL_S = 45.0
"""Time that full pods have to be observed for a reading of their capacity, where requests take longer than that."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """Gauges and cumulative counters of one pod at one moment."""

    time_s: float
    running: float
    waiting: float
    kv_usage: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1."""
    admissible: float | None = None
    """Sequences like those before that the KV cache holds at once; None before the first step."""
    finished: float = 0.0
    """Requests that have ended, aborted and failed ones too."""
    answered: float = 0.0
    """How many of them have their whole answer."""
    rejected: float = 0.0
    embedded: float = 0.0
    """Inputs turned into embeddings, which are no requests in the sense of the others."""
    ttft_buckets: tuple[tuple[float, float], ...] = ()
    """(upper bound in seconds, cumulative count), ascending."""
    prompt_buckets: tuple[tuple[float, float], ...] = ()
    """The same of prompts' lengths in tokens."""
    arrived: Demand | None = None
    """Requests and tokens that arrived, refused ones too, in all lanes; None from a server that does not count them."""
    batch_arrived: Demand = NO_DEMAND
    """What of it is in the batch lane."""
    cache_hits: float = 0.0
    """Prompt tokens that were in the prefix cache, of `cache_queries`."""
    cache_queries: float = 0.0
    kv_blocks: int | None = None
    """Usable blocks, the null block apart."""
    weights_bytes: float | None = None
    model_code: str | None = None
    """Whose code computes the model: own or transformers."""
    fallbacks: tuple[str, ...] = ()
    """What the pod computes without our kernels because they failed their check there."""
    batch_waiting: float = 0.0
    """How many of `waiting` are in the batch lane."""
    batch_running: float | None = 0.0
    """How many of `running` are; None where the server does not label them by lane."""
    served: Demand = NO_DEMAND
    """Requests with a first token, the tokens of their prompts, and those generated, of answers that go on too."""


_ENOUGH_ANSWERED = 30
"""Answers from which on a pod's predictions of others are its own."""

Histories = Mapping[str, Sequence[Scrape]]
"""Scrapes of the window by pod name, oldest first; no entry, or an empty one, for a pod that could not be read."""


@dataclass(frozen=True, slots=True)
class PodLoad:
    """One ready pod, now."""

    name: str
    running: float
    waiting: float
    kv_usage: float
    batch_waiting: float = 0.0
    """How many of `waiting` are in the batch lane."""
    batch_running: float | None = 0.0
    """How many of `running` are; None where the server does not report it."""
    work: Demand | None = None
    """What it did, per second; None where that was nothing, or was not observed for long enough."""
    is_full: bool = False
    """Whether requests waited for it at every scrape of the window, and about as many ran."""

    @property
    def in_flight(self) -> float:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Load:
    """The signals of one service. Rates and quantiles are over the window, None where it holds too little."""

    source: str
    pods: tuple[PodLoad, ...]
    missing: tuple[str, ...] = ()
    """Ready pods whose metrics could not be read."""
    arrivals_per_s: float | None = None
    capacity_per_s: float | None = None
    """Requests that one replica finishes while it is full: measured over all time in which one had a queue."""
    finished_per_s: float | None = None
    """Requests that the busiest replica finished, full or not; None where no pod was observed for long enough."""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_certain_s: float | None = None
    """What p99 TTFT is at least, where so few requests of the window may be the slow ones by chance."""
    ttft_count: float = 0.0
    peak_in_flight: float = 0.0
    """The most that any one pod held at any scrape of the window."""
    batch: bool = False
    """Whether the window has requests of the batch lane: rates and quantiles are of all lanes."""
    admissible: float | None = None
    """Sequences that a pod runs at once, of lengths like those before, by the pods' own mean; None: not reported."""
    kv_blocks: int | None = None
    """Usable KV blocks of the smallest pod, as it measured them after loading."""
    weights_bytes: float | None = None
    model_code: str | None = None
    """Whose code computes the model in the pods: own or transformers."""
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What pods compute without our kernels, by pod; only pods that do."""
    quiet_s: float = 0.0
    """For how long the scrapes of all ready pods show no request; 0 where one is there, or a pod could not be read."""
    held: float = 0.0
    """Requests that gateways hold because no pod is ready, or none has room for them."""
    demand: Demand | None = None
    """Per second over the last `SAMPLE_S`, at the pods that were read, without cached prompt tokens.
    None where no server counts arrivals."""
    batch_demand: Demand = NO_DEMAND
    """What of it is in the batch lane."""
    prompt_p99_tokens: float | None = None
    """Length that at least 1 % of the prompts exceed."""
    to_compute: float = 1.0
    """Share of the prompt tokens that was not in the prefix cache."""

    @property
    def running(self) -> float:
        return sum(pod.running for pod in self.pods)

    @property
    def waiting(self) -> float:
        return sum(pod.waiting for pod in self.pods) + self.held

    def with_held(self, requests: int) -> Load:
        """With so many that gateways hold beside those at the pods: then the service is not idle."""
        return replace(self, held=requests, quiet_s=0.0) if requests else self

    @property
    def answered(self) -> float:
        """Share of the ready pods whose metrics could be read; 1 where no pod is ready."""
        ready = len(self.pods) + len(self.missing)
        return len(self.pods) / ready if ready else 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """Of one service, over all gateways."""

    requests: int = 0
    tokens: int = 0
    oldest_s: float = 0.0
    """For how long the first of them has been waiting."""

    def __add__(self, other: Held) -> Held:
        oldest_s = max(self.oldest_s, other.oldest_s)
        return Held(self.requests + other.requests, self.tokens + other.tokens, oldest_s)


def load_of(histories: Histories, ready_pods: Iterable[str], source: str) -> Load | None:
    """The service's load; None where no pod could be read."""
    wanted = sorted(ready_pods)
    read = {name: list(histories[name]) for name in wanted if histories.get(name)}
    if not read:
        return None
    buckets = _increase(read.values(), lambda scrape: scrape.ttft_buckets)
    ttft_count = max(buckets.values(), default=0.0)
    chance = math.sqrt(0.99 * 0.01 / ttft_count) if ttft_count else 0.0
    prompts = _increase(read.values(), lambda scrape: scrape.prompt_buckets)
    hits, queries = (
        sum(increase([getattr(scrape, name) for scrape in one]) for one in read.values())
        for name in ("cache_hits", "cache_queries")
    )
    to_compute = 1 - min(1.0, hits / queries) if queries else 1.0
    demand, batch_demand = _demand([_last(scrapes, SAMPLE_S) for scrapes in read.values()], to_compute)
    return Load(
        source=source,
        pods=tuple(_pod(name, scrapes, to_compute) for name, scrapes in read.items()),
        missing=tuple(name for name in wanted if name not in read),
        arrivals_per_s=_arrivals(read.values()),
        capacity_per_s=_capacity(read.values()),
        finished_per_s=max((rate for one in read.values() if (rate := _finished(one)) is not None), default=None),
        ttft_p50_s=quantile(0.5, buckets),
        ttft_p99_s=quantile(0.99, buckets),
        ttft_certain_s=quantile(max(0.0, 0.99 - _CERTAIN * chance), buckets),
        ttft_count=ttft_count,
        peak_in_flight=max(scrape.running + scrape.waiting for scrapes in read.values() for scrape in scrapes),
        batch=any(scrape.batch_waiting or scrape.batch_running for scrapes in read.values() for scrape in scrapes),
        admissible=_mean([scrapes[-1].admissible for scrapes in read.values()]),
        demand=demand,
        batch_demand=batch_demand,
        prompt_p99_tokens=quantile_at_least(0.99, prompts),
        to_compute=to_compute,
        kv_blocks=min((blocks for one in read.values() if (blocks := one[-1].kv_blocks)), default=None),
        weights_bytes=next((weight for one in read.values() if (weight := one[-1].weights_bytes)), None),
        model_code=next((code for one in read.values() if (code := one[-1].model_code)), None),
        fallbacks={name: scrapes[-1].fallbacks for name, scrapes in read.items() if scrapes[-1].fallbacks},
        quiet_s=min(_quiet_s(scrapes) for scrapes in read.values()) if len(read) == len(wanted) else 0.0,
    )


def _quiet_s(scrapes: Sequence[Scrape]) -> float:
    """Time at the end of the window in which no request was there, ended or was refused, as far as scrapes show it."""
    begins_s = scrapes[-1].time_s
    for before, after in reversed(list(pairwise(scrapes))):
        if _ended(before) != _ended(after) or any((*_in_flight(before), *_in_flight(after))):
            break
        begins_s = before.time_s
    return scrapes[-1].time_s - begins_s


def _ended(scrape: Scrape) -> tuple[float, float, float]:
    return scrape.finished, scrape.rejected, scrape.embedded


def _in_flight(scrape: Scrape) -> tuple[float, float]:
    return scrape.running, scrape.waiting


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pod(name: str, scrapes: Sequence[Scrape], to_compute: float) -> PodLoad:
    now, elapsed_s = scrapes[-1], _elapsed_s(scrapes)
    served = _growth([scrape.served for scrape in scrapes])
    return PodLoad(
        name,
        now.running,
        now.waiting,
        now.kv_usage,
        now.batch_waiting,
        now.batch_running,
        work=served.per_s(elapsed_s, to_compute) if served.output_tokens and elapsed_s >= ENOUGH_FULL_S else None,
        is_full=_is_full(scrapes),
    )


def _is_full(scrapes: Sequence[Scrape]) -> bool:
    """Throughout, and evenly: while a pod fills up, more requests begin than end, and those cost it less than others.

    Of requests that fill the KV cache few run at once, and now these, now those: halves of the time are compared.
    """
    halves = scrapes[: len(scrapes) // 2], scrapes[len(scrapes) // 2 :]
    earlier, later = (sum(scrape.running for scrape in half) / max(1, len(half)) for half in halves)
    return all(scrape.waiting >= 1 for scrape in scrapes) and min(earlier, later) >= _EVENLY * max(earlier, later)


def _arrivals(histories: Collection[Sequence[Scrape]]) -> float | None:
    """Requests per second that arrived: those finished, those refused, and the growth of those in flight.

    Completions alone would hide an overload, which caps them. All pods share one time: the arrivals at a pod that was
    not ready before count over the whole window.
    """
    elapsed_s = max(_elapsed_s(scrapes) for scrapes in histories)
    if elapsed_s <= 0:
        return None
    return max(0.0, sum(_arrived(scrapes) for scrapes in histories)) / elapsed_s


def _arrived(scrapes: Sequence[Scrape]) -> float:
    gone = increase([scrape.finished for scrape in scrapes]) + increase([scrape.rejected for scrape in scrapes])
    held = (scrapes[-1].running + scrapes[-1].waiting) - (scrapes[0].running + scrapes[0].waiting)
    return gone + held


def _capacity(histories: Iterable[Sequence[Scrape]]) -> float | None:
    """Requests per second that one pod finishes while others wait, over all such time of all pods.

    None until as many requests have finished as ran at once: before, hardly any of those that fill the pods can have
    finished. Where they take longer than the window, 45 seconds are enough.
    """
    full_s = finished = at_once = longest_s = 0.0
    for scrapes in histories:
        pairs = [(before, after) for before, after in pairwise(scrapes) if before.waiting >= 1 and after.waiting >= 1]
        time_s = sum(after.time_s - before.time_s for before, after in pairs)
        if time_s <= 0:
            continue
        full_s, longest_s = full_s + time_s, max(longest_s, time_s)
        finished += sum(increase([before.answered, after.answered]) for before, after in pairs)
        at_once += sum(after.running for _, after in pairs) / len(pairs)
    enough = finished >= at_once or longest_s >= ENOUGH_FULL_S
    return finished / full_s if finished and enough else None


def _finished(scrapes: Sequence[Scrape]) -> float | None:
    """What was aborted or failed is no work: it may not even have begun."""
    elapsed_s = _elapsed_s(scrapes)
    return increase([scrape.answered for scrape in scrapes]) / elapsed_s if elapsed_s >= ENOUGH_FULL_S else None


def _elapsed_s(scrapes: Sequence[Scrape]) -> float:
    return scrapes[-1].time_s - scrapes[0].time_s


def _demand(histories: Collection[Sequence[Scrape]], to_compute: float) -> tuple[Demand | None, Demand]:
    """Per second, and what of it is in the batch lane; all pods share one time, as with `_arrivals`."""
    elapsed_s = max(_elapsed_s(scrapes) for scrapes in histories)
    counting = [scrapes for scrapes in histories if scrapes[-1].arrived is not None]
    if elapsed_s <= 0 or not counting:
        return None, NO_DEMAND
    total = _with_learned_outputs(
        [(_growth([scrape.arrived or NO_DEMAND for scrape in scrapes]), scrapes[-1]) for scrapes in counting]
    )
    batch = sum((_growth([scrape.batch_arrived for scrape in scrapes]) for scrapes in counting), start=NO_DEMAND)
    return total.per_s(elapsed_s, to_compute), batch.per_s(elapsed_s, to_compute)


def _with_learned_outputs(arrivals: Iterable[tuple[Demand, Scrape]]) -> Demand:
    """The sum of arrivals at pods, each with its last scrape.

    A pod that has answered few has not learned how long answers are: those of others are assumed. Where there are none,
    they are at least as long as those that have begun are by now.
    """
    learned = new = begun = NO_DEMAND
    for arrived, now in arrivals:
        if now.answered >= _ENOUGH_ANSWERED:
            learned += arrived
        else:
            new, begun = new + arrived, begun + now.served
    if learned.requests > 0:
        return learned + replace(new, output_tokens=learned.output_tokens / learned.requests * new.requests)
    least = begun.output_tokens / begun.requests * new.requests if begun.requests else 0.0
    return replace(new, output_tokens=max(new.output_tokens, least))


def _growth(counters: Sequence[Demand]) -> Demand:
    return Demand(
        increase([one.requests for one in counters]),
        increase([one.prompt_tokens for one in counters]),
        increase([one.output_tokens for one in counters]),
    )


def _last(scrapes: Sequence[Scrape], seconds: float) -> Sequence[Scrape]:
    """The scrapes of the last seconds, at least the last two."""
    end_s = scrapes[-1].time_s
    recent = [scrape for scrape in scrapes if scrape.time_s >= end_s - seconds]
    return recent if len(recent) > 1 else scrapes[-2:]


_Buckets = tuple[tuple[float, float], ...]
"""As of a scrape: upper bounds, ascending, with cumulative counts."""


def _increase(histories: Iterable[Sequence[Scrape]], buckets: Callable[[Scrape], _Buckets]) -> dict[float, float]:
    """How much the buckets of a histogram grew in all pods; where a count drops, a pod restarted from zero.

    An idle pod's scrapes share one object.
    """
    total: dict[float, float] = defaultdict(float)

    def add(first: _Buckets, last: _Buckets) -> None:
        counted = dict(first)
        for bound, count in last:
            total[bound] += count - counted.get(bound, 0.0)

    for scrapes in histories:
        each = [buckets(scrape) for scrape in scrapes]
        first = each[0]
        for before, after in pairwise(each):
            if before is not after and _has_restarted(before, after):
                add(first, before)
                first = ()
        add(first, each[-1])
    return dict(total)


def _has_restarted(before: _Buckets, after: _Buckets) -> bool:
    return len(after) < len(before) or any(now < was for (_, was), (_, now) in zip(before, after, strict=False))


def increase(values: Sequence[float]) -> float:
    """How much a counter grew; a drop is a restart, after which the counter starts at zero."""
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which `share` of the observations lie; None without observations.

    `buckets` maps upper bounds to cumulative counts. Linear within a bucket, and the last finite bound for what lies
    beyond it, as PromQL's histogram_quantile does (https://prometheus.io/docs/prometheus/latest/querying/functions/).
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank = share * total
    lower = seen = 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return lower
            within = buckets[bound] - seen
            return lower + (bound - lower) * ((rank - seen) / within if within else 1.0)
        lower, seen = bound, buckets[bound]
    return lower


def quantile_at_least(share: float, buckets: Mapping[float, float]) -> float | None:
    """The lower bound of the quantile's bucket, which the quantile surely exceeds; None without observations."""
    total = max(buckets.values(), default=0.0)
    return max((bound for bound, count in buckets.items() if count < share * total), default=0.0) if total else None
